"""From the checkpoint's tensors to the names and layouts of NeuronKimiK2Model, one stored tensor group at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import EXPERT, IGNORED
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import MissingTensorError
from kimi_k2.quantization.config import Quantization
from kimi_k2.quantization.stored import dequantize_stored

from .quantized import ExpertFormat

Group = tuple[str, dict[str, Tensor]]


def stream_groups(items: Iterable[tuple[str, Tensor]], names: Iterable[str]) -> Iterator[Group]:
    """Each module with all its stored tensors by suffix, as soon as the last of them has come by.

    Raises:
        MissingTensorError: `items` ended before a module that `names` announces was whole.
    """
    expected: dict[str, int] = defaultdict(int)
    for name in names:
        expected[name.rpartition(".")[0]] += 1
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in items:
        module, _, suffix = name.rpartition(".")
        group = waiting.setdefault(module, {})
        group[suffix] = tensor
        if len(group) == expected[module]:
            yield module, waiting.pop(module)
    for module, group in waiting.items():
        raise MissingTensorError(f"only {', '.join(group)} present", tensor=module)


class NeuronStateDict:
    """Collects the state dict of the unsharded Neuron model.

    Routed experts are stacked into NxD's layout (input dimension before output): `gate_up_proj.weight` [E, H, 2I] with
    the gate's columns first, `down_proj.weight` [E, I, H]. The two down projections of the attention become one,
    `qkv_a_proj.weight` [q_lora_rank + cache_dim, H]. The router's bias stays float32; other floats become `dtype`.

    Args:
        config: the checkpoint's configuration, with its quantization.
        dtype: of the float weights.
        experts: how routed experts are held.
        world_size: ranks, for NxD's rank tensors.
    """

    def __init__(self, config: KimiK2Config, dtype: torch.dtype, experts: ExpertFormat, world_size: int) -> None:
        self.config, self.dtype, self.experts = config, dtype, experts
        self.tensors: dict[str, Tensor] = {"rank_util.rank": torch.arange(world_size, dtype=torch.int32)}

    def add(self, module: str, stored: dict[str, Tensor], quantization: Quantization | None) -> None:
        """Take one module's stored tensors; `module` with or without the leading `model.`."""
        module = module.removeprefix("model.")
        if match := EXPERT.match(f"model.{module}.weight"):
            self._add_expert(match["moe"].removeprefix("model."), int(match["expert"]), match["proj"], stored)
        elif module.endswith(".mlp.gate"):
            router = module.removesuffix("gate") + "router"
            self.tensors[f"{router}.linear_router.weight"] = stored["weight"].to(self.dtype)
            self.tensors[f"{router}.e_score_correction_bias"] = stored["e_score_correction_bias"].to(torch.float32)
        elif module.endswith((".q_a_proj", ".kv_a_proj_with_mqa")):
            attention, _, part = module.rpartition(".")
            self._add_down_projection(attention, part, dequantize_stored(stored, quantization, self.dtype))
        else:
            self.tensors[f"{module}.weight"] = dequantize_stored(stored, quantization, self.dtype).contiguous()

    def _add_down_projection(self, attention: str, part: str, weight: Tensor) -> None:
        config, name = self.config, f"{attention}.qkv_a_proj.weight"
        if name not in self.tensors:
            rows = config.q_lora_rank + config.cache_dim
            self.tensors[name] = torch.empty(rows, config.hidden_size, dtype=self.dtype)
        rows = slice(0, config.q_lora_rank) if part == "q_a_proj" else slice(config.q_lora_rank, None)
        self.tensors[name][rows].copy_(weight)

    def _add_expert(self, moe: str, expert: int, projection: str, stored: dict[str, Tensor]) -> None:
        config = self.config
        fused, parts = ("down_proj", 1) if projection == "down_proj" else ("gate_up_proj", 2)
        for suffix, tensor in self.experts.convert(stored, config.quantization, self.dtype).items():
            name = f"{moe}.expert_mlps.mlp_op.{fused}.{suffix}"
            rows, columns = tensor.shape
            if name not in self.tensors:
                shape = (config.n_routed_experts, rows, parts * columns)
                self.tensors[name] = torch.empty(shape, dtype=tensor.dtype)
            start = columns if projection == "up_proj" else 0
            self.tensors[name][expert, :, start : start + columns].copy_(tensor)


def load_neuron_state_dict(
    directory: str | Path, dtype: torch.dtype, experts: ExpertFormat, world_size: int
) -> dict[str, Tensor]:
    """Stream a checkpoint directory into an unsharded Neuron state dict.

    Raises:
        ConfigError, CheckpointError: see `KimiK2Config.from_pretrained` and `CheckpointReader`.
    """
    config = KimiK2Config.from_pretrained(directory)
    collected = NeuronStateDict(config, dtype, experts, world_size)
    with CheckpointReader.for_config(directory, config) as reader:
        for module, stored in stream_groups(reader.stream(), reader.names()):
            collected.add(module, stored, config.quantization)
    return collected.tensors


def convert_state_dict(
    state_dict: dict[str, Any], config: KimiK2Config, dtype: torch.dtype, experts: ExpertFormat, world_size: int
) -> dict[str, Tensor]:
    """The same from a state dict in memory with Hugging Face's names; it is emptied on the way."""
    names = [name for name in state_dict if not IGNORED.search(name)]
    collected = NeuronStateDict(config, dtype, experts, world_size)
    for module, stored in stream_groups(((name, state_dict.pop(name)) for name in names), names):
        collected.add(module, stored, config.quantization)
    return collected.tensors
