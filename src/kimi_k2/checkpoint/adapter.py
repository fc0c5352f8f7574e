"""adapter_config.json as PEFT writes it: a LoRA of one rank and one scale, or refused by the field's name.

NxDI's reader takes two fields of such a file and passes over the rest, which PEFT obeys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_k2.config import ADAPTER
from kimi_k2.config_fields import refuse_unknown
from kimi_k2.errors import ConfigError
from kimi_k2.files import read_data

_WITHOUT_EFFECT: dict[str, str] = {
    "who wrote it, for which model": "auto_mapping base_model_name_or_path peft_version revision task_type",
    "training, or of fields that are refused": "ensure_weight_tying eva_config inference_mode lora_dropout"
    " qalora_group_size runtime_config",
    "of Megatron's layers, which there are none of": "megatron_config megatron_core",
}
_OTHER_FORMS = """
    alora_invocation_tokens arrow_config corda_config exclude_modules kasa_config layer_replication layers_pattern
    layers_to_transform lora_ga_config modules_to_save monteclora_config target_parameters trainable_token_indices
    use_bdlora velora_config
"""
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The other ways of beginning change the model's own weights, when an adapter is loaded too.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "use_rslora": (True, False),
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), (False,)),
    **dict.fromkeys(("alpha_pattern", "rank_pattern", "loftq_config"), ({}, None)),
    **dict.fromkeys(_OTHER_FORMS.split(), (None, [])),
}


def adapter_scale(directory: str | Path) -> tuple[int, float]:
    """Rank r of an adapter's pairs, and the factor s on each: W + s B A, for A [r, columns] and B [rows, r].

    Raises:
        ConfigError: the file is not there, is no LoRA, or has a field that asks for something else.
    """
    path = Path(directory) / ADAPTER
    try:
        raw = read_data(path, ConfigError)
    except FileNotFoundError:
        raise ConfigError("no such file; expected PEFT's description of an adapter", file=path) from None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected an object, got {type(raw).__name__}", file=path)
    harmless = {name for names in _WITHOUT_EFFECT.values() for name in names.split()}
    try:
        refuse_unknown(raw, {"r", "lora_alpha", "target_modules"}, only=_ONLY, harmless=harmless)
        rank, alpha, modules = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ConfigError(f"expected an integer of at least 1, got {rank!r:.100}", field="r")
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
            raise ConfigError(f"expected a number above 0, got {alpha!r:.100}", field="lora_alpha")
        if not isinstance(modules, (str, list)) or not all(isinstance(module, str) for module in modules):
            raise ConfigError(f"expected names of modules, got {modules!r:.100}", field="target_modules")
    except ConfigError as error:
        raise ConfigError(error.message, field=error.field, file=path) from None
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)
