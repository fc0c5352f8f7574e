"""Attention over vLLM's paged cache: the layer that vLLM gives a cache to, and what its steps are told of a batch.

vLLM's own MLA layer is not used: its kernels want other orders of weights, and exist for few sizes on a CPU.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kimi_k2.engine.batch import Batch, by_token
from kimi_k2.kernels.attention.mla_sizes import PAGE
from kimi_k2.serving.vllm.adapter import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayerBase,
    AttentionMetadataBuilder,
    Deployment,
    MLAAttentionSpec,
    MLACommonMetadata,
    platform,
)
from kimi_k2.serving.vllm.ranks import context_ranks
from kimi_k2.serving.vllm.step import Step, metadata_of, step_of
from kimi_k2.serving.vllm.support import invariant, may_touch_experts

NAME = "KIMI_K2_MLA"


class LatentBatch(Batch, MLACommonMetadata):  # type: ignore[misc]  # vLLM has no types for mypy here
    """A batch that connectors know as one of a cache with one entry a token; they look at nothing else of it."""


class BatchBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # vLLM has no types for mypy here
    """Makes a `Batch` of what vLLM's runner says of a step."""

    # New tokens of a sequence up to which they are decodes.
    reorder_batch_threshold: int = 1
    # A batch of decodes alone reads nothing back, so vLLM may capture it.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # abstract in vLLM
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        it = Deployment(vllm_config)
        self._captured = max(it.captured or [0])
        self._held: tuple[Tensor, Tensor] | None = None
        self._spread, self._invariant = context_ranks(it), invariant()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Of vLLM's graphs: none in batch-invariant mode, as they take a prompt's last token alone for a decode.

        And none where adapters may touch routed experts.
        """
        never = invariant() or may_touch_experts(Deployment(vllm_config))
        return AttentionCGSupport.NEVER if never else cls._cudagraph_support

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        """The batch of a step, for all layers."""
        most = self.reorder_batch_threshold
        # In batch-invariant mode a prompt's token is never a decode's, however the prompt was cut.
        step = step_of(common_attn_metadata, most, extended=not self._invariant)
        seq_lens, pages, rows, decodes = step.seq_lens, step.pages, step.rows, step.decodes
        if most > 1 and decodes:
            seq_lens, pages = self._by_token(step)
        else:
            rows = decodes
        if not step.prompts:  # some of them may be padding, without a token
            if self._spread is not None:  # vLLM's are where CUDA graphs know; trial runs may have none
                seq_lens = self._spread.held(seq_lens) if step.held is None else step.held
            return LatentBatch(rows, rows, seq_lens, step.slots, pages, spread=self._spread)
        starts = step.starts_on_host[decodes : step.sequences + 1].tolist()
        before = torch.arange(rows, dtype=torch.int32, device=seq_lens.device)
        return LatentBatch.of_sequences(
            [*range(rows), *starts], torch.cat((before, step.starts[decodes:])), seq_lens, step.prompts, pages,
            step.slots, self.kv_cache_spec.block_size, self._spread,
        )  # fmt: skip

    def _by_token(self, step: Step) -> tuple[Tensor, Tensor]:
        """`seq_lens` and `pages` with a row for each new token of the decodes, then those of the prompts."""
        decodes, rows, seq_lens, pages = step.decodes, step.rows, step.seq_lens, step.pages
        by_row = by_token(step.starts[: decodes + 1], seq_lens[:decodes], pages[:decodes], rows)
        if step.prompts:
            return torch.cat((by_row[0], seq_lens[decodes:])), torch.cat((by_row[1], pages[decodes:]))
        if rows > self._captured:
            return by_row
        if self._held is None:  # at an address that CUDA graphs know
            self._held = seq_lens.new_zeros(self._captured), pages.new_zeros(self._captured, pages.shape[1])
        for buffer, tensor in zip(self._held, by_row, strict=True):
            buffer[:rows].copy_(tensor)
        return self._held[0][:rows], self._held[1][:rows]


class LatentBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend: any size of latent, float caches, pages of any size."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Its name in vLLM's log."""
        return NAME

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """The kernels' pages on a GPU, where vLLM then takes these if nobody asks for others; any on a CPU."""
        sizes: list[Any] = AttentionBackend.get_supported_kernel_block_sizes()
        return [PAGE] if platform() == "cuda" else sizes

    @staticmethod
    def get_impl_cls() -> type:
        """The layer does the work itself."""
        return LatentAttention

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """The maker of batches."""
        return BatchBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """One entry a token for all heads."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """See `ops.registry`."""
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[pages, slots a page, cache_dim]; asked by vLLM 0.24 alone."""
        return (num_blocks, block_size, head_size)


class LatentAttention(nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """A layer's cache in vLLM's hands; holds no weights.

    Args:
        vllm_config: in whose forward context the layer is entered.
        name: unique in the model; vLLM finds the layer's number in it.
        cache_dim: values a token.
        dtype: of the cache.
    """

    supports_pcp: ClassVar[bool] = False
    supports_dcp: ClassVar[bool] = True
    need_to_return_lse_for_decode: ClassVar[bool] = True

    def __init__(self, vllm_config: Any, name: str, cache_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.cache_dim, self.dtype = name, cache_dim, dtype
        self.kv_cache = torch.tensor([])
        Deployment(vllm_config).layers[name] = self

    @property
    def impl(self) -> LatentAttention:
        """What vLLM calls the implementation."""
        return self

    def get_attn_backend(self) -> type[LatentBackend]:
        """Ours."""
        return LatentBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """The cache that this layer needs."""
        return MLAAttentionSpec(
            block_size=Deployment(vllm_config).page, num_kv_heads=1, head_size=self.cache_dim, dtype=self.dtype
        )

    @property
    def cache(self) -> Tensor:
        """[pages, slots a page, cache_dim]; some versions of vLLM have a dimension of heads."""
        return self.kv_cache.squeeze(1) if self.kv_cache.dim() == 4 else self.kv_cache

    def batch(self) -> Batch | None:
        """What this step computes; None while vLLM measures memory."""
        batch: Batch | None = metadata_of(self.name)
        return batch
