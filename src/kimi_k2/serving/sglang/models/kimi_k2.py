"""Kimi-K2 as a model of SGLang: our weights and operations; SGLang's cache, scheduler, head, sampling and API."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.models import deepseek_v2
from sglang.srt.runtime_context import attention_backends, get_parallel
from torch import Tensor, nn

from kimi_k2.serving.paged.model import PagedModel, Share, started
from kimi_k2.serving.paged.support import config_of
from kimi_k2.serving.sglang.attention import PoolCache
from kimi_k2.serving.sglang.support import ADDED, BACKEND, layout_of

logger = logging.getLogger("sglang.kimi_k2")

# What SGLang does whichever model runs, for the line at start.
SGLANG_DOES = "scheduler, radix cache, sampling, API"


class InputEmbedding:
    """The embedding as SGLang asks it.

    Attributes:
        num_embeddings: of all ranks; SGLang keeps the ids of images below it.
    """

    def __init__(self, paged: PagedModel) -> None:
        self.paged, self.num_embeddings = paged, paged.plain.config.vocab_size

    def __call__(self, input_ids: Tensor) -> Tensor:
        """int64 [T] to [T, H]."""
        return self.paged.embed(input_ids)


class DeepseekV3ForCausalLM(deepseek_v2.DeepseekV3ForCausalLM):  # type: ignore[misc]  # SGLang finds it by this name
    """In place of SGLang's class where `support.overrides` has chosen our backend of attention."""

    def __new__(cls, config: Any, quant_config: Any = None, **options: Any) -> Any:
        """Our model, or SGLang's own where another backend was chosen in the end."""
        if attention_backends() == (BACKEND, BACKEND):
            return super().__new__(cls)
        logger.info("kimi-k2: all operations are SGLang's: attention by %s", "/".join(attention_backends()))
        return deepseek_v2.DeepseekV3ForCausalLM(config=config, quant_config=quant_config, **options)

    def __init__(self, config: Any, quant_config: Any = None, **_: Any) -> None:
        nn.Module.__init__(self)
        self.config, self.quant_config = config, quant_config
        ours, parallel, dtype = config_of(config, ADDED), get_parallel(), torch.get_default_dtype()
        self.paged = PagedModel(
            ours, Share(layout_of(parallel), parallel.tp_rank, parallel.tp_group.device_group),
            [PoolCache(number) for number in range(ours.num_hidden_layers)],
            dtype, torch.get_default_device(),
        )  # fmt: skip
        self.plain = self.paged.plain
        self.logits_processor = LogitsProcessor(config)
        self.logits_processor.use_fp32_lm_head = True  # as our own head: of a near tie no rounding decides
        if parallel.tp_rank == 0:
            logger.info("%s", started(self.plain, "SGLang", SGLANG_DOES))

    start_layer = 0

    @property
    def end_layer(self) -> int:
        """Behind the last layer."""
        return len(self.paged.held)

    def get_input_embeddings(self) -> InputEmbedding:
        """For embeddings that images or requests replace."""
        return InputEmbedding(self.paged)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *_: Any, **__: Any) -> None:
        """Take the checkpoint's tensors.

        Raises:
            CheckpointError: (subclasses) a tensor that is missing, unknown or of another shape.
        """
        self.paged.load(weights)
        self.post_load_weights()

    @torch.no_grad()
    def post_load_weights(self, *_: Any, **__: Any) -> None:
        """Make the layers before SGLang sees how much memory is left for its pool; it calls this for random weights."""
        self.paged.steps  # noqa: B018

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: None = None,
    ) -> Any:
        """What SGLang's head makes of the batch's new tokens: logits, log-probabilities."""
        x = self.paged.embed(input_ids) if input_embeds is None else input_embeds
        hidden_states = self.paged.run(x, self.paged.batch(positions, x))
        return self.logits_processor(input_ids, hidden_states, self.plain.lm_head, forward_batch)


EntryClass = DeepseekV3ForCausalLM
