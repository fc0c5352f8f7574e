"""A decode step's MoE layers in one NKI kernel, collectives inside (`kimi_k2.nki.kernels.layers.decode_layers`).

It takes attention in tiles, experts in tiles and the folded weights (`sharding.early_router`, `sharding.early_qkv_a`)
from where the layers hold them; prefill computes with the same layers. The dense layers before, embedding, head and
sampling stay operations of the graph. The first MoE layer of a step calls the kernel for all, with the residual and its
down projections; the layers behind it hand out what it gave. With `decode_layers_per_kernel` a call is of so many
layers, and hands residual and down projections to the next call in float32: the values are the same.

On a device the kernel is the vendor's `nki`, in CPU mode its emulator. Where a graph is lowered without `nki` it is a
custom call that nothing can execute: its name, and in `backend_config` the arguments that are no tensors.
test/helpers/kernel_calls.py counts what it costs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from neuronx_distributed_inference.modules.flashdecode.utils import EXTRA_RESERVED_SPACE
from torch import Tensor, nn

from kimi_k2.model.decoder import HiddenStates
from kimi_k2.neuron import layer_arguments
from kimi_k2.nki.kernels import MODULES
from nki_emulator import install
from nki_emulator.ranks import run_as_rank

CALL_PREFIX = "kimi_k2.nki."

Result = tuple[Sequence[int], torch.dtype]
Tensors = dict[str, Tensor]


class DecodeLayersKernel:
    """The kernel on all ranks.

    Args:
        cores: 1 or 2 (LNC).
        ranks: that run it together.
        group: neighbours among them that share a cache, each with a part of its slots; 1 where each holds it whole.
    """

    name = "decode_layers"

    def __init__(self, cores: int, ranks: int, group: int = 1) -> None:
        self.cores, self.ranks, self.group = cores, ranks, group
        self.emulated = install()

    def runs_on(self, device: torch.device) -> bool:
        """Whether the kernel can be part of what is computed there."""
        if self.emulated:
            return device.type in ("cpu", "xla")
        return device.type != "cpu"

    def call(
        self, layers: Sequence[Tensors], inputs: Tensors, numbers: dict[str, Any], results: Sequence[Result]
    ) -> list[Tensor]:
        """Run or lower it.

        Args:
            layers: of each layer its tensors, by the fields of the kernel's `Layer`; what is missing is None.
            inputs: the kernel's other tensors, by its arguments' names; `hidden` first.
            numbers: its other arguments.
            results: shape and dtype of each result.
        """
        numbers = {**numbers, "ranks": self.ranks, "groups": (tuple(range(self.ranks)),)}
        if self.group > 1:
            firsts = range(0, self.ranks, self.group)
            numbers["cache_groups"] = tuple(tuple(range(first, first + self.group)) for first in firsts)
        device = inputs["hidden"].device
        if self.emulated and device.type == "xla":
            named = {**inputs, **named_layers(layers)}
            return self._lowered(list(named.values()), {**numbers, "named": list(named)}, results)
        module: Any = import_module(f"kimi_k2.nki.kernels.{MODULES[self.name]}")
        kept = layer_arguments.emulated_fp8 if self.emulated else (lambda tensor: tensor)
        arguments = {name: kept(tensor) for name, tensor in inputs.items()}
        arguments["layers"] = tuple(
            module.layer_of({name: kept(tensor) for name, tensor in layer.items()}) for layer in layers
        )
        kernel = module.decode_layers[self.cores]
        if self.emulated and self.ranks > 1:
            outputs = run_as_rank(kernel, torch.distributed.get_rank(), _gather, (), {**arguments, **numbers})
        else:
            outputs = kernel(**arguments, **numbers)
        return [layer_arguments.torch_tensor(result).to(device) for result in outputs]

    def _lowered(self, tensors: list[Tensor], arguments: dict[str, Any], results: Sequence[Result]) -> list[Tensor]:
        import torch_xla

        shapes, dtypes = [list(shape) for shape, _ in results], [dtype for _, dtype in results]
        described = json.dumps({"cores": self.cores, **arguments})
        outputs: list[Tensor] = torch_xla._XLAC._xla_custom_call(
            tensors, CALL_PREFIX + self.name, shapes, dtypes, False, described, 0, {}
        )
        return outputs


def named_layers(layers: Sequence[Tensors]) -> Tensors:
    """All layers' tensors by one name each, as a custom call names them."""
    return {f"layers.{number}.{name}": tensor for number, layer in enumerate(layers) for name, tensor in layer.items()}


def _gather(group: Sequence[int], mine: Any) -> list[Any]:
    """What each process of a group brings, in CPU mode."""
    gathered: list[Any] = [None] * len(group)
    own = torch.distributed.group.WORLD
    if list(group) != list(range(torch.distributed.get_world_size())):
        from neuronx_distributed.parallel_layers import parallel_state

        own = parallel_state.get_kv_shared_group()
    torch.distributed.all_gather_object(gathered, mine, group=own)
    return gathered


