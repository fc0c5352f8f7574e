"""What an Eagle3 head is as the draft of NxDI's fused speculation: its configuration and its weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.drafts.config import DraftConfig
from kimi_k2.drafts.head import read_head, warn_of_other_member
from kimi_k2.plan.nxdi import check_head

from .config import KimiK2InferenceConfig, load_kimi_config


class KimiK2DraftConfig(KimiK2InferenceConfig):
    """Configuration of the draft: of Hugging Face's fields the sizes of the head's one layer, and `head`.

    Attributes:
        head: the fields of a DraftConfig.
        aux_layers: layers of the target that it reads, as DraftConfig numbers them.
    """

    head: dict[str, Any]
    aux_layers: list[int]

    @classmethod
    def of(cls, directory: str | Path, target: KimiK2InferenceConfig) -> KimiK2DraftConfig:
        """A head's configuration beside its target's.

        Raises:
            ConfigError: the head's config.json is wrong, does not fit the target or its ranks, or reads other than
                three layers.
        """
        path = Path(directory) / "config.json"
        draft, hf = DraftConfig.from_pretrained(directory), target.hf
        draft.fit(hf, path)
        layers = check_head(draft, hf, target.neuron_config.tp_degree, path)
        if warned := getattr(target, "_name_or_path", None):
            warn_of_other_member(Path(directory), Path(warned))
        head = {"head": json.loads(draft.model_dump_json()), "aux_layers": list(layers)}
        plain = draft.attention_config(hf)
        return cls(_neuron_config(target.neuron_config), load_config=load_kimi_config(plain), **head)

    def check_sizes(self) -> None:
        """Nothing: `of` has checked the head's, of which the Llama form's are no latent attention's."""

    @property
    def draft(self) -> DraftConfig:
        """The validated fields of the head."""
        return DraftConfig.model_validate_json(json.dumps(self.head))


def _neuron_config(target: Any) -> Any:
    """The draft's settings from its target's, as NxDI's demo derives them (inference_demo.py): greedy, in XLA."""
    neuron = copy.deepcopy(target)
    neuron.is_eagle_draft = True
    neuron.decode, neuron.decode_layers_per_kernel = "xla", None
    neuron.quantized = False
    # By these names DecoderModelInstance leaves the draft of a quantized target as it is.
    neuron.modules_to_not_convert = ["embed_tokens", "layers", "norm", "fc", "lm_head"]
    neuron.on_device_sampling_config.do_sample = neuron.on_device_sampling_config.dynamic = False
    return neuron


def draft_state_dict(directory: str | Path, config: KimiK2DraftConfig) -> dict[str, Tensor]:
    """Every tensor of KimiK2DraftModel that a head's directory holds, uncut.

    Raises:
        CheckpointError: (subclasses) a tensor is missing, unexpected, damaged, or of another shape.
    """
    draft, dtype = config.draft, config.neuron_config.torch_dtype
    weights, tokens = read_head(Path(directory), draft, config.hf)
    if draft.form == "mla":
        projections = [weights.pop(f"midlayer.self_attn.{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        weights["midlayer.self_attn.qkv_a_proj.weight"] = torch.cat(projections)
    state = {name.replace("midlayer.", "layers.0.", 1): tensor.to(dtype) for name, tensor in weights.items()}
    tokens = torch.arange(draft.draft_vocab_size) if tokens is None else tokens
    ranks = torch.arange(config.neuron_config.tp_degree, dtype=torch.int32)
    return {"tokens": tokens.to(torch.int32), "rank_util.rank": ranks, **state}


def fused_state_dict(target: dict[str, Tensor], draft: dict[str, Tensor]) -> dict[str, Tensor]:
    """Both models' tensors by their names in the fused graph, uncut or of one rank.

    The target's embedding and lm_head serve where the head has none.
    """
    shared = {name: target[name] for name in ("embed_tokens.weight", "lm_head.weight")}
    both = {"target_model": target, "draft_model": shared | draft}
    return {f"{model}.{name}": tensor for model, tensors in both.items() for name, tensor in tensors.items()}
