"""A decode step's MoE layers in one NKI kernel, collectives inside (`kimi_k2.nki.kernels.layers.decode_layers`).

It takes the early router, early down projections, attention in tiles and experts in tiles from where the layers hold
them; prefill computes with the same layers. The dense layers before, embedding, head and sampling stay operations of
the graph. The first MoE layer of a step calls the kernel for all, with the residual and the down projections that the
layer before hands on; the layers behind it hand out what it gave. With `decode_layers_per_kernel` a call is of so many
layers, and hands residual and down projections to the next call in float32: the values are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from neuronx_distributed_inference.modules.flashdecode.utils import EXTRA_RESERVED_SPACE
from torch import Tensor, nn

from kimi_k2.model.decoder import HiddenStates
from kimi_k2.nki.kernels import MODULES
from nki_emulator.ranks import run_as_rank

from .attention_tiles import kernel_rotation
from .kernels import NkiKernel, Result, emulated_fp8, torch_tensor

Tensors = dict[str, Tensor]


class DecodeLayersKernel(NkiKernel):
    """The kernel on all ranks.

    Args:
        cores: 1 or 2 (LNC).
        ranks: that run it together.
        group: neighbours among them that share a cache, each with a part of its slots; 1 where each holds it whole.
    """

    name = "decode_layers"

    def __init__(self, cores: int, ranks: int, group: int = 1) -> None:
        super().__init__(cores)
        self.ranks, self.group = ranks, group

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
            return self._lowered(self.name, list(named.values()), {**numbers, "named": list(named)}, results)
        module: Any = import_module(f"kimi_k2.nki.kernels.{MODULES[self.name]}")
        kept = emulated_fp8 if self.emulated else (lambda tensor: tensor)
        arguments = {name: kept(tensor) for name, tensor in inputs.items()}
        arguments["layers"] = tuple(
            module.layer_of({name: kept(part) for name, part in layer.items()}) for layer in layers
        )
        kernel = module.decode_layers[self.cores]
        if self.emulated and self.ranks > 1:
            made = run_as_rank(kernel, torch.distributed.get_rank(), _gather, (), {**arguments, **numbers})
        else:
            made = kernel(**arguments, **numbers)
        return [torch_tensor(part).to(device) for part in made]


def named_layers(layers: Sequence[Tensors]) -> Tensors:
    """All layers' tensors by one name each, as a custom call names them."""
    return {f"layers.{number}.{name}": part for number, layer in enumerate(layers) for name, part in layer.items()}


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
        projected: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        active_mask: Tensor | None = None,
        states: HiddenStates | None = None,
    ) -> Tensor:
        """The residual [B, S, H] behind the last layer, of S tokens a sequence.

        Args:
            hidden_states: [B, S, H], before the first MoE layer.
            projected: float32 [B, S, N], its down projections without the norm's scalar.
            attention_mask: bool [B, 1, 1 or S, slots], the same for all tokens.
            position_ids: int [B, S].
            active_mask: with flash decoding, bool [B, 1, S, S], on its diagonal True where this rank holds the token's
                position.
            states: takes the residual between layers, where a call of the kernel ends then.
        """
        moe = [(layer, cache) for layer, cache in zip(self.layers, self.caches, strict=True) if layer.is_moe]
        first = moe[0][0]
        attention, hf, experts = first.self_attn, first.self_attn.hf, first.mlp.expert_mlps
        dtype, (batch, length) = hidden_states.dtype, hidden_states.shape[:2]
        tokens = batch * length
        group, slots = self.kernel.group, attention_mask.shape[-1]
        if group > 1:  # NxDI's mask is over the slots that it reserves too
            slots -= EXTRA_RESERVED_SPACE
            attention_mask = attention_mask[..., :slots]
        inputs = {
            "hidden": hidden_states.flatten(0, 1).to(torch.float32),
            "projected": projected.flatten(0, 1),
            "rotation": kernel_rotation(*attention.rotation(position_ids.reshape(tokens, 1), torch.float32)),
            "lengths": attention_mask[:, 0, 0].sum(dim=1).to(torch.int32).unsqueeze(1),
        }
        numbers: dict[str, Any] = {
            "num_experts": hf.n_routed_experts,
            "softmax_scale": hf.softmax_scale,
            "routed_scaling_factor": hf.routed_scaling_factor,
            "eps": hf.rms_norm_eps,
            "latent_eps": hf.latent_norm_eps,
            "attended": slots,
        }
        if group > 1:
            assert active_mask is not None
            own = active_mask[:, 0].diagonal(dim1=1, dim2=2)
            inputs["own"] = own.reshape(tokens, 1).to(torch.int32)
        if experts.moe_expert_model_parallel_group.size() > 1:  # one graph for all ranks
            local_experts = experts.get_spmd_rank().get_local_expert_indices().view(-1)
            inputs["first_expert"] = local_experts[:1].to(torch.int32).unsqueeze(1)
        else:
            numbers["first_expert"] = 0
        each, before = self.each or len(moe), len(self.layers) - len(moe)
        read = [] if states is None else [layer - before for layer in states.layers if layer >= before]
        bounds = sorted({*range(0, len(moe), each), *read, len(moe)})
        for begin, end in pairwise(bounds):
            tensors = [layer_tensors(layer, cache, dtype) for layer, cache in moe[begin:end]]
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


def layer_tensors(layer: Any, cache: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensors:
    """A MoE layer's weights and cache by the fields of the kernel's `Layer`; norms and cache in the model's `dtype`.

    On a device they have it already, and nothing is copied.
    """
    attention, mlps = layer.self_attn, layer.mlp.expert_mlps
    tiles: Mapping[str, Tensor] = attention.tiles.arguments()[0]
    routed, shared = mlps.get_mlp_op(), mlps.shared_experts
    keys, latents = (slot.squeeze(1) for slot in cache)
    floats: Tensors = {
        "q_norm": attention.q_a_layernorm.weight,
        "kv_norm": attention.kv_a_layernorm.weight,
        "norm": layer.post_attention_layernorm.weight,
        "latents": latents,
        "keys": keys,
    }
    behind: Tensors = {}
    if layer.early_qkv_a is not None:
        behind["next_residual"] = layer.early_qkv_a.residual_weight
        behind["next_experts"] = routed.early_qkv_a.weight
        behind["next_shared"] = shared.early_qkv_a.weight.squeeze(0)
    names = ("gate_up", "gate_up_scales", "down", "down_scales")
    return {
        **{name: part.to(dtype) for name, part in floats.items()},
        **behind,
        **{name: scale for name, scale in tiles.items() if name.endswith("_scales")},
        **{name: tiles[f"{name}_tiles"] for name in ("q_b", "w_uk", "w_uv")},
        "o_proj": tiles["o_tiles"],
        **attention.tiles.of_group(),
        **dict(zip(names, routed.tiles(), strict=True)),
        **{f"shared_{name}": part for name, part in shared.alone().items()},
        "early_residual": layer.early_router.residual_weight,
        "early_heads": layer.early_router.heads_weight,
        "bias": layer.mlp.router.e_score_correction_bias.unsqueeze(0),
    }
