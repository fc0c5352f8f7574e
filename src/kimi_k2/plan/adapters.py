"""LoRA adapters of a Trainium deployment: what a rank holds of them, and the form of decode that they take."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.format import expert_formats, without_tiles

ADAPTERS = "LoRA adapters"
LINE = (
    "LoRA: decode runs on PyTorch operations, experts without tiles: our kernels read weights that are folded at"
    " conversion, where an adapter is not"
)
_ALONE = ("save_sharded_checkpoint", "flash_decoding_enabled", "is_continuous_batching")
Target = Literal["q_b_proj", "o_proj"]


class LoraServing(BaseModel):
    """NxDI's LoraServingConfig, as far as a plan needs it; its batch is the deployment's.

    Attributes:
        max_loras: adapters in device memory.
        max_lora_rank: the largest rank of one.
        target_modules: projections that are adapted.
        lora_ckpt_paths: PEFT directories by the adapters' names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_loras: PositiveInt = 1
    max_lora_rank: PositiveInt = 16
    target_modules: tuple[Target, ...] = Field(min_length=1)
    lora_ckpt_paths: dict[str, str] = {}

    def rank_bytes(self, config: KimiK2Config, ranks: int, batch: int, itemsize: int) -> int:
        """Bytes on a rank: all adapters, cut over the ranks, and each sequence's own, of which one side is whole.

        As NxDI's modules hold them (`modules/lora_serving/lora_layer.py`, `weight` and `weight_active`).
        """
        sizes = {  # columns of A, rows of B, and the side that a sequence's own has whole
            "q_b_proj": (config.q_lora_rank, config.num_attention_heads * config.qk_head_dim, 0),
            "o_proj": (config.num_attention_heads * config.v_head_dim, config.hidden_size, 1),
        }
        values = 0
        for *sides, whole in (sizes[name] for name in self.target_modules):
            values += self.max_loras * sum(sides) // ranks + batch * (sides[whole] + sides[1 - whole] // ranks)
        return values * self.max_lora_rank * config.num_hidden_layers * itemsize


def in_xla_form(raw: Any) -> Any:
    """A deployment's fields; with adapters on kernels, those of the same deployment on PyTorch operations.

    Raises:
        ConfigError: what the class does not follow together with adapters (`src/lora.py` of the contrib model).
    """
    options = raw.get("neuron_config") if isinstance(raw, dict) else None
    if not isinstance(options, dict) or not options.get("lora_config"):
        return raw
    for name in _ALONE:
        if options.get(name, name == "save_sharded_checkpoint"):
            raise ConfigError("expected false with lora_config", field=f"neuron_config.{name}")
    if options.get("decode", "xla") == "xla" or raw.get("experts") not in expert_formats():
        return raw
    kept = {name: value for name, value in options.items() if name not in ("decode", "decode_layers_per_kernel")}
    return {**raw, "experts": without_tiles(raw["experts"]), "neuron_config": kept}
