"""Operations of the decode step as NKI kernels: the vendor's `nki` on a device, its emulator in CPU mode.

Where a graph is lowered without `nki`, a kernel is a custom call that nothing can execute: its name, and in
`backend_config` the arguments that are no tensors. `kimi_k2.nki.calls` counts what it costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_k2.nki.kernels import MODULES
from nki_emulator import install

MOST_TOKENS = 128
MOST_HEADS = 128
CALL_PREFIX = "kimi_k2.nki."

Result = tuple[Sequence[int], torch.dtype]


class NkiKernel:
    """A kernel of `kimi_k2.nki.kernels` on tensors of torch.

    Args:
        cores: 1 or 2 (LNC).
    """

    name: str

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.emulated = install()

    def runs_on(self, device: torch.device) -> bool:
        """Whether the kernel can be part of what is computed there."""
        if self.emulated:
            return device.type in ("cpu", "xla")
        return device.type != "cpu"

    def run(
        self,
        tensors: Sequence[Tensor],
        arguments: dict[str, Any],
        results: Sequence[Result],
        name: str | None = None,
        named: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """Call the kernel, or another one of its family by its name.

        Args:
            tensors: its first arguments, in their order.
            arguments: the others by name; numbers.
            results: shape and dtype of each result.
            name: of the kernel; None for the class's own.
            named: further tensors, by the names of the kernel's arguments.
        """
        named = named or {}
        name = name or self.name
        device = tensors[0].device
        if self.emulated and device.type == "xla":
            # Tensors by name follow the others.
            also = {"named": list(named)} if named else {}
            return self._lowered(name, [*tensors, *named.values()], {**arguments, **also}, results)
        from importlib import import_module

        kernel = getattr(import_module(f"kimi_k2.nki.kernels.{MODULES[name]}"), name)
        kept = emulated_fp8 if self.emulated else (lambda tensor: tensor)
        others = {key: kept(one) for key, one in named.items()}
        made = kernel[self.cores](*(kept(one) for one in tensors), **arguments, **others)
        parts = made if isinstance(made, list | tuple) else [made]
        return [torch_tensor(part).to(device) for part in parts]

    def _lowered(
        self, name: str, tensors: Sequence[Tensor], arguments: dict[str, Any], results: Sequence[Result]
    ) -> list[Tensor]:
        import torch_xla

        shapes, dtypes = [list(shape) for shape, _ in results], [dtype for _, dtype in results]
        described = json.dumps({"cores": self.cores, **arguments})
        made: list[Tensor] = torch_xla._XLAC._xla_custom_call(
            list(tensors), CALL_PREFIX + name, shapes, dtypes, False, described, 0, {}
        )
        return made


def torch_tensor(array: Any) -> Tensor:
    """A kernel's result as a tensor; torch does not know ml_dtypes' bfloat16."""
    if isinstance(array, Tensor) or array.dtype.name != "bfloat16":
        return torch.as_tensor(array)
    return torch.as_tensor(array.view("uint16")).view(torch.bfloat16)


def emulated_fp8(tensor: Tensor) -> Any:
    """An e4m3fn tensor under Trainium's name for the same bits below 256 (`kimi_k2.quantization.neuron_e4m3`)."""
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    import ml_dtypes

    return tensor.detach().contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)


