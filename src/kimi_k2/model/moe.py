"""Feed-forward layers: the dense SwiGLU MLP and the dropless mixture of experts with its router and shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k2.checkpoint.names import routed_format
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KernelError
from kimi_k2.model.linear import Linear, add_modules
from kimi_k2.ops.experts import ExpertWeights, GateOptions, gated, route, routed_experts
from kimi_k2.ops.linear import Order, Weight
from kimi_k2.quantization.stored import StoredFormat, format_of, unquantized


class Router(nn.Module):
    """Router of one layer: float32 logits from the gate weight, then `noaux_tc_gate`.

    `weight` [E, H] may be BF16; `e_score_correction_bias` [E] stays float32 whatever the model's dtype, since rounding
    it to BF16 changes nearly every choice.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: KimiK2Config, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        shape = (config.n_routed_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        bias = torch.empty(config.n_routed_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.top_k = config.num_experts_per_tok
        # Keyword arguments of `ops.experts.noaux_tc_gate`.
        self.options: GateOptions = {
            "n_group": config.n_group,
            "topk_group": config.topk_group,
            "norm_topk_prob": config.norm_topk_prob,
            "routed_scaling_factor": config.routed_scaling_factor,
        }

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] to (topk_indices int64 [T, k], topk_weights [T, k])."""
        return route(x, self.weight, self.e_score_correction_bias, self.top_k, **self.options)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __init__(
        self, config: KimiK2Config, layer: int, part: str, *, dtype: torch.dtype, keep_quantized: bool
    ) -> None:
        super().__init__()
        add_modules(self, config, layer, part, dtype=dtype, keep_quantized=keep_quantized)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        out: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        return out


class Experts(nn.Module):
    """The routed experts of a layer, stacked.

    Plain: `gate_up_proj` [E, 2I, H] (gate rows first) and `down_proj` [E, H, I]. With `keep_quantized` the stored form
    is held instead: FP8 adds `*_scale_inv` (float32, one value a block), INT4 has `*_packed` (int32) and `*_scale`. A
    projection that the checkpoint leaves unquantized stays plain.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(self, config: KimiK2Config, module: str, *, dtype: torch.dtype, keep_quantized: bool = False) -> None:
        super().__init__()
        self.module, self.quantization = f"{module}.experts", config.quantization
        # A rank of expert parallelism holds experts first_expert .. first_expert + num_experts - 1.
        self.first_expert, self.num_experts = 0, config.n_routed_experts
        self.total_experts = config.n_routed_experts
        self._expert_map: Tensor | None = None
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self._orders: dict[str, Order | None] = {}
        self._formats: dict[str, StoredFormat | None] = {}
        for target, matrix, matrices in (
            ("gate_up_proj", (intermediate, hidden), 2),
            ("down_proj", (hidden, intermediate), 1),
        ):
            source = routed_format(config, self.module, target) if keep_quantized else unquantized()
            quantized = source.method is not None
            self._formats[target] = source.held_as if quantized else None
            for spec in source.held(self.module, *matrix):
                suffix = spec.name.rpartition(".")[2].removeprefix("weight")
                stacked = (self.num_experts, matrices * spec.shape[0], *spec.shape[1:])
                self.register_buffer(target + suffix, torch.empty(stacked, dtype=spec.dtype if quantized else dtype))

    def expert_map(self) -> Tensor | None:
        """int32 [experts of the model] to the local expert, -1 elsewhere; None if all are held."""
        if self.num_experts == self.total_experts:
            return None
        if self._expert_map is None:
            numbers = torch.arange(self.total_experts, dtype=torch.int32) - self.first_expert
            numbers[(numbers < 0) | (numbers >= self.num_experts)] = -1
            self._expert_map = numbers.to(next(self.buffers()).device)
        return self._expert_map

    def load(self, expert: int, projection: str, stored: dict[str, Tensor]) -> None:
        """Take the stored tensors (by suffix) of one expert's gate_proj, up_proj or down_proj.

        Raises:
            KernelError: other experts' weights are in a kernel's order already.
        """
        if any(self._orders.values()):
            raise KernelError("experts in a kernel's order take no more weights: load before they are prepared")
        target = "down_proj" if projection == "down_proj" else "gate_up_proj"
        source = format_of(self.quantization, f"{self.module}.{expert}.{projection}")
        if self._formats[target] is None:
            stored = {"weight": source.dequantize(stored, getattr(self, target).dtype)}
        else:
            stored = source.hold(stored)
        for suffix, tensor in stored.items():
            rows = getattr(self, target + suffix.removeprefix("weight"))[expert]
            half = rows.shape[0] // 2
            held = {"gate_proj": rows[:half], "up_proj": rows[half:], "down_proj": rows}[projection]
            held.copy_(tensor)

    def stored(self) -> ExpertWeights:
        """The weights as they are held; the tensors are this module's own."""
        gate_up, down = (self._stored(target) for target in ("gate_up_proj", "down_proj"))
        return ExpertWeights(gate_up, down, self.first_expert, self.expert_map())

    def _stored(self, target: str) -> Weight:
        names = [name for name in self._buffers if name.startswith(target)]
        tensors = {"weight" + name.removeprefix(target): getattr(self, name) for name in names}
        return Weight(tensors, self._formats[target], self._orders.get(target))

    def prepare(self, dtype: torch.dtype) -> None:
        """Let the kernel that would serve tokens of `dtype` put the weights into its own order, in place."""
        ordered = routed_experts.prepare(self.stored(), dtype)
        if ordered is not None:
            self.adopt(ordered)

    def restore(self) -> None:
        """Undo `prepare`, in place: more weights can then be taken."""
        for target, order in self._orders.items():
            if order is None:
                continue
            for expert in range(self.num_experts):
                tensors = self._stored(target).expert(expert).tensors
                for suffix, tensor in order.restore(tensors).items():
                    tensors[suffix].copy_(tensor)
        self._orders = {}

    def adopt(self, weights: ExpertWeights) -> None:
        """Take note that these tensors, this module's own, are now in the order that `weights` says."""
        self._orders = {"gate_up_proj": weights.gate_up.order, "down_proj": weights.down.order}


class MoE(nn.Module):
    """Router, routed experts and the shared expert that every token passes."""

    def __init__(self, config: KimiK2Config, layer: int, *, dtype: torch.dtype, keep_quantized: bool) -> None:
        super().__init__()
        self.gate = Router(config, dtype=dtype)
        self.experts = Experts(config, f"model.layers.{layer}.mlp", dtype=dtype, keep_quantized=keep_quantized)
        self.shared_experts = (
            MLP(config, layer, "mlp.shared_experts", dtype=dtype, keep_quantized=keep_quantized)
            if config.n_shared_experts
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        flat = x.flatten(0, -2)
        out = routed_experts(flat, self.experts.stored(), *self.gate(flat)).view(x.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x)
