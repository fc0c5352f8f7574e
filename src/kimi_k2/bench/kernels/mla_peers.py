"""Other kernels of MLA decode attention where they can be imported: FlashAttention 3 and FlashMLA as vLLM has them.

Each is held against ours once (`check`), so that its time is that of the same attention.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kimi_k2.bench.kernels.mla_cases import SOFTMAX_SCALE, Inputs, relative
from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention.mla_decode import mla_decode
from kimi_k2.kernels.attention.mla_plan import mla_plan
from kimi_k2.kernels.attention.mla_sizes import LATENT, PAGE, ROW
from kimi_k2.kernels.common.hardware import hopper


class Scheduled:
    """A kernel that shares its work out by the lengths once a step; `schedule` is not timed, as all layers use it.

    Attributes:
        plans: by the lengths' tensor, which is kept so that its number stays its own.
        query_dtype: of the queries that it takes; rounding them is not timed.
        error: largest distance to ours that its arithmetic explains.
    """

    query_dtype: ClassVar[torch.dtype] = torch.bfloat16
    error: ClassVar[float] = 0.01

    def __init__(self) -> None:
        self.plans: dict[int, tuple[Tensor, Any]] = {}

    def schedule(self, one: Inputs) -> None:
        """Make the plan for these lengths, if there is none."""
        if id(one.seq_lens) not in self.plans:
            self.plans[id(one.seq_lens)] = (one.seq_lens, self.plan(one))

    def plan(self, one: Inputs) -> Any:
        """What `run` takes."""
        raise NotImplementedError

    def run(self, one: Inputs, plan: Any) -> Tensor:
        """The attention, [B, H, 512]."""
        raise NotImplementedError

    def __call__(self, one: Inputs) -> Tensor:
        """`run` by the plan that `schedule` made."""
        return self.run(one, self.plans[id(one.seq_lens)][1])


class FlashAttention3(Scheduled):
    """vLLM's FlashAttention 3 with queries and values in latent space, and its scheduler's metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")

    def plan(self, one: Inputs) -> Any:
        """Queries' offsets and the scheduler's metadata."""
        batch, heads = one.q.shape[:2]
        starts = torch.arange(batch + 1, device=one.q.device, dtype=torch.int32)
        return starts, self.interface.get_scheduler_metadata(
            batch_size=batch, max_seqlen_q=1, max_seqlen_k=one.block_table.shape[1] * PAGE, num_heads_q=heads,
            num_heads_kv=1, headdim=ROW - LATENT, cache_seqlens=one.seq_lens, qkv_dtype=torch.bfloat16,
            headdim_v=LATENT, page_size=PAGE, cu_seqlens_q=starts, causal=True,
        )  # fmt: skip

    def run(self, one: Inputs, plan: Any) -> Tensor:
        """As vLLM's backend for MLA calls it."""
        latent, rope = one.cache.unsqueeze(2).split([LATENT, ROW - LATENT], dim=-1)
        out: Tensor = self.interface.flash_attn_varlen_func(
            one.q[..., LATENT:], rope, latent, q_v=one.q[..., :LATENT], max_seqlen_q=1, cu_seqlens_q=plan[0],
            max_seqlen_k=one.block_table.shape[1] * PAGE, seqused_k=one.seq_lens, block_table=one.block_table,
            softmax_scale=SOFTMAX_SCALE, causal=True, fa_version=3, scheduler_metadata=plan[1],
        )  # fmt: skip
        return out


class FlashMLA(Scheduled):
    """vLLM's FlashMLA over a BF16 cache."""

    def __init__(self) -> None:
        super().__init__()
        self.interface = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")

    def plan(self, one: Inputs) -> Any:
        """Its first call makes the metadata."""
        made = self.interface.get_mla_metadata()[0]
        self.run(one, made)
        return made

    def run(self, one: Inputs, plan: Any) -> Tensor:
        """One query a sequence."""
        out: Tensor = self.interface.flash_mla_with_kvcache(
            one.q.unsqueeze(1), one.cache.unsqueeze(2), one.block_table, one.seq_lens, LATENT, plan,
            softmax_scale=SOFTMAX_SCALE, causal=True,
        )[0]  # fmt: skip
        return out


