"""Feed-forward halves of a layer on one rank: dense MLP, router, routed experts and shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from kimi_k2.config import KimiK2Config
from kimi_k2.ops.experts import noaux_tc_gate
from kimi_k2.plan import torch_native as cut


def mlp(x: Tensor, weights: nn.Module) -> Tensor:
    """This rank's columns of a gated MLP of linears: [T, H] to a part of [T, H], to be summed over the ranks."""
    gate, up, down = (weights.get_parameter(f"{name}_proj.weight") for name in ("gate", "up", "down"))
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def scaled_matmul(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """[N, M, K] by N matrices [N, K, W] as they are stored, to [N, M, W] in x's dtype.

    Args:
        x: activations.
        weight: in x's dtype, or FP8 with a scale.
        scale: None; float32 [N, 1, W], a scale a channel; or [N, K / b, W / b], one a block. Sums over a block are
            scaled before they are added, so no dequantized matrix is made.
    """
    matrices = weight.to(x.dtype)
    if scale is None:
        return torch.bmm(x, matrices)
    if scale.shape[1:] == (1, weight.shape[2]):
        return (torch.bmm(x, matrices).to(torch.float32) * scale).to(x.dtype)
    count, blocks, columns = scale.shape
    block = weight.shape[1] // blocks
    rows = x.unflatten(2, (blocks, block)).transpose(1, 2).flatten(0, 1)  # [N * K/b, M, b]
    sums = torch.bmm(rows, matrices.unflatten(1, (blocks, block)).flatten(0, 1)).to(torch.float32)
    spread = scale.repeat_interleave(weight.shape[2] // columns, dim=2).flatten(0, 1).unsqueeze(1)
    out: Tensor = (sums * spread).unflatten(0, (count, blocks)).sum(1)
    return out.to(x.dtype)


class Experts:
    """The routed experts that a rank holds.

    Args:
        config: of the model.
        weights: `experts` with `gate_up_proj` and `down_proj`, each with `weight` [E_local, input, output] and perhaps
            `scale`; in tiles as `sharding.experts` has them, then perhaps with such `shared_experts` beside it.
        first: int64 scalar, number of the first expert held. A tensor, so that all ranks have one graph.
    """

    def __init__(self, config: KimiK2Config, weights: nn.Module, first: Tensor) -> None:
        self.top_k, self.first = config.num_experts_per_tok, first
        parts = dict(weights.named_children())
        self.routed, shared = parts["experts"], parts.get("shared_experts")
        self.shared = shared if hasattr(shared, "gate_up_proj") else None  # three linears are the caller's

    def __call__(self, x: Tensor, topk_indices: Tensor, topk_weights: Tensor, *, decode: bool) -> Tensor:
        """[T, H], int64 [T, k] and float32 [T, k] to this rank's part of [T, H], no token dropped.

        With the shared expert's part, where that lies here. Few choices load their experts one by one; more at decode
        read all experts once; a prompt's are sorted into blocks of one expert.
        """
        local = topk_indices - self.first
        count = len(self.routed.get_parameter("down_proj.weight"))
        out = self._routed(x, local, topk_weights, count, decode=decode)
        if self.shared is None:
            return out
        return out + self._mlp(x.unsqueeze(0), None, self.shared).squeeze(0)

    def _routed(self, x: Tensor, local: Tensor, topk_weights: Tensor, count: int, *, decode: bool) -> Tensor:
        """The routed experts in PyTorch."""
        inside = (local >= 0) & (local < count)
        slots = torch.where(inside, local, torch.zeros_like(local))
        weights = torch.where(inside, topk_weights, torch.zeros_like(topk_weights))
        choices = slots.numel()
        if choices < count:
            out = self._mlp(x.repeat_interleave(self.top_k, dim=0).unsqueeze(1), slots.flatten())
            return (out.view(*weights.shape, -1).to(torch.float32) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        blocks = 0 if decode else cut.blocks_of(choices, len(x), count)
        if not blocks:
            dense = weights.new_zeros(len(x), count).scatter_add(1, slots, weights)
            out = self._mlp(x.unsqueeze(0).expand(count, -1, -1), None).to(torch.float32)
            return (out * dense.T.unsqueeze(-1)).sum(0).to(x.dtype)
        return self._blocks(x, torch.where(inside, slots, torch.full_like(slots, count)), weights, count, blocks)

    def _blocks(self, x: Tensor, slots: Tensor, weights: Tensor, count: int, blocks: int) -> Tensor:
        """Choices sorted by expert, each expert's padded to whole blocks; `slots` is `count` for other ranks'.

        Every shape is static: there is room for all choices being this rank's.
        """
        tokens, top_k = slots.shape
        flat, block = slots.flatten(), cut.BLOCK
        order = torch.argsort(flat, stable=True)
        of_expert = nn.functional.one_hot(flat, count + 1).sum(0)
        padded = (of_expert[:count] + block - 1) // block * block
        ends = padded.cumsum(0)
        starts = torch.cat((ends - padded, ends.new_full((1,), blocks * block)))
        before = of_expert.cumsum(0) - of_expert
        sorted_slots = flat[order]
        place = starts[sorted_slots] + torch.arange(len(flat), device=x.device) - before[sorted_slots]
        place = place.clamp(max=blocks * block)  # others' choices share one row that nobody reads
        token = torch.full((blocks * block + 1,), tokens, dtype=order.dtype, device=x.device)
        token = token.scatter(0, place, order // top_k)[:-1]
        expert = torch.searchsorted(ends, torch.arange(blocks, device=x.device) * block, right=True).clamp(
            max=count - 1
        )
        rows = nn.functional.pad(x, (0, 0, 0, 1))[token].view(blocks, block, -1)
        group = cut.blocks_at_once(self.routed.get_parameter("down_proj.weight").shape[1])
        pieces = zip(rows.split(group), expert.split(group), strict=True)
        out = torch.cat([self._mlp(*piece) for piece in pieces]).flatten(0, 1)
        at = torch.empty_like(place).scatter(0, order, place).view(tokens, top_k)
        chosen = nn.functional.pad(out, (0, 0, 0, 1))[at].to(torch.float32)
        return (chosen * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _mlp(self, x: Tensor, experts: Tensor | None, stack: nn.Module | None = None) -> Tensor:
        """[N, M, H] through N experts (None: all of the stack), to [N, M, H]."""
        stack = self.routed if stack is None else stack
        gate, up = self._matmul(x, stack.get_submodule("gate_up_proj"), experts).chunk(2, dim=-1)
        return self._matmul(silu(gate) * up, stack.get_submodule("down_proj"), experts)

    def _matmul(self, x: Tensor, projection: nn.Module, experts: Tensor | None) -> Tensor:
        parameters: dict[str, Tensor] = dict(projection.named_parameters())
        weight, scale = parameters["weight"], parameters.get("scale")
        if experts is not None:
            # FP8 is gathered as bytes: index_select has no FP8 on a CPU.
            weight = weight[experts] if scale is None else weight.view(torch.uint8)[experts].view(weight.dtype)
            scale = None if scale is None else scale[experts]
        if weight.dim() == 4:  # tiles of gate and up: [N, 128, H / 128, 2 I] and [N, 2, H / 128]
            weight, scale = weight.transpose(1, 2).flatten(1, 2), None if scale is None else scale.transpose(1, 2)
        return scaled_matmul(x, weight, scale)


def route(config: KimiK2Config, x: Tensor, router: nn.Module) -> tuple[Tensor, Tensor]:
    """noaux_tc of [T, H] in float32: int64 [T, k], float32 [T, k]."""
    weight: Tensor = router.get_parameter("linear_router.weight")
    bias = router.get_parameter("e_score_correction_bias")
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = linear(x.to(wide), weight.to(wide))
    return noaux_tc_gate(
        logits,
        bias,
        config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
    )
