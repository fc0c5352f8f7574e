"""Faults put into our kernels' sources, one at a time: each is seen by a test of this directory, at small sizes."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from types import FunctionType

import pytest
import torch

from kimi_k2.nki import kernels
from nki_emulator.errors import NkiError

from . import test_layers_kernel as layers
from . import test_layers_real_widths as widths


def mutant(file: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module (of our kernels by its name alone) with one piece of its text replaced: its functions get the code."""
    module = importlib.import_module(file if "." in file else f"{kernels.__name__}.{file}")
    text = inspect.getsource(module)
    assert text.count(old) == 1, f"expected {old!r} once in {file}.py, found {text.count(old)}"
    changed = dict(vars(module))
    exec(compile(text.replace(old, new), f"{file}.py", "exec"), changed)
    pairs = [(value, changed[name]) for name, value in vars(module).items()]
    for value, other in pairs:
        if isinstance(value, type) and value.__module__ == module.__name__:
            pairs += [(one, vars(other)[name]) for name, one in vars(value).items()]
        value, other = (getattr(one, "function", one) for one in (value, other))
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            monkeypatch.setattr(value, "__code__", other.__code__)


Case = layers.Case
CHECKS: dict[str, Callable[[], None]] = {
    "pages": lambda: layers.test_layers_in_float32(Case(2, apart=True)),
    "groups": lambda: widths.test_a_projection_of_more_than_a_bank_of_sums(),
    "elsewhere": lambda: widths.test_two_layers_of_one_rank(torch.float32, False, 64, 256, 1e-5),
    "whole": lambda: layers.test_layers_in_float32(Case(1)),
    "absorbed": lambda: layers.test_layers_in_float32(Case(2)),
    "drafts": lambda: layers.test_layers_in_float32(Case(2, 2, cores=1)),
    "grouped": lambda: layers.test_layers_in_float32(Case(2, 2, group=4)),
    "fp8": lambda: layers.test_layers_in_float32(Case(2, group=2, stored="fp8")),
}

