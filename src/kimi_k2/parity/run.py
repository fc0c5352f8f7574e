"""Runs a checkpoint on a backend by name.

They run a model and show its points: the plain model (cpu, cuda) and transformers. NxDI is in `nxdi`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.device import check_device
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops.collective import gather_last
from kimi_k2.parallel.ranks import load_ranks
from kimi_k2.parity.nxdi import run_nxdi
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.parity.trace import NORMS, Inputs, ParityError, Trace, small_activations
from kimi_k2.plan.deployment import Deployment

Emit = Callable[[str, Tensor], None]

# Modules whose output is a point of the same name, in our model and in transformers' alike.
_OUTPUTS = (
    "input_layernorm", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.o_proj", "post_attention_layernorm",
    "mlp.shared_experts", "mlp",
)  # fmt: skip


def _rows(value: Tensor) -> Tensor:
    """[1, S, ...] or [S, ...] to [S, width]."""
    return value.reshape(-1, value.shape[-1]) if value.dim() < 4 else value.flatten(0, 1).flatten(1)


def _gate(output: tuple[Tensor, ...], emit: Emit, layer: str) -> None:
    indices = next(value for value in output if not value.is_floating_point())
    # transformers 5.x also returns the logits, one an expert; the weights are one a choice.
    weights = next(value for value in output if value.is_floating_point() and value.shape == indices.shape)
    ordered, order = indices.sort(dim=-1)
    emit(f"{layer}.mlp.gate.selection", ordered)
    emit(f"{layer}.mlp.gate.weights", weights.gather(-1, order))


@contextmanager
def _hooked(decoder: nn.Module, emit: Emit) -> Iterator[ExitStack]:
    """Emit the points that are outputs (or an input) of modules, until the stack that removes the hooks ends."""
    with ExitStack() as hooks:
        for name, module in decoder.named_modules():
            layer, _, inner = name.removeprefix("layers.").partition(".")
            if name in ("embed_tokens", "norm") or inner in _OUTPUTS or (layer.isdecimal() and not inner):
                point = name if inner or not layer.isdecimal() else f"{name}.output"
                hook = module.register_forward_hook(lambda _m, _i, out, at=point: emit(at, _rows(_first(out))))
                hooks.callback(hook.remove)
            if inner == "self_attn.o_proj":
                attention = f"layers.{layer}.self_attn.attention"
                before = module.register_forward_pre_hook(lambda _m, i, at=attention: emit(at, _rows(i[0])))
                hooks.callback(before.remove)
            if inner == "mlp.gate":
                gate = module.register_forward_hook(lambda _m, _i, out, at=f"layers.{layer}": _gate(out, emit, at))
                hooks.callback(gate.remove)
        yield hooks


def _probe_norms(decoder: nn.Module, emit: Emit) -> None:
    """Emit what each norm makes of activations so small that its epsilon matters."""

    def probe(norm: nn.Module, point: str) -> None:
        weight = norm.get_parameter("weight")
        emit(f"{point}.small", norm(small_activations(len(weight)).to(weight)))

    for number, layer in enumerate(decoder.get_submodule("layers").children()):
        for name in NORMS:
            probe(layer.get_submodule(name), f"layers.{number}.{name}")
    probe(decoder.get_submodule("norm"), "norm")


def _first(output: Any) -> Tensor:
    out: Tensor = output[0] if isinstance(output, tuple) else output
    return out


class _Recorder:
    """Puts emitted values into a trace, under the phase that runs; derives the routed experts' part of an MoE."""

    def __init__(self, inputs: Inputs) -> None:
        self.trace, self.phase = Trace(inputs), "prefill"
        self._shared: dict[str, Tensor] = {}

    def emit(self, point: str, value: Tensor) -> None:
        """Take a point's rows."""
        value = combine(point, value)
        if point.endswith("mlp.shared_experts"):
            self._shared[point.removesuffix(".shared_experts")] = value
        elif point in self._shared:
            self.trace.add(self.phase, f"{point}.experts", value - self._shared.pop(point))
        self.trace.add(self.phase, point, value)


