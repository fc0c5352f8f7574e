"""The kernels between the GEMMs in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from torch import Tensor

from kimi_k2.kernels.rowwise import decode, prefill
from kimi_k2.ops import mla_decode as ops_decode
from kimi_k2.ops import norm as ops_norm
from kimi_k2.ops.cache import store_entries
from kimi_k2.ops.rotary import apply_rotary_interleaved
from kimi_k2.ops.weights import dequantize_fp8_block

ops_norm.rms_norm.entry("triton", takes=prefill.supports_rms_norm)(prefill.rms_norm)
apply_rotary_interleaved.entry("triton", takes=prefill.supports_apply_rotary_interleaved)(
    prefill.apply_rotary_interleaved
)
store_entries.entry("triton", takes=prefill.supports_store_entries)(prefill.store_entries)
dequantize_fp8_block.entry("triton", takes=prefill.supports_dequantize_fp8_block)(prefill.dequantize_fp8_block)


@ops_norm.add_norm.entry("fused", takes=lambda x, delta, weight, eps: decode.supports_sum(x))
def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`decode.add_norm`."""
    made: tuple[Tensor, Tensor] = decode.add_norm(x, delta, weight, eps)
    return made


def _supports_absorb(
    q: Tensor, kv_a: Tensor, norm_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, w_uk: Tensor,
    cache: Tensor, eps: float,
) -> bool:  # fmt: skip
    return decode.supports(q, w_uk, cache)


ops_decode.absorb_and_store.entry("triton", takes=_supports_absorb)(decode.absorb_and_store)
