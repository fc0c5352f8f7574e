"""From a checkpoint's tensors to the model's parameters: the one mapping, streamed module by module."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from .quantization import Stored, dequantized, held

SUFFIXES = (
    "weight", "weight_scale_inv", "weight_scale", "weight_packed", "weight_shape", "e_score_correction_bias",
)  # fmt: skip
# Where a tensor of one expert is cut for the ranks that share it: dimension, and sections cut one by one.
EXPERT_CUTS = {
    "gate_up_proj.weight": (1, 2), "gate_up_proj.scale": (1, 2), "down_proj.weight": (0, 1), "down_proj.scale": (0, 1),
}  # fmt: skip
# Of files that other programs wrote, and of K2.5's vision tower, which is not computed here.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|mm_projector|multi_modal_projector)\.")


class CheckpointError(ValueError):
    """A tensor is missing, not the model's, or not of the form that config.json says."""


class Parameter(NamedTuple):
    """A parameter of the model, uncut.

    Attributes:
        name: as in `NeuronKimiK2Model.named_parameters()`.
        tensor: [out, in] of a linear layer; of one expert's [in, out].
        expert: number of the expert; None for what is no expert's.
    """

    name: str
    tensor: Tensor
    expert: int | None = None


class Module(NamedTuple):
    """Parameters that are made together.

    Attributes:
        name: of the model's module.
        sources: names of the checkpoint's modules that they are made of.
        make: from each source's tensors by suffix to the parameters by their names within the module.
        expert: number of the expert; None for what is no expert's.
    """

    name: str
    sources: tuple[str, ...]
    make: Callable[[list[Stored]], Mapping[str, Tensor]]
    expert: int | None = None