@torch.inference_mode()
def run_plain(model: KimiK2ForCausalLM, inputs: Inputs) -> Trace:
    """The plain model, on the device it is on; over ranks, see `combine`.

    Args:
        model: what is run.
        inputs: tokens, and which points are kept.
    """
    recorder, length = _Recorder(inputs), len(inputs.prompt) + len(inputs.forced)
    cache = model.new_cache(1, length)
    device = model.lm_head.weight.device
    rotary = model.model.rotary

    def turned(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(positions, dtype)
        recorder.emit("rope.cos_sin", _rows(torch.cat((cos, sin), dim=-1)))
        return cos, sin

    with model.computing():
        _probe_norms(model.model, recorder.emit)
    try:
        model.model.rotary = turned  # type: ignore[assignment]
        with _hooked(model.model, recorder.emit):
            for recorder.phase, tokens, start in inputs.calls():
                positions = torch.arange(start, start + len(tokens), device=device)
                # Of a prompt only the last logits say what comes next; the others are as large and tell no more.
                recorder.emit("lm_head", model(torch.tensor([tokens], device=device), positions[None], cache)[0, -1:])
                _emit_cache(cache, positions, model.config.kv_lora_rank, recorder.emit)
    finally:
        model.model.rotary = rotary
    return recorder.trace


def _emit_cache(cache: LatentCache, positions: Tensor, rank: int, emit: Emit) -> None:
    for layer, entries in enumerate(cache.data[:, 0]):
        own = entries[positions]
        emit(f"layers.{layer}.self_attn.kv_cache", own[:, :rank])
        emit(f"layers.{layer}.self_attn.rope.k_pe", own[:, rank:])


@torch.inference_mode()
def run_transformers(model: Any, inputs: Inputs) -> Trace:
    """transformers' DeepseekV3ForCausalLM: the same points, less what its cache does not hold in this form."""
    recorder = _Recorder(inputs)

    def emit_rotation(_m: Any, _i: Any, output: tuple[Tensor, Tensor]) -> None:
        cos, sin = (table[..., : table.shape[-1] // 2] for table in output)
        recorder.emit("rope.cos_sin", _rows(torch.cat((cos, sin), dim=-1)))

    _probe_norms(model.model, recorder.emit)
    with _hooked(model.model, recorder.emit) as hooks:
        hooks.callback(model.model.rotary_emb.register_forward_hook(emit_rotation).remove)
        cache = None
        for recorder.phase, tokens, _ in inputs.calls():
            out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            recorder.emit("lm_head", out.logits[0, -1:])
    return recorder.trace


# Outputs of which each rank has its heads' columns, and those of which it has its share of every sum.
_COLUMNS = (".self_attn.q_b_proj", ".self_attn.attention")
_SUMMANDS = (".self_attn.o_proj", ".mlp.shared_experts")


def combine(point: str, value: Tensor) -> Tensor:
    """The whole of a point's rows from this rank's part; every rank must ask for the same points in the same order."""
    if not dist.is_initialized():
        return value
    if point.endswith(_COLUMNS):
        return gather_last(value, None)
    if point.endswith(_SUMMANDS):
        value = value.clone()
        dist.all_reduce(value)
    return value


BACKENDS = ("cpu", "cuda", "transformers", "neuron")


def run(
    backend: str,
    checkpoint: str | Path,
    inputs: Inputs,
    dtype: str,
    *,
    greedy: bool = False,
    ranks: Path | None = None,
    preset: Deployment | None = None,
    compiled: Path | None = None,
    batch_invariant: bool = False,
) -> Trace:
    """The trace of a checkpoint on `backend`, computed in `dtype`.

    Args:
        backend: `cpu`, `cuda`, `transformers` or `neuron`.
        checkpoint: directory of the weights.
        inputs: tokens, and which points are kept.
        dtype: name of a float type.
        greedy: force the model's own choices, as many as `inputs.forced` has (plain model only).
        ranks: output of `convert --target cuda`, of which each process of torchrun takes its file (plain model only);
            all get the same trace, and have parted then.
        preset: of `neuron`, see `run_nxdi`.
        compiled: of `neuron`, see `run_nxdi`.
        batch_invariant: the plain model's mode.

    Raises:
        ParityError: there is no such backend, or an option is another's.
        DeviceError: `cuda` without a GPU.
        NeuronUnavailableError: `neuron` without NxD and NxDI.
    """
    if backend != "neuron" and (preset is not None or compiled is not None):
        raise ParityError(f"backend {backend}: a preset and compiled graphs are of neuron")
    chosen: torch.dtype = getattr(torch, dtype)
    if backend in ("cpu", "cuda"):
        check_device(backend)
        if ranks is None:
            model = KimiK2ForCausalLM.from_pretrained(checkpoint, dtype=chosen, device=backend)
            model.batch_invariant = batch_invariant
            return _plain(model, inputs, greedy)
        config = KimiK2Config.from_pretrained(checkpoint)
        with load_ranks(ranks, Path(checkpoint), config, chosen, backend) as rank:
            rank.generator.model.batch_invariant = batch_invariant
            return _plain(rank.generator.model, inputs, greedy)
    if ranks is not None:
        raise ParityError(f"backend {backend}: --ranks are of the plain model (cpu or cuda)")
    if greedy:
        raise ParityError(f"backend {backend}: greedy tokens come from the plain model (cpu or cuda)")
    if backend == "transformers":
        return run_transformers(load_transformers_model(checkpoint, chosen), inputs)
    if backend == "neuron":
        return run_nxdi(checkpoint, inputs, dtype, preset, compiled)
    raise ParityError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")


def _plain(model: KimiK2ForCausalLM, inputs: Inputs, greedy: bool) -> Trace:
    if greedy:
        sampling = SamplingParams(max_new_tokens=len(inputs.forced))
        inputs = replace(inputs, forced=generate(model, [list(inputs.prompt)], sampling)[0])
    return run_plain(model, inputs)
