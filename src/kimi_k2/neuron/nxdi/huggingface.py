"""Hugging Face configuration classes of `kimi_k2` and `kimi_k25`, which transformers 4.57 does not know.

NxDI's `load_pretrained_config` and vLLM ask `AutoConfig` for a checkpoint's configuration. Registered there, these
classes give them the language model's fields, validated, whatever wraps them in the file: K2.5's config.json becomes
the text model's, without its vision part.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from kimi_k2.config import DERIVED, KimiK2Config

ARCHITECTURE = "DeepseekV3ForCausalLM"


class HuggingFaceKimiK2Config(PretrainedConfig):
    """The fields of KimiK2Config as a PretrainedConfig.

    Args:
        fields: the content of config.json; without any the object is empty, as transformers makes for comparisons.

    Raises:
        ConfigError: a field is missing or wrong.
    """

    model_type = "kimi_k2"
    has_no_defaults_at_init = True  # to transformers: an object without arguments says nothing about defaults

    def __init__(self, **fields: Any) -> None:
        if not fields:
            super().__init__()
            return
        # transformers makes copies from what `to_dict` gave, which has our own fields too.
        config = KimiK2Config.from_dict({name: value for name, value in fields.items() if name not in DERIVED})
        own = config.model_dump(exclude={"quantization", "model_type"})
        if config.rope_scaling is not None:
            # vLLM looks for the kind of scaling under its newer name.
            own["rope_scaling"] = {"rope_type": "yarn", **own["rope_scaling"]}
        if config.quantization is not None:
            own["quantization_config"] = config.quantization.to_hf_dict()
        text = fields.get("text_config", fields)
        dtype = fields.get("torch_dtype") or text.get("torch_dtype") or fields.get("dtype") or text.get("dtype")
        if dtype is not None:
            own["dtype"] = dtype
        kept = {name: fields[name] for name in ("transformers_version", "name_or_path") if name in fields}
        super().__init__(architectures=[ARCHITECTURE], **kept, **own)


class HuggingFaceKimiK25Config(HuggingFaceKimiK2Config):
    """The same for the language model of K2.5 and K2.6, which is then a `kimi_k2` to all who ask."""

    model_type = "kimi_k25"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.model_type = HuggingFaceKimiK2Config.model_type

    def to_dict(self) -> dict[str, Any]:
        """PretrainedConfig's, which takes `model_type` from the class."""
        return {**super().to_dict(), "model_type": HuggingFaceKimiK2Config.model_type}


CONFIGS = (HuggingFaceKimiK2Config, HuggingFaceKimiK25Config)


def register() -> None:
    """Make AutoConfig, and vLLM where it is installed, read the family's config.json with these classes."""
    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
    try:
        from vllm.transformers_utils import config as vllm_config
        from vllm.transformers_utils import configs as vllm_classes
    except ImportError:
        return
    for config in CONFIGS:
        # Its table holds names of classes of its own module and is asked before AutoConfig. Otherwise
        # --trust-remote-code, which the tokenizer needs, takes the repository's own class, and K2.5's has no
        # `num_key_value_heads` at its top level, where the plugin looks.
        setattr(vllm_classes, config.__name__, config)
        vllm_config._CONFIG_REGISTRY[config.model_type] = config.__name__