class CheckpointReader:
    """Tensors of a directory of safetensors, one at a time; files are mapped, not read whole.

    Raises:
        CheckpointError: there is no checkpoint, or its index names a file that is not there.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            found = sorted(self.directory.glob("*.safetensors"))
            if not found:
                raise CheckpointError(f"{directory}: no safetensors")
            self.files = {name: file.name for file in found for name in _names(file)}
        for file in sorted(set(self.files.values())):
            if not (self.directory / file).exists():
                raise CheckpointError(f"{self.directory / file}: missing, though the index names it")
        self._open: dict[str, Any] = {}

    def names(self) -> set[str]:
        """All tensors."""
        return set(self.files)

    def get(self, name: str) -> Tensor:
        """One tensor."""
        file = self.files[name]
        if file not in self._open:
            if len(self._open) > 3:  # a layer may begin in one file and end in the next
                self._open.pop(next(iter(self._open)))
            self._open[file] = safe_open(self.directory / file, "pt")
        return self._open[file].get_tensor(name)


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


class StateDictReader:
    """The same of a state dict in memory, which is emptied on the way; names with or without `model.`."""

    def __init__(self, state_dict: dict[str, Tensor]) -> None:
        self.state_dict = state_dict
        self.stored = {n if n.startswith(("model.", "lm_head.")) else f"model.{n}": n for n in state_dict}

    def names(self) -> set[str]:
        """All tensors."""
        return set(self.stored)

    def get(self, name: str) -> Tensor:
        """One tensor, once."""
        return self.state_dict.pop(self.stored[name])


class CheckpointMapping:
    """What each parameter is made of. `modules_of` one layer may be overridden.

    Where a module's tensors become parameters nothing is read, so that it can be done in other threads.

    Args:
        config: KimiK2InferenceConfig.
        reader: of the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, or is none of the model's.
    """

    error: type[Exception] = CheckpointError
    expert_cuts: Mapping[str, tuple[int, int]] = EXPERT_CUTS

    def __init__(self, config: Any, reader: Any) -> None:
        self.config, self.reader, neuron = config, reader, config.neuron_config
        self.form, self.dtype, self.ranks = config.stored_form, neuron.torch_dtype, neuron.tp_degree
        self.of_experts = neuron.moe_tp_degree, neuron.moe_ep_degree
        prefix = getattr(config, "tensor_prefix", "")
        self.stored = {n.removeprefix(prefix): n for n in reader.names() if not IGNORED.search(n.removeprefix(prefix))}
        self.unread = set(self.stored)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters in the order of the layers; one module's tensors are in memory at a time."""
        for module in self.modules():
            for suffix, tensor in module.make([self.tensors_of(name) for name in module.sources]).items():
                yield Parameter(f"{module.name}.{suffix}", tensor, module.expert)
        if self.unread:
            raise self.error(f"no tensors of this model: {', '.join(sorted(self.unread)[:5])}")

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters whole, as NxD's own loader takes them: the ranks' stacks of experts one behind the other."""
        state: dict[str, Tensor] = {}
        tp, ep = self.of_experts
        local = self.config.n_routed_experts // ep
        for name, tensor, expert in self.parameters():
            if expert is None:
                state[name] = tensor
                continue
            cuts = self.expert_cuts[".".join(name.split(".")[-2:])]
            for tp_rank in range(tp):
                piece = cut(tensor, *cuts, tp_rank, tp)
                if name not in state:
                    state[name] = torch.empty((tp * ep * local, *piece.shape), dtype=piece.dtype)
                state[name][((expert // local) * tp + tp_rank) * local + expert % local] = piece
        return state

    def modules(self) -> Iterator[Module]:
        """All modules with parameters."""
        yield from self.outer()
        for layer in range(self.config.num_hidden_layers):
            yield from self.modules_of(layer)

    def outer(self) -> Iterator[Module]:
        """Those of no layer."""
        ranks = torch.arange(self.ranks, dtype=torch.int32)
        yield Module("rank_util", (), lambda _: {"rank": ranks})  # NxD cuts the ranks' numbers like a weight
        yield self.linear("embed_tokens", "model.embed_tokens")
        yield self.linear("norm", "model.norm")
        yield self.linear("lm_head", "lm_head")

    def modules_of(self, layer: int) -> Iterator[Module]:
        """The modules of a decoder layer, experts last."""
        own, stored = f"layers.{layer}", f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self.linear(f"{own}.{norm}", f"{stored}.{norm}")
        yield from self.attention(f"{own}.self_attn", f"{stored}.self_attn")
        if layer < self.config.first_k_dense_replace:
            yield from self.mlp(f"{own}.mlp", f"{stored}.mlp")
            return
        yield self.router(f"{own}.mlp.router", f"{stored}.mlp.gate")
        if self.config.n_shared_experts:
            yield from self.mlp(f"{own}.mlp.shared_experts", f"{stored}.mlp.shared_experts")
        for expert in range(self.config.n_routed_experts):
            yield self.expert(f"{own}.mlp.experts", f"{stored}.mlp.experts.{expert}", expert)

    def attention(self, own: str, stored: str) -> Iterator[Module]:
        """MLA's; both down projections are one matrix."""
        yield self.linear(f"{own}.qkv_a_proj", f"{stored}.q_a_proj", f"{stored}.kv_a_proj_with_mqa")
        for name in ("q_a_layernorm", "kv_a_layernorm", "q_b_proj", "kv_b_proj", "o_proj"):
            yield self.linear(f"{own}.{name}", f"{stored}.{name}")

    def mlp(self, own: str, stored: str) -> Iterator[Module]:
        """A dense MLP's, or a shared expert's."""
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield self.linear(f"{own}.{name}", f"{stored}.{name}")

    def router(self, own: str, stored: str) -> Module:
        """The router's weight in the model's dtype, its bias in float32."""

        def make(read: list[Stored]) -> dict[str, Tensor]:
            if "e_score_correction_bias" not in read[0]:
                raise self.error(f"{stored}.e_score_correction_bias: missing")
            bias = read[0]["e_score_correction_bias"].to(torch.float32)
            return {"linear_router.weight": read[0]["weight"].to(self.dtype), "e_score_correction_bias": bias}

        return Module(own, (stored,), make)

    def linear(self, own: str, *stored: str) -> Module:
        """Weights one below the other, in the model's dtype."""

        def make(read: list[Stored]) -> dict[str, Tensor]:
            weights = [self.plain(*named) for named in zip(stored, read, strict=True)]
            return {"weight": (torch.cat(weights) if weights[1:] else weights[0]).to(self.dtype)}

        return Module(own, stored, make)

    def expert(self, own: str, stored: str, expert: int) -> Module:
        """One routed expert's, [in, out], gate and up side by side."""
        names = tuple(f"{stored}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))

        def make(read: list[Stored]) -> dict[str, Tensor]:
            gate, up, down = (self.held(*named) for named in zip(names, read, strict=True))
            gate_up = {f"gate_up_proj.{suffix}": _side_by_side([tensor, up[suffix]]) for suffix, tensor in gate.items()}
            return gate_up | {f"down_proj.{suffix}": _side_by_side([tensor]) for suffix, tensor in down.items()}

        return Module(own, names, make, expert)

    def held(self, name: str, stored: Stored) -> dict[str, Tensor]:
        """A projection of a routed expert as the model holds it: its weight and scales by suffix."""
        try:
            return held(stored, self.form, self.config.neuron_config)
        except ValueError as error:
            raise self.error(f"{name}: {error}") from None

    def plain(self, name: str, stored: Stored) -> Tensor:
        """A weight without its quantization; float32 if it had one."""
        quantized = len(stored) > 1 or "weight" not in stored
        try:
            return dequantized(stored, self.form) if quantized else stored["weight"]
        except ValueError as error:
            raise self.error(f"{name}: {error}") from None

    def tensors_of(self, module: str) -> Stored:
        """A module's tensors by suffix, read."""
        found = {suffix: f"{module}.{suffix}" for suffix in SUFFIXES if f"{module}.{suffix}" in self.stored}
        if not {"weight", "weight_packed"} & set(found):
            raise self.error(f"{module}.weight: missing")
        self.unread.difference_update(found.values())
        return {suffix: self.reader.get(self.stored[name]) for suffix, name in found.items()}


def _side_by_side(projections: list[Tensor]) -> Tensor:
    """[N, K] tensors as [K, N + N]."""
    bits = {1: torch.uint8}.get(projections[0].dtype.itemsize)
    if bits is None:
        return torch.cat(projections).T.contiguous()
    return torch.cat([weight.view(bits) for weight in projections]).T.contiguous().view(projections[0].dtype)


def cut(tensor: Tensor, dimension: int, sections: int, tp_rank: int, tp: int) -> Tensor:
    """What a rank of `tp` has of a tensor along a dimension, of each of its `sections`; a single row is for all."""
    if tensor.shape[dimension] == 1 or tp == 1:
        return tensor
    width = tensor.shape[dimension] // (sections * tp)
    pieces = [tensor.narrow(dimension, (section * tp + tp_rank) * width, width) for section in range(sections)]
    if sections == 1:
        return pieces[0]
    bits = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
    return torch.cat([piece.view(bits) for piece in pieces], dim=dimension).view(tensor.dtype)