class FlashMLAFp8(Scheduled):
    """vLLM's FlashMLA over an e4m3 cache, which wants e4m3 queries too: they are rounded to 2.6 %."""

    query_dtype = torch.float8_e4m3fn
    error = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.interface = importlib.import_module("vllm.v1.attention.ops.flashmla")
        if self.interface.is_flashmla_dense_supported()[0] is False:
            raise ImportError(self.interface.is_flashmla_dense_supported()[1])
        self.one = torch.ones(1, device="cuda")

    def plan(self, one: Inputs) -> Any:
        """The parts of each sequence."""
        return self.interface.get_mla_metadata_dense_fp8(one.seq_lens, one.q.shape[1], 1)

    def run(self, one: Inputs, plan: Any) -> Tensor:
        """One query a sequence, as vLLM's backend calls it."""
        out: Tensor = self.interface.flash_mla_with_kvcache_fp8(
            one.q.unsqueeze(1), one.cache.unsqueeze(2), one.block_table, one.seq_lens, LATENT, *plan,
            softmax_scale=SOFTMAX_SCALE, causal=True, descale_q=self.one, descale_k=self.one,
        )[0]  # fmt: skip
        return out


class TritonMla(Scheduled):
    """vLLM's Triton kernel; over an e4m3 cache its queries keep BF16's bits, as ours do."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = importlib.import_module("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd
        self.one = torch.ones(1, device="cuda")

    def plan(self, one: Inputs) -> Any:
        """Parts of the longest sequence, as vLLM's backend has them: a power of two, at most two an SM."""
        parts = max(1, one.block_table.shape[1] * PAGE // 512)
        return min(1 << (parts - 1).bit_length(), 2 * hopper(one.q.device.index, "mla_decode")[1])

    def run(self, one: Inputs, plan: Any) -> Tensor:
        """One query a sequence, as vLLM's backend calls it, its scratch memory made anew."""
        if one.cache.numel() >= 2**31:
            raise RuntimeError("its offsets into the cache have 32 bits")
        batch, heads = one.q.shape[:2]
        out, sums = one.q.new_zeros(batch, heads, LATENT), one.q.new_zeros(batch, heads)
        parts = torch.empty(batch, heads, plan, LATENT + 1, device=one.q.device)
        cache = one.cache.unsqueeze(2)
        self.attend(
            one.q, cache, cache[..., :LATENT], out, sums, one.block_table, one.seq_lens, parts, plan, SOFTMAX_SCALE,
            PAGE, k_scale=self.one, v_scale=self.one, is_mla=True,
        )  # fmt: skip
        return out


class RoundedQueries(Scheduled):
    """Ours where `mla_decode=e4m3` is pinned; unlike the peer's, its rounding of the queries is timed."""

    error = 0.1

    def plan(self, one: Inputs) -> Any:
        """For rounded queries."""
        return mla_plan(one.seq_lens, one.block_table.shape[1] * PAGE, one.q.shape[1], True, True)

    def run(self, one: Inputs, plan: Any) -> Tensor:
        """One query a sequence."""
        given = one.q, one.cache, one.seq_lens, SOFTMAX_SCALE, one.block_table
        out: Tensor = mla_decode(*given, plan=plan, rounded=True)
        return out


def peers(dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Scheduled]]:
    """(name, call) of each that vLLM brings for a cache of this dtype."""
    if importlib.util.find_spec("vllm") is None:
        return
    known: list[tuple[str, type[Scheduled]]] = [("FlashMLA FP8", FlashMLAFp8), ("vLLM Triton", TritonMla)]
    if dtype == torch.bfloat16:
        known[:1] = [("FlashAttention 3", FlashAttention3), ("FlashMLA", FlashMLA)]
    for name, kind in known:
        try:
            yield name, kind()
        except ImportError:  # vLLM was built without it
            continue


def check(name: str, peer: Scheduled, one: Inputs, ours: Tensor) -> None:
    """Hold a peer against our result [B, H, 512] for the same inputs.

    Raises:
        KernelError: it is farther from ours than rounding explains.
    """
    given = replace(one, q=one.q.to(peer.query_dtype))
    peer.schedule(given)
    found = relative(peer(given).reshape(ours.shape), ours.double())
    if not found < peer.error:
        raise KernelError(f"{name}: {found:.1e} from ours, expected below {peer.error}")
