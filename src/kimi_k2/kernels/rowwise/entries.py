"""The kernels between the GEMMs in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from torch import Tensor

from kimi_k2.kernels.rowwise import decode, pairs, prefill, step_inputs
from kimi_k2.ops import experts as ops_experts
from kimi_k2.ops import linear as ops_norm
from kimi_k2.ops import mla as ops_mla
from kimi_k2.ops.embedding import apply_rotary_interleaved, embedding, rotary_cos_sin
from kimi_k2.ops.linear import dequantize_fp8_block
from kimi_k2.ops.registry import BY_ROW, ELEMENTWISE, batch_invariant

ops_norm.rms_norm.entry("triton", takes=prefill.supports_rms_norm, batch_invariant=BY_ROW)(prefill.row_norm)
apply_rotary_interleaved.entry("triton", takes=prefill.supports_apply_rotary_interleaved, batch_invariant=ELEMENTWISE)(
    prefill.apply_rotary_interleaved
)
ops_mla.rotate_and_store.entry(
    "triton",
    takes=prefill.supports_rotate_and_store,
    joins=dict.fromkeys(("apply_rotary_interleaved", "rms_norm", "store_entries"), "triton"),
    batch_invariant=BY_ROW,
)(prefill.rotate_and_store)
ops_mla.store_entries.entry("triton", takes=prefill.supports_store_entries, batch_invariant=ELEMENTWISE)(
    prefill.write_slots
)
dequantize_fp8_block.entry("triton", takes=prefill.supports_dequantize_fp8_block, batch_invariant=ELEMENTWISE)(
    prefill.dequantize_fp8_block
)

ops_experts.silu_and_mul.entry("cuda", takes=pairs.supports_silu_and_mul, batch_invariant=ELEMENTWISE)(
    pairs.silu_and_mul
)

ops_mla.next_step.entry("cuda", takes=step_inputs.places.takes, batch_invariant=ELEMENTWISE)(step_inputs.places)
ops_mla.token_places.entry("cuda", takes=step_inputs.supports_token_places, batch_invariant=ELEMENTWISE)(
    step_inputs.token_places
)
rotary_cos_sin.entry("cuda", takes=step_inputs.rotary.takes, batch_invariant=ELEMENTWISE)(step_inputs.rotary)

embedding.entry("triton", takes=prefill.supports_embedding, batch_invariant=ELEMENTWISE)(prefill.held_rows)


ops_norm.add_norm.entry("fused", takes=decode.add_norm.takes, batch_invariant=BY_ROW)(decode.add_norm)


@ops_mla.absorb_and_store.entry(
    "triton",
    takes=lambda q, kv_a, kv_norm, cos, sin, slots, w_uk, cache, eps: decode.supports(q, w_uk, cache),
    batch_invariant="16 sequences together, always",
)
def absorb_and_store(
    q: Tensor, kv_a: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, w_uk: Tensor,
    cache: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """`decode.absorb_and_store`."""
    arguments = q, kv_a, kv_norm, cos, sin, slots, w_uk, cache, eps
    return decode.absorb_and_store(*arguments, invariant=batch_invariant())
