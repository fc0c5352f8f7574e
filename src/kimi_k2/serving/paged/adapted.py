"""A layer whose linears have low-rank additions, of each token its own adapter's (LoRA, Hu 2021, arXiv 2106.09685).

Of a linear, all adapters' matrices are one matrix of so many times the rank, whose inner values are masked by token:
two products, whatever the batch. Sizes: T tokens, S adapters at once, rank r, a linear [N, K].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch
from kimi_k2.engine.layer_step import Exchange, LayerStep, Reduce, Routing
from kimi_k2.model.decoder import DecoderLayer
from kimi_k2.model.linear import Linear
from kimi_k2.model.moe import MoE
from kimi_k2.ops.experts import silu_and_mul, sum_by_expert
from kimi_k2.ops.linear import Weight, add_norm, dequantize, project, rms_norm
from kimi_k2.ops.mla import absorb_and_store

# Linears whose outputs a step makes at once, by module of a layer.
JOINED = {
    "qkv_a": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "q_b": ("self_attn.q_b_proj",),
    "o": ("self_attn.o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
EXPERTS = "mlp.experts"
PROJECTIONS = ("gate_proj", "down_proj", "up_proj")


@dataclass
class LowRank:
    """All adapters' matrices of one linear; B A x is added, scaled already.

    Attributes:
        a: [S, r, K]; of routed experts [S, E, r, K].
        b: [S, r, N], transposed; of routed experts [S, E, r, N].
    """

    a: Tensor
    b: Tensor

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        """What is added to the outputs [T, N] of x [T, K]; mask [T, S]."""
        inner = (x.to(self.a.dtype) @ self.a.flatten(0, 1).T).unflatten(1, (len(self.a), -1)) * mask.unsqueeze(-1)
        added: Tensor = inner.flatten(1) @ self.b.flatten(0, 1)
        return added.to(x.dtype)

    def expert(self, number: int) -> LowRank:
        """Of one routed expert."""
        return LowRank(self.a[:, number], self.b[:, number])

    def put(self, slot: int, a: Tensor | None, b: Tensor | None) -> None:
        """Have a slot hold A [..., r or less, K] and B [..., N, r or less]; None for nothing."""
        for buffer, factor in ((self.a[slot], a), (self.b[slot], None if b is None else b.mT)):
            buffer.zero_()
            if factor is not None:
                buffer[..., : factor.shape[-2], :].copy_(factor)


@dataclass
class Adapters:
    """Of the step in progress; all layers' share it.

    Attributes:
        slots: S.
        ids: [T or more] on the device, the slot of each token, -1 without an adapter.
        host: the same on the host, of tokens that are no padding.
        active: whether some token has an adapter.
    """

    slots: int
    ids: Tensor
    host: list[int] = field(default_factory=list)
    active: bool = False

    def tell(self, host: list[int], ids: Tensor) -> None:
        """Begin a step of these tokens; every linear of every layer asks whether one has an adapter."""
        self.host, self.ids, self.active = host, ids, any(slot >= 0 for slot in host)

    def mask(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count, S], 1 at the slot of each of the first tokens."""
        return (self.ids[:count, None] == torch.arange(self.slots, device=self.ids.device)).to(dtype)


