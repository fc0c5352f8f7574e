"""LoRA as NxDI serves it: several adapters beside the base weights, one for each sequence, chosen by `adapter_ids`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from neuronx_distributed_inference.modules.lora_serving import is_lora_module
from torch import Tensor, nn

from kimi_k2.contrib_model.quantization import require
from kimi_k2.sharding.layout import Decode

_LOG = logging.getLogger(__name__)

# The projections that are modules of their own here, called with nothing but their input.
ADAPTED = ("q_b_proj", "o_proj")
_WHY_NOT = {
    "q_a_proj": "is one matrix with kv_a_proj_with_mqa (qkv_a_proj)",
    "kv_a_proj_with_mqa": "is one matrix with q_a_proj (qkv_a_proj)",
    "kv_b_proj": "is absorbed into the queries and the sums: its weight is read, it is never applied",
    "gate_proj": "NxD's shared and routed experts take no adapter ids (modules/moe/model.py)",
    "up_proj": "NxD's shared and routed experts take no adapter ids (modules/moe/model.py)",
    "down_proj": "NxD's shared and routed experts take no adapter ids (modules/moe/model.py)",
    "lm_head": "NxDI calls it without adapter ids (models/model_base.py, NeuronBaseModel.forward)",
    "embed_tokens": "was not tested, as it is split over the hidden dimension",
}


def check(config: Any) -> None:
    """Refuse what NxDI's LoRA serving cannot wrap in this model; `config` is the whole neuron config.

    Raises:
        ConfigError: naming the field and, of a target module, why it is not adapted.
    """
    lora = config.lora_config
    if lora is None:
        return
    named = {name.split(".")[-1] for name in lora.target_modules or ()}
    for name in sorted(named - set(ADAPTED)):
        reason = _WHY_NOT.get(name, "the model has no such module")
        require(False, "lora_config.target_modules", f"expected {' or '.join(ADAPTED)}, got {name}: {reason}")
    many, lines = lora.dynamic_multi_lora, config.batch_size
    require(not many, "lora_config.dynamic_multi_lora", "expected False: adapters are loaded with the model")
    batch = lora.batch_size
    require(batch == lines, "lora_config.batch_size", f"expected batch_size ({lines}), got {batch}")


def in_xla_form(decode: Decode, options: dict[str, Any]) -> Decode:
    """Form of a decode step with these options of a neuron config: with adapters always PyTorch operations.

    The kernels read weights that are folded at conversion, where an adapter is not. Experts are then in square blocks
    in place of tiles' (`kimi_k2.sharding.experts`): `options` is changed.
    """
    if options.get("lora_config") is None or decode == "xla":
        return decode
    _LOG.warning("lora_config: decode runs in XLA form; %r has no adapters", decode)
    options.pop("quantization_block_size", None)  # of tiles
    return "xla"


def project(projection: nn.Module, hidden_states: Tensor, adapter_ids: Tensor | None) -> Tensor:
    """Apply a projection, with each sequence's adapter if it has them."""
    if is_lora_module(projection):
        out: Tensor = projection(hidden_states, adapter_ids)
    else:
        out = projection(hidden_states)
    return out


def follow_stages(models: Iterable[nn.Module]) -> None:
    """In CPU mode one model serves both stages: tell its adapters at each pass which it is."""

    def tell(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for module in model.modules():
            if is_lora_module(module):
                module.is_context_encoding = inputs[0].shape[1] > 1  # type: ignore[assignment]

    for model in models:
        model.register_forward_pre_hook(tell)
