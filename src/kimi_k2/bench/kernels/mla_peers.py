"""Kernels of MLA decode attention: ours, and where they can be imported FlashAttention 3 and FlashMLA as vLLM has them.

Each is held against ours once (`check`), so that its time is that of the same attention.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import checked
from kimi_k2.kernels.attention.mla_decode import mla_decode
from kimi_k2.kernels.attention.mla_plan import mla_plan
from kimi_k2.kernels.attention.mla_sizes import LATENT, PAGE, ROW
from kimi_k2.kernels.common.hardware import hopper

SOFTMAX_SCALE = 192**-0.5


@dataclass(frozen=True)
class Inputs:
    """`mla_decode`'s tensors; the pages are shuffled."""

    q: Tensor
    cache: Tensor
    seq_lens: Tensor
    block_table: Tensor
    plan: Tensor | None = None


def ragged_inputs(lengths: Sequence[int], heads: int, dtype: torch.dtype) -> Inputs:
    """Sequences of these lengths, values of deviation 1, pages shuffled, and their plan; `dtype` of the cache."""
    pages = [-(-length // PAGE) for length in lengths]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, numbers in zip(table, torch.randperm(sum(pages)).int().split(pages), strict=True):
        row[: len(numbers)] = numbers
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Inputs(
        torch.randn(len(lengths), heads, ROW, device="cuda", dtype=torch.bfloat16),
        torch.randn(sum(pages), PAGE, ROW, device="cuda", dtype=torch.bfloat16).to(dtype),
        seq_lens,
        table.cuda(),
        mla_plan(seq_lens, max(pages) * PAGE, heads, dtype != torch.bfloat16),
    )


class Kernel(NamedTuple):
    """A kernel, one query a sequence.

    Attributes:
        name: of the table.
        plan: shares its work out by the lengths once a step; not timed, as all layers use it.
        run: with that plan the attention, [B, H, 512].
        queries: dtype that it takes; rounding them is not timed.
        error: largest distance to ours that its arithmetic explains.
    """

    name: str
    plan: Callable[[Inputs], Any]
    run: Callable[[Inputs, Any], Tensor]
    queries: torch.dtype = torch.bfloat16
    error: float = 0.01


def _decode(one: Inputs, plan: Tensor | None, **options: Any) -> Tensor:
    return mla_decode(one.q, one.cache, one.seq_lens, SOFTMAX_SCALE, one.block_table, plan=plan, **options)


def _rounded_plan(one: Inputs) -> Tensor:
    return mla_plan(one.seq_lens, one.block_table.shape[1] * PAGE, one.q.shape[1], True, True)


# An even split; by the lengths; and as where `mla_decode=e4m3` is pinned: its rounding of the queries is timed.
OURS = Kernel("ours", lambda _: None, _decode)
PLANNED = Kernel("ours, by plan", lambda one: one.plan, _decode)
ROUNDED = Kernel("ours, e4m3 queries", _rounded_plan, lambda one, plan: _decode(one, plan, rounded=True), error=0.1)


def flash_attention_3() -> Kernel:
    """vLLM's FlashAttention 3 with queries and values in latent space, and its scheduler's metadata."""
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")

    def plan(one: Inputs) -> tuple[Tensor, Any]:
        batch, heads = one.q.shape[:2]
        starts = torch.arange(batch + 1, device=one.q.device, dtype=torch.int32)
        return starts, interface.get_scheduler_metadata(
            batch_size=batch, max_seqlen_q=1, max_seqlen_k=one.block_table.shape[1] * PAGE, num_heads_q=heads,
            num_heads_kv=1, headdim=ROW - LATENT, cache_seqlens=one.seq_lens, qkv_dtype=torch.bfloat16,
            headdim_v=LATENT, page_size=PAGE, cu_seqlens_q=starts, causal=True,
        )  # fmt: skip

    def run(one: Inputs, plan: tuple[Tensor, Any]) -> Tensor:
        latent, rope = one.cache.unsqueeze(2).split([LATENT, ROW - LATENT], dim=-1)
        return interface.flash_attn_varlen_func(
            one.q[..., LATENT:], rope, latent, q_v=one.q[..., :LATENT], max_seqlen_q=1, cu_seqlens_q=plan[0],
            max_seqlen_k=one.block_table.shape[1] * PAGE, seqused_k=one.seq_lens, block_table=one.block_table,
            softmax_scale=SOFTMAX_SCALE, causal=True, fa_version=3, scheduler_metadata=plan[1],
        )  # fmt: skip

    return Kernel("FlashAttention 3", plan, run)


def flash_mla() -> Kernel:
    """vLLM's FlashMLA over a BF16 cache."""
    interface = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")

    def plan(one: Inputs) -> Any:
        made = interface.get_mla_metadata()[0]
        run(one, made)  # the first call fills it
        return made

    def run(one: Inputs, plan: Any) -> Tensor:
        return interface.flash_mla_with_kvcache(
            one.q.unsqueeze(1), one.cache.unsqueeze(2), one.block_table, one.seq_lens, LATENT, plan,
            softmax_scale=SOFTMAX_SCALE, causal=True,
        )[0]  # fmt: skip

    return Kernel("FlashMLA", plan, run)


def flash_mla_fp8() -> Kernel:
    """vLLM's FlashMLA over an e4m3 cache, which wants e4m3 queries too: they are rounded to 2.6 %."""
    interface = importlib.import_module("vllm.v1.attention.ops.flashmla")
    supported, reason = interface.is_flashmla_dense_supported()
    if not supported:
        raise ImportError(reason)
    unscaled = torch.ones(1, device="cuda")

    def run(one: Inputs, plan: Any) -> Tensor:
        return interface.flash_mla_with_kvcache_fp8(
            one.q.unsqueeze(1), one.cache.unsqueeze(2), one.block_table, one.seq_lens, LATENT, *plan,
            softmax_scale=SOFTMAX_SCALE, causal=True, descale_q=unscaled, descale_k=unscaled,
        )[0]  # fmt: skip

    def plan(one: Inputs) -> Any:
        return interface.get_mla_metadata_dense_fp8(one.seq_lens, one.q.shape[1], 1)

    return Kernel("FlashMLA FP8", plan, run, torch.float8_e4m3fn, 0.1)


def triton_mla() -> Kernel:
    """vLLM's Triton kernel; over an e4m3 cache its queries keep BF16's bits, as ours do."""
    attend = importlib.import_module("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd
    unscaled = torch.ones(1, device="cuda")

    def plan(one: Inputs) -> int:
        """Parts of the longest sequence, as vLLM's backend has them: a power of two, at most two an SM."""
        parts: int = max(1, one.block_table.shape[1] * PAGE // 512)
        return min(1 << (parts - 1).bit_length(), 2 * hopper(one.q.device.index, "mla_decode")[1])

    def run(one: Inputs, plan: int) -> Tensor:
        """As vLLM's backend calls it, its scratch memory made anew."""
        if one.cache.numel() >= 2**31:
            raise RuntimeError("its offsets into the cache have 32 bits")
        batch, heads = one.q.shape[:2]
        out, sums = one.q.new_zeros(batch, heads, LATENT), one.q.new_zeros(batch, heads)
        parts = torch.empty(batch, heads, plan, LATENT + 1, device=one.q.device)
        cache = one.cache.unsqueeze(2)
        attend(
            one.q, cache, cache[..., :LATENT], out, sums, one.block_table, one.seq_lens, parts, plan, SOFTMAX_SCALE,
            PAGE, k_scale=unscaled, v_scale=unscaled, is_mla=True,
        )  # fmt: skip
        return out

    return Kernel("vLLM Triton", plan, run)


def peers(dtype: torch.dtype) -> Iterator[Kernel]:
    """Each that vLLM brings for a cache of this dtype."""
    if importlib.util.find_spec("vllm") is None:
        return
    over = (flash_attention_3, flash_mla) if dtype == torch.bfloat16 else (flash_mla_fp8,)
    for make in (*over, triton_mla):
        try:
            yield make()
        except ImportError:  # vLLM was built without it
            continue


def check(peer: Kernel, one: Inputs, ours: Tensor | None = None) -> None:
    """Hold a peer against our result [B, H, 512] for the same inputs.

    Raises:
        KernelError: it is farther from ours than rounding explains.
    """
    wanted = _decode(one, None) if ours is None else ours
    inputs = replace(one, q=one.q.to(peer.queries))
    checked(peer.name, peer.run(inputs, peer.plan(inputs)).reshape(wanted.shape), wanted.double(), peer.error, "ours")