class WholeLayers:
    """One step's MoE layers.

    Args:
        layers: all decoder layers of the model.
        kernel: which runs them.
        each: layers a call; None for all.

    Attributes:
        caches: of all layers, (rotary keys [B, 1, L, rope], latents [B, 1, L, rank]); the cache manager sets them.
    """

    def __init__(self, layers: nn.ModuleList, kernel: DecodeLayersKernel, each: int | None = None) -> None:
        self.layers: list[Any] = list(layers)
        self.kernel, self.each = kernel, each
        self.caches: Sequence[tuple[Tensor, Tensor]] = ()
        self._entries: list[tuple[Tensor, Tensor]] = []

    def next_entries(self) -> tuple[Tensor, Tensor]:
        """The next layer's new entries, as attention gives them."""
        return self._entries.pop(0)

    @property
    def begun(self) -> bool:
        """Whether the kernel was called, and a layer waits for its entries."""
        return bool(self._entries)

    def run(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        rank: Tensor,
        active_mask: Tensor | None = None,
        states: HiddenStates | None = None,
    ) -> Tensor:
        """The residual [B, S, H] behind the last layer, of S tokens a sequence.

        Args:
            hidden_states: [B, S, H], before the first MoE layer.
            attention_mask: bool [B, 1, 1 or S, slots], the same for all tokens.
            position_ids: int [B, S].
            rank: this rank's number, int [1].
            active_mask: with flash decoding, bool [B, 1, S, S], on its diagonal True where this rank holds the token's
                position.
            states: takes the residual between layers, where a call of the kernel ends then.
        """
        moe = [(layer, cache) for layer, cache in zip(self.layers, self.caches, strict=True) if layer.is_moe]
        first = moe[0][0]
        attention, hf, experts = first.self_attn, first.self_attn.hf, first.mlp.experts
        dtype, (batch, length) = hidden_states.dtype, hidden_states.shape[:2]
        tokens = batch * length
        group, slots = self.kernel.group, attention_mask.shape[-1]
        if group > 1:  # NxDI's mask is over the slots that it reserves too
            slots -= EXTRA_RESERVED_SPACE
            attention_mask = attention_mask[..., :slots]
        downs = attention.qkv_a_proj(first.input_layernorm(hidden_states))
        rotation = (part.squeeze(1) for part in attention.rotation(position_ids.reshape(tokens, 1), torch.float32))
        inputs = {
            "hidden": hidden_states.flatten(0, 1).to(torch.float32),
            "projected": layer_arguments.without_scalar(downs, hidden_states, hf.rms_norm_eps).flatten(0, 1),
            "rotation": layer_arguments.rotation(*rotation),
            "lengths": attention_mask[:, 0, 0].sum(dim=1).to(torch.int32).unsqueeze(1),
        }
        numbers = {**layer_arguments.numbers(hf), "attended": slots}
        if group > 1:
            assert active_mask is not None
            own = active_mask[:, 0].diagonal(dim1=1, dim2=2)
            inputs["own"] = own.reshape(tokens, 1).to(torch.int32)
        if experts.ep > 1:  # one graph for all ranks
            inputs["first_expert"] = experts.first_expert(rank).to(torch.int32).view(1, 1)
        else:
            numbers["first_expert"] = 0
        each, before = self.each or len(moe), len(self.layers) - len(moe)
        read = [] if states is None else [layer - before for layer in states.layers if layer >= before]
        bounds = sorted({*range(0, len(moe), each), *read, len(moe)})
        for begin, end in pairwise(bounds):
            tensors = [_tensors(layer, cache, dtype) for layer, cache in moe[begin:end]]
            results: list[Result] = [
                ((tokens, hf.hidden_size // 128, 128), torch.float32),
                ((len(tensors), tokens, hf.kv_lora_rank), dtype),
                ((len(tensors), tokens, hf.qk_rope_head_dim), dtype),
            ]
            if end < len(moe):
                results.append(((tokens, -(-hf.qkv_a_dim // 128), 128), torch.float32))
            out, latents, keys, *following = self.kernel.call(tensors, inputs, numbers, results)
            self._entries += [
                (key.unflatten(0, (batch, 1, length)), latent.unflatten(0, (batch, 1, length)))
                for key, latent in zip(keys.unbind(0), latents.unbind(0), strict=True)
            ]
            inputs["hidden"] = out.flatten(1)
            if states is not None:
                states.pass_by(before + end, inputs["hidden"].unflatten(0, (batch, length)).to(dtype))
            if following:
                inputs["projected"] = following[0].flatten(1)[:, : hf.qkv_a_dim].contiguous()
        return inputs["hidden"].unflatten(0, (batch, length)).to(dtype)


def _tensors(layer: Any, cache: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensors:
    """A MoE layer's weights and cache, all but FP8 in the model's `dtype`."""
    held = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    keys, latents = (slot.squeeze(1).to(dtype) for slot in cache)
    return {**layer_arguments.weights(held, dtype), "latents": latents, "keys": keys}