class AdaptedStep(LayerStep):
    """As `LayerStep`, which also serves while no token of a step has an adapter.

    Routed experts of tokens whose adapters touch them are computed one expert after the other, by dequantized weights
    and with their numbers read back: no CUDA graph can hold such a step.

    Args:
        layer, reduce, exchange: see `LayerStep`.
        adapters: of the model.
        added: by module of the layer (`self_attn.q_a_proj`, `mlp.shared_experts.down_proj`); those that no adapter may
            touch are left out.
        experts: by projection (gate_proj, up_proj, down_proj); empty where no adapter may touch routed experts.
        touched: slots whose adapters do, as it is at each step.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        reduce: Reduce,
        exchange: Exchange | None,
        adapters: Adapters,
        added: Mapping[str, LowRank],
        experts: Mapping[str, LowRank],
        touched: set[int],
    ) -> None:
        super().__init__(layer, reduce, exchange)
        self.adapters, self.routed, self.touched = adapters, experts, touched
        dense = "mlp.shared_experts." if isinstance(layer.mlp, MoE) else "mlp."
        self.added: dict[str, list[tuple[LowRank, slice]]] = {}
        for joined, names in JOINED.items():
            start, additions = 0, []
            for name in names:
                whole = name if name.startswith("self_attn.") else dense + name
                module = layer.get_submodule(whole) if self.dense is not None or whole == name else None
                if not isinstance(module, Linear):
                    continue
                if whole in added:
                    additions.append((added[whole], slice(start, start + module.rows)))
                start += module.rows
            self.added[joined] = additions

    def _project(self, x: Tensor, weight: Weight, name: str) -> Tensor:
        out = project(x, weight)
        if self.added[name]:
            mask = self.adapters.mask(len(x), x.dtype)
            for more, rows in self.added[name]:
                out[:, rows] += more(x, mask)
        return out

    def enter(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `LayerStep`."""
        if not self.adapters.active:
            return super().enter(x, delta)
        norm = self.layer.input_layernorm
        if delta is None:
            normed = rms_norm(x, norm.weight, norm.eps)
        else:
            x, normed = add_norm(x, delta, norm.weight, norm.eps)[:2]
        return self._project(normed, self.qkv_a, "qkv_a"), x

    def queries(self, qkv_a: Tensor) -> Tensor:
        """See `LayerStep`."""
        if not self.adapters.active:
            return super().queries(qkv_a)
        norm = self.attention.q_a_layernorm
        return self._project(rms_norm(qkv_a[:, : len(norm.weight)], norm.weight, norm.eps), self.q_b, "q_b")

    def query(self, qkv_a: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """See `LayerStep`."""
        if not self.adapters.active:
            return super().query(qkv_a, batch, cache)
        attention, (cos, sin, slots, _, _) = self.attention, batch.single
        rank, norm = attention.config.q_lora_rank, attention.kv_a_layernorm
        q, kv_a = self.queries(qkv_a), qkv_a[:, rank:]
        return absorb_and_store(q, kv_a, norm.weight, cos, sin, slots, self.w_uk, cache, norm.eps)

    def output(self, values: Tensor) -> Tensor:
        """See `LayerStep`."""
        return self._project(values, self.o, "o") if self.adapters.active else super().output(values)

    def feed_forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """See `LayerStep`."""
        if not self.adapters.active:
            return super().feed_forward(x, routing)
        dense = None
        if self.dense is not None:
            gate_up, down = self.dense
            dense = self._project(silu_and_mul(self._project(x, gate_up, "gate_up")), down, "down")
        if self.moe is None or self.experts is None:
            assert dense is not None
            return dense
        indices, weights = routing or self.moe.gate(x)
        routed = self.routed_sum(x, indices, weights)
        rows = [row for row, slot in enumerate(self.adapters.host) if slot in self.touched]
        if rows:
            some = torch.tensor(rows, device=x.device)
            mask = self.adapters.mask(len(x), x.dtype)[some]
            routed[some] = self._adapted(x[some], mask, indices[some], weights[some])
        return routed if dense is None else routed + dense

    def _adapted(self, x: Tensor, mask: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The routed experts' sum with what adapters add inside each expert."""
        experts = self.experts
        assert experts is not None

        def mlp(number: int, token: Tensor) -> Tensor:
            some, own = x[token], mask[token]
            gate, up, down = (self.routed[name].expert(number) for name in ("gate_proj", "up_proj", "down_proj"))
            gate_up = some @ dequantize(experts.gate_up.expert(number), x.dtype).T
            hidden = silu_and_mul(gate_up + torch.cat((gate(some, own), up(some, own)), dim=-1))
            return hidden @ dequantize(experts.down.expert(number), x.dtype).T + down(hidden, own)

        return sum_by_expert(x, experts, indices, weights, mlp)
