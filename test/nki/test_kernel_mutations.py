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

from . import test_experts_kernel as experts
from . import test_layers_kernel as layers
from . import test_mla_kernel as mla
from . import test_router_kernel as router


def mutant(file: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of our kernels with one piece of its text replaced, at small sizes: its functions get the code."""
    module = importlib.import_module(f"{kernels.__name__}.{file}")
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
    for tested in (experts, router):
        monkeypatch.setattr(tested, "HIDDEN", 512)
    monkeypatch.setattr(experts, "BLOCKS", 4)


Case = layers.Case
CHECKS: dict[str, Callable[[], None]] = {
    "latent": lambda: mla.test_attention_in_float32(3, 1024, 8, 2),
    "choose": lambda: router.test_router_at_real_size(4, torch.float32, 8, True, 2),
    "route": lambda: experts.test_experts_in_float32(32, 2, 3, "float32"),
    "route_wide": lambda: experts.test_experts_in_float32(64, 1, 3, "float32"),
    "many": lambda: experts.test_experts_in_float32(64, 2, 9, "float32"),
    "groups": lambda: experts.test_a_projection_of_more_than_a_bank_of_sums(),
    "other_ranks": lambda: experts.test_experts_in_fp8_are_no_farther_than_pytorch(64, 3, 6, 6),
    "share": lambda: experts.test_the_shared_expert_rides_along(32, 3, 2, "float32"),
    "whole": lambda: layers.test_layers_in_float32(Case(1)),
    "absorbed": lambda: layers.test_layers_in_float32(Case(2)),
    "drafts": lambda: layers.test_layers_in_float32(Case(2, 2, cores=1)),
    "grouped": lambda: layers.test_layers_in_float32(Case(2, 2, group=4)),
    "fp8": lambda: layers.test_layers_in_float32(Case(2, group=2, stored="fp8")),
}

# (file, text, what stands there instead, the check that sees it)
FAULTS: tuple[tuple[str, str, str, str], ...] = (
    ("columns", "scale=1.0 / size", "scale=1.0 / BLOCK", "whole"),
    ("columns", "offset=(begin * out.shape[1] + first) * BLOCK", "offset=begin * out.shape[1] * BLOCK", "route"),
    ("columns", "place = (begin + chunk) * BLOCK", "place = chunk * BLOCK if begin else begin * BLOCK", "many"),
    ("exchange", "data2=received", "data2=tile", "route"),
    ("exchange", "first = nl.program_id() * each", "first = 0", "latent"),
    ("linear", "accumulate=chunk > 0", "accumulate=chunk > 1", "whole"),
    ("linear", "offset=first * chunks", "offset=0", "groups"),
    ("projections", "offset=1 - element", "offset=element", "whole"),
    ("projections", "group, place = self.heads + head", "group, place = head", "fp8"),
    ("latent_attention", "op0=nl.greater_equal, operand0=limit", "op0=nl.greater, operand0=limit", "latent"),
    ("latent_attention", "offset=self.first * BLOCK", "offset=0", "latent"),
    ("latent_attention", "channel_multiplier=self.count", "channel_multiplier=1", "latent"),
    ("latent_attention", "accumulate=tile > 0", "accumulate=tile > 1", "latent"),
    ("latent_attention", "op1=nl.add, operand1=MASKED\n", "op1=nl.add, operand1=0.0\n", "grouped"),
    ("latent_cache", "0 : out.shape[1], sequence, :]", "0 : out.shape[1], 0, :]", "latent"),
    ("latent_attention", "offset=(count + token) * heads", "offset=0", "latent"),
    ("halves", "op=nl.subtract", "op=nl.add", "fp8"),
    ("experts", "[[-2 * self.per, pairs]", "[[-2, pairs]", "route"),
    ("experts", "[-1, self.stack], [0, rows]]", "[0, self.stack], [0, rows]]", "route"),
    ("experts", "accumulate=group > 0 or begun\n",
        "accumulate=False\n", "route_wide"),
    ("experts", "op=nl.silu, data=projected", "op=nl.copy, data=projected", "route"),
    ("experts", "op0=nl.multiply, operand0=weights", "op0=nl.multiply, operand0=1.0", "route"),
    ("experts", "op0=nl.less, operand0=first", "op0=nl.less_equal, operand0=first", "other_ranks"),
    ("shared_expert", "half * blocks + first", "first", "share"),
    ("router", "index = largest(choice)", "index = largest(scores)", "choose"),
    ("router", "op0=nl.add, operand0=_NORM_GUARD", "op0=nl.add, operand0=1e-2", "choose"),
    ("router", "accumulate=column > 0", "accumulate=True", "choose"),
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
)  # fmt: skip


# Every fifth fault always; all of them take some minutes of CPU.
ALL = bool(os.environ.get("KIMI_K2_SLOW"))


@pytest.mark.parametrize("check", [*CHECKS][: None if ALL else 2])
def test_sound_kernels_pass_at_small_sizes(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant("router", "_NORM_GUARD = 1e-20", "_NORM_GUARD = 1e-20", monkeypatch)
    CHECKS[check]()


@pytest.mark.parametrize(("file", "old", "new", "check"), FAULTS[:: 1 if ALL else 5])
def test_a_fault_is_seen(file: str, old: str, new: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(file, old, new, monkeypatch)
    with pytest.raises((AssertionError, NkiError)):
        CHECKS[check]()