ARGUMENTS, SHARDING = "kimi_k2.neuron.layer_arguments", "kimi_k2.sharding"
# (file, text, what stands there instead, the check that sees it)
FAULTS: tuple[tuple[str, str, str, str], ...] = (
    ("columns", "scale=1.0 / size", "scale=1.0 / BLOCK", "whole"),
    ("columns", "offset=(begin * out.shape[1] + first) * BLOCK", "offset=begin * out.shape[1] * BLOCK", "whole"),
    ("columns", "place = (begin + chunk) * BLOCK", "place = chunk * BLOCK if begin else begin * BLOCK", "pages"),
    ("exchange", "data2=received", "data2=tile", "whole"),
    ("exchange", "first = nl.program_id() * each", "first = 0", "absorbed"),
    ("linear", "accumulate=chunk > 0", "accumulate=chunk > 1", "whole"),
    ("linear", "offset=first * chunks", "offset=0", "groups"),
    ("projections", "offset=1 - element", "offset=element", "whole"),
    ("projections", "group, row = self.heads + head", "group, row = head", "fp8"),
    ("latent_attention", "op0=nl.greater_equal, operand0=limit", "op0=nl.greater, operand0=limit", "absorbed"),
    ("latent_attention", "offset=self.first * BLOCK", "offset=0", "absorbed"),
    ("latent_attention", "channel_multiplier=self.count", "channel_multiplier=1", "absorbed"),
    ("latent_attention", "accumulate=tile > 0", "accumulate=tile > 1", "absorbed"),
    ("latent_attention", "op1=nl.add, operand1=MASKED\n", "op1=nl.add, operand1=0.0\n", "grouped"),
    ("latent_cache", "0 : out.shape[1], sequence, :]", "0 : out.shape[1], 0, :]", "absorbed"),
    ("latent_attention", "offset=(count + token) * heads", "offset=0", "absorbed"),
    ("experts", "[[-2 * self.per, pairs]", "[[-2, pairs]", "fp8"),
    ("experts", "[-1, self.stack], [0, rows]]", "[0, self.stack], [0, rows]]", "whole"),
    ("experts", "moving=value, accumulate=True", "moving=value, accumulate=False", "elsewhere"),
    ("experts", "op=nl.silu, data=projected", "op=nl.copy, data=projected", "whole"),
    ("experts", "op0=nl.multiply, operand0=weights", "op0=nl.multiply, operand0=1.0", "whole"),
    ("experts", "op0=nl.less, operand0=first", "op0=nl.less_equal, operand0=first", "elsewhere"),
    ("shared_expert", "half * blocks + first", "first", "elsewhere"),
    ("column_router", "op0=nl.add, operand0=_NORM_GUARD", "op0=nl.add, operand0=1e-2", "whole"),
    ("latent_cache", "(first * BLOCK + begin) // each", "begin // each", "pages"),
    ("latent_cache", "low, size = number * rope // 2", "low, size = 0", "pages"),
    ("latent_cache", "chunk * BLOCK % each", "0", "pages"),
    ("latent_cache", "[1, many // each]], offset=offset", "[1, many // each]], offset=0", "pages"),
    ("layers", "runs.shape[1] * each, None", "runs.shape[1] * each // 2, None", "pages"),
    ("latent_attention", "[1, tokens], [0, each]]", "[0, tokens], [0, each]]", "drafts"),
    ("latent_attention", "value=MASKED)\n        return scores", "value=0.0)\n        return scores", "drafts"),
    ("latent_cache", "self.tokens, self.heads = tokens,", "self.tokens, self.heads = 1,", "drafts"),
    ("layer_attention", "q_b_scales = q_b_scales[core]", "q_b_scales = q_b_scales[0]", "fp8"),
    ("residual", "if whole < self.count:", "if whole < 0:", "whole"),
    # In the whole-layer kernel, which four ranks run.
    ("residual", "add_over_cores(self.total)", "pass", "whole"),
    ("residual", "(self.first + block) * BLOCK", "block * BLOCK", "whole"),
    ("residual", "scalar_offset=ncc.rank_id(), ", "", "whole"),
    ("column_router", "data2=stretched(self.bias, tokens)", "data2=scores", "whole"),
    ("column_router", "accumulate=factor == None or head > 0", "accumulate=head > 0", "absorbed"),
    ("column_router", "finish(out, sums, factor, residual)", "finish(out, sums, factor, None)", "whole"),
    ("layer_attention", "batch * heads)), shares)", "batch * heads)))", "absorbed"),
    ("layer_attention", "summand[:, 0:chunks, :], share, factor)", "summand[:, 0:chunks, :], share)", "whole"),
    ("latent_attention", "data1=shares, data2=self.others", "data1=shares, data2=self.maxima", "absorbed"),
    ("latent_attention", "data1=self.negative, data2=self.maxima", "data1=self.maxima, data2=self.negative", "whole"),
    ("expanded_attention", "accumulate=tile > 0", "accumulate=tile > 1", "whole"),
    ("expanded_attention", "self._through(self.w_uv,", "self._through(self.turned_uk,", "whole"),
    ("expanded_attention", "op1=nl.add, operand1=negative)", "op1=nl.add, operand1=0.0)", "whole"),
    ("expanded_attention", "data1=queries.new_key, data2=rotary", "data1=rotary, data2=rotary", "whole"),
    ("projections", "operand0=self.eps / size", "operand0=self.eps", "whole"),
    ("residual", "operand0=1.0 / summands", "operand0=2.0 / summands", "whole"),
    ("layers", "numbers(index[:, begin:end]", "numbers(index[:, 0 : self.routed.slots]", "whole"),
    ("layer_attention", "part = mine if nl.program_id() == core", "part = mine if core == 0", "grouped"),
    ("layer_attention", "src=in_rows)", "src=turned[:, 0:1])", "grouped"),
    ("layer_attention", "op0=nl.multiply, operand0=total", "op0=nl.multiply, operand0=top", "grouped"),
    # In what both classes give it, and in the ranks' files.
    (ARGUMENTS, "config.softmax_scale", "config.qk_head_dim**-0.5", "whole"),
    (ARGUMENTS, "config.routed_scaling_factor", "1.0", "whole"),
    (ARGUMENTS, "config.latent_norm_eps", "config.rms_norm_eps", "whole"),
    (ARGUMENTS, "\"eps\": config.rms_norm_eps", "\"eps\": config.latent_norm_eps", "whole"),
    (ARGUMENTS, "(-sines, sines)", "(sines, -sines)", "whole"),
    (ARGUMENTS, "((cosines, cosines), (-sines, sines))", "((sines, sines), (-cosines, cosines))", "whole"),
    (ARGUMENTS, "_NORMS.items()", "{**_NORMS, 'q_norm': _NORMS['kv_norm']}.items()", "fp8"),
    (ARGUMENTS, "_NORMS.items()", "{**_NORMS, 'norm': 'input_layernorm'}.items()", "whole"),
    (ARGUMENTS, "\"bias\": held[\"mlp.router", "\"bias\": 0 * held[\"mlp.router", "whole"),
    *(
        (ARGUMENTS, "field: held[name] for field", f"field: held[name] * (field != '{field}') for field", "whole")
        for field in ("early_residual", "early_heads", "next_residual", "next_experts", "next_shared")
    ),
    (ARGUMENTS, "tensors[field].squeeze(0)  # a stack", "tensors[field].squeeze(0).flip(-1)  # a stack", "whole"),
    *(
        (ARGUMENTS, "weight = held[f\"{name}.weight\"]",
            f"weight = (lambda w: w.flip(0) if field == '{field}' else w)(held[f\"{{name}}.weight\"])", "grouped")
        for field in ("q_b", "w_uk")
    ),
    (f"{SHARDING}.attention_tiles", "w_uk, w_uv = weight", "w_uv, w_uk = weight", "whole"),
    (f"{SHARDING}.attention_tiles", ".permute(2, 1, 0), factors", ".permute(2, 1, 0).flip(1), factors", "whole"),
    (f"{SHARDING}.early_router", "* gamma.to(DTYPE)", "", "whole"),
    (f"{SHARDING}.early_router", "weight.to(DTYPE).T", "torch.ones_like(weight).to(DTYPE).T", "whole"),
    (f"{SHARDING}.early_qkv_a", ".mul_(gamma)", "", "whole"),
    (f"{SHARDING}.convert", "self.config, layer + 1, self.tensors_of", "self.config, layer, self.tensors_of", "whole"),
    (f"{SHARDING}.early_qkv_a", "down.T", "torch.ones_like(down).T", "whole"),
)  # fmt: skip


# Every fifth fault always; all of them take some minutes of CPU.
ALL = bool(os.environ.get("KIMI_K2_SLOW"))


@pytest.mark.parametrize("check", [*CHECKS][: None if ALL else 2])
def test_sound_kernels_pass_at_small_sizes(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant("column_router", "_NORM_GUARD = 1e-20", "_NORM_GUARD = 1e-20", monkeypatch)
    CHECKS[check]()


@pytest.mark.parametrize(("file", "old", "new", "check"), FAULTS[:: 1 if ALL else 5])
def test_a_fault_is_seen(file: str, old: str, new: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(file, old, new, monkeypatch)
    if SHARDING in file:  # the files are made anew
        monkeypatch.setattr(layers, "converted", layers.converted.__wrapped__)
    with pytest.raises((AssertionError, NkiError)):
        CHECKS[check]()
