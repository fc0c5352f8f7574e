"""Kimi-K2 as a model of vLLM: our weights and operations; vLLM's cache, scheduler, sampling and API."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

from kimi_k2.engine.layer_step import Place
from kimi_k2.model.decoder import DecoderLayer, KimiK2ForCausalLM
from kimi_k2.ops import registry
from kimi_k2.ops.collective import gather_last
from kimi_k2.ops.embedding import embedding
from kimi_k2.ops.linear import dense_linear
from kimi_k2.ops.mla_paged import paged_attention_plan
from kimi_k2.ops.norm import add_norm
from kimi_k2.parallel.all_reduce import AllReduce
from kimi_k2.parallel.apply import parallelize
from kimi_k2.serving.paged.layer import PagedLayer
from kimi_k2.serving.paged.weights import RankLoader
from kimi_k2.serving.vllm.attention import LatentAttention
from kimi_k2.serving.vllm.prompt_graphs import PromptGraphs, prompt_graphs
from kimi_k2.serving.vllm.support import config_of, layout_of, refusal
from kimi_k2.sharding.plan import make_plan

logger = logging.getLogger("vllm.kimi_k2")

# What vLLM does whichever model runs, for the line at start.
VLLM_DOES = "scheduler, cache, sampling, API"


class _Ours:
    """What stands in for the methods of vLLM's class; see `KimiK2ForVllm`."""

    stock: type

    def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
        """Our model, or vLLM's own where ours cannot serve the deployment."""
        hf_config = vllm_config.model_config.hf_text_config
        reason = refusal(vllm_config, hf_config)
        if reason is None:
            return super().__new__(cls)
        logger.info("kimi-k2: all operations are vLLM's: %s", reason)
        return cls.stock(vllm_config=vllm_config, prefix=prefix)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]
        model_config = vllm_config.model_config
        self.config, self.quant_config = model_config.hf_text_config, vllm_config.quant_config
        config, layout = config_of(self.config), layout_of(vllm_config)
        tp = get_tp_group()
        self.group, self.ranks = tp.device_group, layout.ranks
        dtype, device = model_config.dtype, torch.get_default_device()
        with torch.device("meta"):
            plain = KimiK2ForCausalLM(config, dtype=dtype, keep_quantized=True)
        self.plain = parallelize(plain, layout, tp.rank_in_group, device=device, group=self.group).eval()
        self.loader = RankLoader(self.plain, make_plan(config, layout), tp.rank_in_group)
        self.held = nn.ModuleList(
            LatentAttention(
                vllm_config, f"{prefix}.layers.{number}.self_attn.attn".lstrip("."), config.cache_dim, dtype
            )
            for number in range(config.num_hidden_layers)
        )
        self._steps: list[PagedLayer] | None = None
        # Positions that vLLM can ask for, its own trial runs included.
        self._positions = max(model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens)
        self._angles: tuple[Tensor, Tensor] | None = None
        self._vllm_config, self._recorded = vllm_config, False
        self._graphs: PromptGraphs | None = None
        logger.info("%s", started(self.plain))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the checkpoint's tensors; the names of this module's parameters that are filled."""
        loaded = self.loader.load(weights)
        self.loader.check()
        return {f"plain.{name}" for name in loaded}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """int64 [T] to [T, H]."""
        embedded: Tensor = self.plain.model.embed_tokens(input_ids)
        return embedded

    get_input_embeddings = embed_input_ids  # its name in older versions

    def make_empty_intermediate_tensors(self, *_: Any, **__: Any) -> Any:
        """vLLM's K2.5 asks for it at start, and calls it under pipeline parallelism, which is `refusal`'s."""
        raise NotImplementedError("kimi-k2: pipeline parallelism is served by vLLM's own model")

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Normed hidden states [T, H] of the batch's new tokens."""
        model = self.plain.model
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        x = inputs_embeds
        delta: Tensor | None = None
        if self._angles is None:  # from here on a step looks angles up, which takes a fifth of the launches
            self._angles = model.rotary.table(self._positions, x.dtype, x.device)
        cos, sin = (embedding(positions, angles, 0) for angles in self._angles)
        # Attention over pages takes lengths from the batch; these are for the layers' shape alone.
        place = Place(positions, positions, cos, sin, self._plan())
        batch = self.steps[0].held.batch()
        # While vLLM measures memory, the graphs' counts as used beside the step's.
        reserved = self._record(x) if batch is None else None
        if batch is not None and batch.lengths and self._graphs is not None and self._graphs.takes(len(x)):
            return self._graphs(x, place, batch)
        for step in self.steps:
            x, delta = step(x, delta, place, step.held.cache)
        assert delta is not None
        del reserved
        return add_norm(x, delta, model.norm.weight, model.norm.eps)[1]

    def _record(self, x: Tensor) -> Tensor | None:
        """Make the graphs of steps with prompts, once; memory of their size."""
        if self._recorded:
            return None
        self._recorded = True
        self._graphs, held = prompt_graphs(self.steps, self.plain.model.norm, self._vllm_config)
        return torch.empty(held, dtype=torch.uint8, device=x.device) if held else None

    def _plan(self) -> Tensor | None:
        """How kernels share out the attention of the sequences with one new token, the same for all layers."""
        first = self.steps[0]
        batch = first.held.batch()
        if batch is None or not batch.decodes:
            return None
        one, cache = batch.decodes, first.held.cache
        return paged_attention_plan(batch.seq_lens[:one], cache, batch.block_table[:one], len(first.w_uk))

    def compute_logits(self, hidden_states: Tensor, *_: Any) -> Tensor:
        """[N, H] to [N, vocab_size]."""
        logits = dense_linear(hidden_states, self.plain.lm_head.weight)
        return gather_last(logits, self.group) if self.ranks > 1 else logits

    @property
    def steps(self) -> list[PagedLayer]:
        """The layers, made when they first run: by then weights are there, real or vLLM's random ones."""
        if self._steps is None:
            self.plain.prepare()
            reduce = AllReduce(self.group, self.ranks > 1)
            self._steps = []
            for layer, held in zip(self.plain.model.layers, self.held, strict=True):
                assert isinstance(layer, DecoderLayer)
                assert isinstance(held, LatentAttention)
                self._steps.append(PagedLayer(layer, reduce, held))
        return self._steps


class KimiK2ForVllm(_Ours, DeepseekV3ForCausalLM):  # type: ignore[misc]
    """In place of vLLM's class for K2 and K2-Thinking, whose marks it has (`supports_pp` and the like)."""

    stock = DeepseekV3ForCausalLM


class KimiK25TextForVllm(_Ours, DeepseekV2ForCausalLM):  # type: ignore[misc]
    """In place of the class that vLLM's K2.5 has for its language model."""

    stock = DeepseekV2ForCausalLM


def started(model: KimiK2ForCausalLM) -> str:
    """The line at start: whose operations run, and why."""
    if not model.lm_head.weight.is_cuda:
        return f"kimi-k2: operations are ours, plain ones, since this is a CPU; {VLLM_DOES} are vLLM's"
    return f"kimi-k2: operations are ours ({', '.join(registry.TABLE)}); {VLLM_DOES} are vLLM's"
