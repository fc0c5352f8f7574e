"""NeuronKimiK25ForConditionalGeneration: the text class with images and videos, in NxD's CPU mode.

Embeddings of media take their tokens' places inside the prefill graph, by NxDI's own arguments for that
(`vision_embeddings`, `vision_mask`). Decode is the text class's, untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.vision import MediaRows
from kimi_k2.errors import ConfigError, MediaError
from kimi_k2.vision_config import Grid, VisionConfig

from .modeling_kimi_k2 import NeuronKimiK2ForCausalLM, NeuronKimiK2Model
from .vision import NeuronKimiK25VisionEncoder, VisionBucket

# Optional arguments of NeuronBaseModel.forward between adapter_ids and vision_embeddings.
SKIPPED = 15


class NeuronKimiK25TextModel(NeuronKimiK2Model):
    """The text graph, whose prefill takes embeddings of media."""

    def encode_vision_to_input(self, inputs_embeds: Tensor, vision_embeddings: Tensor, vision_mask: Tensor) -> Tensor:
        """Rows of media in the place of their tokens' own.

        Args:
            inputs_embeds: [B, S, H].
            vision_embeddings: [M, H], all sequences' one after another, then anything.
            vision_mask: integers [B, S], the row that a token stands for, negative for text.
        """
        index = vision_mask.to(torch.int64)
        rows = vision_embeddings[index.clamp(min=0).flatten()].view(inputs_embeds.shape)
        return torch.where((index >= 0).unsqueeze(-1), rows, inputs_embeds)


class NeuronKimiK25ForConditionalGeneration(NeuronKimiK2ForCausalLM):
    """K2.5 on Neuron; `load_vision` adds the tower after `to_cpu`."""

    _model_cls = NeuronKimiK25TextModel

    def load_vision(self, buckets: Sequence[VisionBucket]) -> None:
        """Load the tower in CPU mode over the text model's ranks.

        Raises:
            ConfigError: the tower cannot be cut into so many; or drafts are on, beside which NxDI takes no images.
        """
        if self.neuron_config.enable_fused_speculation:
            raise ConfigError("expected False with images: NxDI hands a draft none", field="enable_fused_speculation")
        # NxDI's configuration is the language model's alone.
        config = KimiK2Config.from_pretrained(self.model_path)
        self.vision = NeuronKimiK25VisionEncoder(self.model_path, config, buckets, self.neuron_config.torch_dtype)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], media: Sequence[Sequence[tuple[Tensor, Grid]]]) -> Any:
        """Run prompts with their images and video chunks; NxDI's output, logits of the last tokens.

        Args:
            prompts: token ids.
            media: of each prompt, pixels [patches, 3, patch, patch] and grid in the order of their tokens.

        Raises:
            MediaError: an image fits no bucket, or a prompt's media tokens are not those of its images.
        """
        config, length = self.vision.config, self.neuron_config.max_context_length
        features = [[self.vision(pixels, [grid]) for pixels, grid in own] for own in media]
        inputs, rows, index = prefill_inputs(prompts, features, config, length)
        if rows is not None:
            assert index is not None
            # As long as the bucket: NxDI's wrapper pads ids, and would put zeros for embeddings of another length.
            index = F.pad(index, (0, length - index.shape[1]), value=-1)
            inputs["llava_args"] = [*[torch.empty(0)] * SKIPPED, rows, index]
        return self(**inputs)


def prefill_inputs(
    prompts: Sequence[Sequence[int]], features: Sequence[Sequence[Tensor]], config: VisionConfig, longest: int
) -> tuple[dict[str, Any], Tensor | None, Tensor | None]:
    """Arguments of a prefill, and its media's rows [M, H] with int32 [B, S], the row of each token, -1 for text.

    Args:
        features: of each prompt, the embeddings of its images and video chunks.
        longest: tokens that a prompt may have.

    Raises:
        MediaError: a prompt is too long, or its media tokens are not those of its images.
    """
    rows = MediaRows.of(prompts, features, config.media_token_ids)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    if width > longest:
        raise MediaError(f"a prompt of {width} tokens; max_context_length is {longest}")
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    slots = torch.arange(width)
    mask = (slots < lengths[:, None]).to(torch.int32)
    positions = torch.where(mask.bool(), slots.expand_as(ids), torch.ones_like(ids))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    if rows is None:
        return inputs, None, None
    index = rows.padded(width).to(torch.int32)
    inputs["input_ids"] = torch.where(index >= 0, 0, ids)
    return inputs, rows.features, index