class RouterKernel(NkiKernel):
    """`kimi_k2.nki.kernels.router` with KimiK2Router's results."""

    name = "noaux_tc_router"

    def takes(self, hidden_states: Tensor) -> bool:
        """Whether the kernel routes these [B, S, H]: few enough tokens, and a device for it."""
        tokens, size = hidden_states.shape[:-1].numel(), hidden_states.shape[-1]
        return self.runs_on(hidden_states.device) and tokens <= MOST_TOKENS and size % (128 * self.cores) == 0

    def __call__(
        self,
        tokens: Tensor,
        weight: Tensor,
        e_score_correction_bias: Tensor,
        top_k: int,
        norm_topk_prob: bool,
        routed_scaling_factor: float,
        *,
        transposed: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits float32 [T, E], affinities float32 [T, E], expert numbers int64 [T, top_k].

        Args:
            tokens: [T, H].
            weight: [E, H], which is transposed for the kernel; or [H, E] if `transposed`.
        """
        weight = weight.to(tokens.dtype)
        inputs = [tokens, weight if transposed else weight.T.contiguous(), e_score_correction_bias.unsqueeze(0)]
        arguments = {**_routing(top_k, norm_topk_prob, routed_scaling_factor), "return_logits": True}
        count, experts = len(tokens), e_score_correction_bias.shape[0]
        chosen, every = (count, top_k), (count, experts)
        kinds = ((chosen, torch.int32), (chosen, torch.float32), (every, torch.float32), (every, torch.float32))
        index, _, affinities, logits = self.run(inputs, arguments, kinds)
        return logits, affinities, index.to(torch.long)

    def choose(
        self,
        logits: Tensor,
        e_score_correction_bias: Tensor,
        top_k: int,
        norm_topk_prob: bool,
        routed_scaling_factor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same from float32 logits [T, E] that are known."""
        arguments = _routing(top_k, norm_topk_prob, routed_scaling_factor)
        chosen = (len(logits), top_k)
        kinds = ((chosen, torch.int32), (chosen, torch.float32), (tuple(logits.shape), torch.float32))
        inputs = [logits, e_score_correction_bias.unsqueeze(0)]
        index, _, affinities = self.run(inputs, arguments, kinds, "noaux_tc_choice")
        return logits, affinities, index.to(torch.long)


def _routing(top_k: int, norm_topk_prob: bool, routed_scaling_factor: float) -> dict[str, Any]:
    return {"routed_scaling_factor": routed_scaling_factor, "norm_topk_prob": norm_topk_prob, "top_k": top_k}


class AttentionKernel(NkiKernel):
    """`kimi_k2.nki.kernels.mla_decode`: each sequence's queries over its latent cache."""

    name = "mla_decode"

    def takes(self, query: Tensor, slots: int) -> bool:
        """Whether the kernel attends with these [B, heads, S, .] to so many slots of the cache."""
        fits = query.shape[1] * query.shape[2] <= MOST_HEADS
        return self.runs_on(query.device) and fits and slots % (128 * self.cores) == 0

    def __call__(
        self,
        query: Tensor,
        latents: Tensor,
        keys: Tensor,
        new_latents: Tensor,
        new_keys: Tensor,
        lengths: Tensor,
        softmax_scale: float,
        slots: int,
    ) -> Tensor:
        """Sums of latents of one token a sequence, float32 [B, heads, 1, rank].

        Args:
            query: [B, heads, 1, rank + rope], absorbed and rotated.
            latents, keys: [B, S, rank] and [B, S, rope], the whole cache: a part of it would be copied for the kernel.
            new_latents, new_keys: [B, 1, rank] and [B, 1, rope].
            lengths: [B], slots in use.
            softmax_scale: of the configuration.
            slots: of the S, that the kernel reads.
        """
        tensors = self._tensors(query, latents, keys, new_latents, new_keys, lengths)
        arguments = {"softmax_scale": softmax_scale, "slots": slots}
        (sums,) = self.run(tensors, arguments, [((*query.shape[:2], latents.shape[2]), torch.float32)])
        return sums.unsqueeze(2)

    @staticmethod
    def _tensors(
        query: Tensor, latents: Tensor, keys: Tensor, new_latents: Tensor, new_keys: Tensor, lengths: Tensor
    ) -> list[Tensor]:
        """As the kernel takes them: tokens are heads, and each sequence has one new entry, its first."""
        cache = latents.to(query.dtype), keys.to(query.dtype)
        return [query.flatten(1, 2), *cache, new_latents[:, 0], new_keys[:, 0], lengths.to(torch.int32).unsqueeze(1)]

    def of_cache(
        self,
        query: Tensor,
        latents: Tensor,
        keys: Tensor,
        new_latents: Tensor,
        new_keys: Tensor,
        lengths: Tensor,
        softmax_scale: float,
        slots: int,
    ) -> tuple[Tensor, Tensor]:
        """The same over the cache alone, of any tokens of a sequence, which attend to the same slots; and log-sum-exps.

        Args:
            query: [B, heads, S, rank + rope].
            latents, keys, lengths, softmax_scale, slots: as `__call__`.
            new_latents, new_keys: [B, S, .], not looked at.

        Returns:
            (float32 [B, heads, S, rank], float32 [B, heads, S, 1]).
        """
        batch, heads, tokens, _ = query.shape
        tensors = self._tensors(query, latents, keys, new_latents, new_keys, lengths)
        own = torch.zeros(batch, 1, dtype=torch.int32, device=query.device)
        arguments = {"softmax_scale": softmax_scale, "slots": slots, "return_logsumexp": True}
        rows = batch, heads * tokens
        results: list[Result] = [((*rows, latents.shape[2]), torch.float32), (rows, torch.float32)]
        sums, logs = self.run(tensors, arguments, results, named={"own": own})
        return sums.unflatten(1, (heads, tokens)), logs.unflatten(1, (heads, tokens)).unsqueeze(3)


class ExpertsKernel(NkiKernel):
    """`kimi_k2.nki.kernels.experts`: the chosen experts of each token, from their tiles.

    Hidden states in float32 beside narrower tiles are multiplied as two BF16 parts.
    """

    name = "selective_experts"

    @staticmethod
    def input_dtype(tiles: Tensor, hidden_states: Tensor) -> torch.dtype:
        """What the kernel takes hidden states as."""
        return hidden_states.dtype if tiles.dtype.itemsize < hidden_states.dtype.itemsize else tiles.dtype

    def takes(self, hidden_states: Tensor) -> bool:
        """Whether the kernel takes these [T, H]."""
        tokens, hidden = hidden_states.shape
        return self.runs_on(hidden_states.device) and tokens <= MOST_TOKENS and hidden % (128 * self.cores) == 0

    def __call__(
        self,
        hidden_states: Tensor,
        routed: Sequence[Tensor],
        expert_index: Tensor,
        expert_weights: Tensor,
        num_experts: int,
        shared: Mapping[str, Tensor] | None = None,
        early: tuple[Tensor, Tensor | None] | None = None,
    ) -> list[Tensor]:
        """float32 [T, H], and with `early` float32 [T, N]; to be summed over the ranks.

        Args:
            hidden_states: [T, H].
            routed: tiles of gate and up [E_local, 128, H/128, 2 I], scales float32 [E_local, 2, H/128]; of down
                [E_local, I, H] and float32 [E_local, H/128].
            expert_index: [T, top_k], this rank's numbers; what is below 0, or above the last, is another rank's.
            expert_weights: float32 [T, top_k].
            num_experts: of all ranks.
            shared: this rank's part of the shared expert (`TiledExperts.alone`), to be added for every token.
            early: the next layer's down projections folded with the experts' down, [E_local, I, N], and with that of
                `shared`, [1, I, N].
        """
        tokens, hidden = hidden_states.shape
        inputs = [
            hidden_states.to(self.input_dtype(routed[0], hidden_states)),
            *routed,
            expert_index.to(torch.int32),
            expert_weights,
        ]
        named = {}
        if shared is not None:
            tiles = {name if name.endswith("scales") else f"{name}_tiles": part for name, part in shared.items()}
            named = {f"shared_{name}": part for name, part in tiles.items()}
        results: list[Result] = [((tokens, hidden // 128, 128), torch.float32)]
        if early is not None:
            named["early_weight"] = early[0]
            results.append(((tokens, early[0].shape[2]), torch.float32))
            if early[1] is not None:
                named["shared_early_weight"] = early[1].squeeze(0)
        arguments = {"first_expert": 0, "num_experts": num_experts}
        out, *columns = self.run(inputs, arguments, results, named=named)
        return [out.reshape(tokens, hidden), *columns]
