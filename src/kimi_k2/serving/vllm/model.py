"""Kimi-K2 as a model of vLLM: our weights and operations; vLLM's cache, scheduler, sampling and API."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kimi_k2.engine.batch import Batch
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import DecoderLayer, HiddenStates, KimiK2ForCausalLM
from kimi_k2.model.moe import MoE
from kimi_k2.serving.paged.model import Held, PagedModel, Share, started
from kimi_k2.serving.paged.support import config_of
from kimi_k2.serving.vllm.adapter import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Deployment,
    IntermediateTensors,
    get_pp_indices,
)
from kimi_k2.serving.vllm.attention import LatentAttention
from kimi_k2.serving.vllm.balance import Placed
from kimi_k2.serving.vllm.chosen import Chosen
from kimi_k2.serving.vllm.drafts import Shared
from kimi_k2.serving.vllm.flags import noted
from kimi_k2.serving.vllm.lora import Loras
from kimi_k2.serving.vllm.prompt_graphs import PromptGraphs, prompt_graphs
from kimi_k2.serving.vllm.ranks import Exchange
from kimi_k2.serving.vllm.step import Group, move_caches
from kimi_k2.serving.vllm.support import cache_dtype, invariant, layout_of, redundant_experts, refusal
from kimi_k2.serving.vllm.tower import share_out
from kimi_k2.sharding.layout import engine_serves

logger = logging.getLogger("vllm.kimi_k2")

# What vLLM does whichever model runs, for the line at start.
VLLM_DOES = "scheduler, cache, sampling, API"


class _KimiK2:
    """What stands in for the methods of vLLM's class; see `KimiK2ForVllm`."""

    stock: type
    lora_manager: Any  # vLLM's, which puts itself here

    def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
        """Our model, or vLLM's own where ours cannot serve the deployment."""
        try:
            reason = refusal(Deployment(vllm_config))
        except AttributeError as error:
            reason = f"its configuration has changed: {error}"
        if reason is None:
            return super().__new__(cls)
        engine_serves(reason)
        logger.info("kimi-k2: all operations are vLLM's: %s", reason)
        return cls.stock(vllm_config=vllm_config, prefix=prefix)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]
        self.it = it = Deployment(vllm_config)
        self.config, self.quant_config = it.hf, it.quantization
        # As asked: vLLM sets it to NONE where it may capture no attention of ours.
        self.graph_mode = it.graphs
        config, tp, layout = config_of(self.config), Group("tp"), layout_of(it)
        replica = it.replica if layout.replicas > 1 else 0
        self._pp = Group("pp")
        stage = range(*get_pp_indices(config.num_hidden_layers, self._pp.rank, self._pp.size))
        self.held = nn.ModuleList(
            LatentAttention(
                vllm_config,
                # As vLLM's own model calls it: connectors and caches on disk go by this name.
                f"{prefix}.model.layers.{number}.self_attn.attn".lstrip("."),
                config.cache_dim,
                cast(torch.dtype, cache_dtype(it, config)),
            )
            for number in stage
        )
        self.paged = PagedModel(
            config,
            Share(
                layout, replica * layout.dense + tp.rank, tp.on_device, Exchange() if layout.replicas > 1 else None,
                stage if self._pp.size > 1 else None, redundant_experts(it),
            ),
            cast(Sequence[Held], self.held),
            it.dtype, torch.get_default_device(),
        )  # fmt: skip
        self.plain.batch_invariant = invariant()
        if it.balanced:
            self._let_experts_be_moved()
        if it.routed:
            chosen = {number: Chosen(number) for number, _ in self._mixtures()}
            self.paged.places, self.chosen = chosen, nn.ModuleList(chosen.values())
        self.loras = None if it.lora is None else Loras(self.paged, self, it)
        if it.load_format == "dummy":
            self.paged.randomize()
        self._recorded = False
        self._graphs: PromptGraphs | None = None
        self._seen: tuple[int, ...] = ()
        self._shared: Shared | None = None
        logger.info("%s", started(self.plain, "vLLM", VLLM_DOES))
        if unused := noted(it, "unused"):
            logger.info("kimi-k2: of no effect, as our model is not compiled: %s", ", ".join(unused))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take tensors of a checkpoint, also while others serve; see `PagedModel.load`."""
        return self.paged.load(weights)

    def _mixtures(self) -> list[tuple[int, MoE]]:
        """Mixtures of experts here, by their layer's number."""
        layers = enumerate(self.plain.model.layers)
        return [(n, layer.mlp) for n, layer in layers if isinstance(layer, DecoderLayer) and isinstance(layer.mlp, MoE)]

    def _let_experts_be_moved(self) -> None:
        """Have what vLLM asks of a mixture of experts whose load it evens; see `balance`."""
        config = self.plain.config
        placed = {
            number: Placed(moe.experts, config.n_routed_experts, config.num_experts_per_tok)
            for number, moe in self._mixtures()
        }
        self.paged.places = placed
        self.paged.loader.held = lambda planned: placed[planned.layer].held()
        experts = next(iter(placed.values())).experts
        self.moe_layers, self.num_moe_layers = list(placed.values()), len(placed)
        self.expert_weights: list[list[Tensor]] = []
        self.num_logical_experts = self.num_routed_experts = config.n_routed_experts
        self.num_physical_experts, self.num_local_physical_experts = experts.total_experts, experts.num_experts
        self.num_redundant_experts = experts.total_experts - config.n_routed_experts
        self.num_shared_experts, self.num_expert_groups = config.n_shared_experts, 1

    def set_eplb_state(self, *maps: Tensor, **named: Tensor) -> None:
        """Take vLLM's maps of experts, and give it the rows that it may move, in the kernels' order from here on."""
        with torch.inference_mode():
            self.paged.make_steps()
        super().set_eplb_state(*maps, **named)  # type: ignore[misc]  # of the class that this one stands in for

    @property
    def plain(self) -> KimiK2ForCausalLM:
        """The weights, which are no submodule's.

        So nothing of vLLM's writes them but by `load_weights`: its reload would swap tensors under the layers' steps.
        """
        return self.paged.plain

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """int64 [T] to [T, H]."""
        with self.plain.computing():
            return self.paged.embed(input_ids)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """In front of which layers a draft's head wants hidden states."""
        beyond = [layer for layer in layers if not 0 <= layer <= self.config.num_hidden_layers]
        if beyond:
            raise ConfigError(
                f"{beyond}, of a target with {self.config.num_hidden_layers} layers",
                field="eagle_aux_hidden_state_layer_ids",
            )
        self._seen = tuple(sorted(set(layers)))

    @property
    def model(self) -> Any:
        """What a draft's head may share, see `Shared`; adapters' sites, where there are some, have it too."""
        if self.it.drafts is None:
            raise AttributeError("model")
        sites = self._modules.get("model")  # type: ignore[attr-defined]  # of nn.Module
        if self._shared is None:
            self._shared = Shared(self.plain, self.config)
            if sites is not None:
                vars(sites).update(embed_tokens=self._shared.embed_tokens, lm_head=self._shared.lm_head)
        return self._shared if sites is None else sites

    @property
    def lm_head(self) -> Any:
        """Likewise."""
        return self.model.lm_head

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> Any:
        """What a stage takes of the one before it, of vLLM's trial runs."""
        names = ("hidden_states", "residual")
        shape = batch_size, self.config.hidden_size
        return IntermediateTensors({name: torch.zeros(shape, dtype=dtype, device=device) for name in names})

    @torch.inference_mode()
    def __call__(self, *args: Any, **named: Any) -> Any:
        """`forward` in the model's mode."""
        with self.plain.computing():
            return super().__call__(*args, **named)  # type: ignore[misc]  # of the class that this one stands in for

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Normed hidden states [T, H] of the batch's new tokens; with a draft's head, those before its layers too.

        A pipeline's stages hand on the residual, and what is yet to be added to it as `hidden_states`.
        """
        delta: Tensor | None = None
        if self._pp.rank > 0:
            x, delta = intermediate_tensors["residual"], intermediate_tensors["hidden_states"]
        elif inputs_embeds is None:
            assert input_ids is not None
            x = self.embed_input_ids(input_ids)
        else:
            x = inputs_embeds
        states = HiddenStates(self._seen) if self._seen else None
        batch = self.paged.batch(positions, x)
        if self.loras is not None:
            self.loras.tell(self.lora_manager)
        if batch is not None:
            move_caches(batch, dict(zip(self.paged.layers, cast(Sequence[LatentAttention], self.held), strict=True)))
        # While vLLM measures memory, the graphs' counts as used beside the step's.
        reserved = self._record(x) if batch is None else None
        if batch is not None and self.plain.batch_invariant:
            return torch.cat([self._phase(x[rows], phase) for rows, phase in batch.phases()])
        graphs = None if batch is None else self._graphs_of(x, batch)
        if batch is not None and graphs is not None:
            hidden_states = graphs(x, batch, [layer.cache for layer in self.paged.held], states)
        else:
            x, delta = self.paged.through(x, delta, batch, states)
            if self._pp.rank < self._pp.size - 1:
                return IntermediateTensors({"hidden_states": delta, "residual": x})
            hidden_states = self.paged.norm(x, delta)
        del reserved
        return hidden_states if states is None else (hidden_states, states.apart())

    def _graphs_of(self, x: Tensor, batch: Batch) -> PromptGraphs | None:
        """Those that hold a step with prompts."""
        return self._graphs if batch.chunks and self._graphs is not None and self._graphs.takes(len(x)) else None

    def _phase(self, x: Tensor, batch: Batch) -> Tensor:
        """Normed hidden states of decodes alone, or of prompts alone, each kind by an arithmetic of its own."""
        graphs = self._graphs_of(x, batch)
        if graphs is not None:
            return graphs(x, batch, [layer.cache for layer in self.paged.held])
        with self.plain.computing(decoding=not batch.chunks):
            return self.paged.run(x, batch)

    def _record(self, x: Tensor) -> Tensor | None:
        """Make the graphs of steps with prompts, once; memory of their size."""
        # Other replicas have another number of tokens each time, and of a stage not every piece is here; adapters'
        # additions are not in the pieces, and vLLM takes experts chosen from later on.
        in_pieces = self.paged.exchange is None and self.loras is None and not self.it.routed
        if self._recorded or self._pp.size > 1 or not in_pieces:
            return None
        self._recorded = True
        self._graphs, graph_bytes = prompt_graphs(self.paged.steps, self.plain.model.norm, self.it)
        return torch.empty(graph_bytes, dtype=torch.uint8, device=x.device) if graph_bytes else None

    def compute_logits(self, hidden_states: Tensor, *_: Any) -> Tensor:
        """[N, H] to [N, vocab_size]."""
        with self.plain.computing():
            return self.paged.logits(hidden_states)


class KimiK2ForVllm(_KimiK2, DeepseekV3ForCausalLM):  # type: ignore[misc]
    """In place of vLLM's class for K2 and K2-Thinking, whose marks it has (`supports_pp` and the like)."""

    stock = DeepseekV3ForCausalLM


class KimiK25TextForVllm(_KimiK2, DeepseekV2ForCausalLM):  # type: ignore[misc]
    """In place of the class that vLLM's K2.5 has for its language model."""

    stock = DeepseekV2ForCausalLM

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        share_out()
