"""What a step's layers are told of its new tokens, a launch each (csrc/step_inputs.cu).

PyTorch takes nine for `next_step`, three to twelve for `token_places` and seven for cos and sin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure

PlaceArguments = structure("rowwise/csrc/step_inputs.cu", "PlaceArguments")
RotaryArguments = structure("rowwise/csrc/step_inputs.cu", "RotaryArguments")


@kernel_operation(
    "places",
    "seq_lens i32[T], input_ids i32[T]?, positions i64[T], slots i64[T], block_table i32[B,W]; T > 0; T % B == 0",
    mutates_args=("seq_lens", "input_ids", "positions", "slots"),
)
def places(
    seq_lens: Tensor, input_ids: Tensor | None, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> None:
    """`ops.mla.next_step`; without `input_ids` `ops.mla.token_places`, which reads the positions.

    Args:
        block_table: of T / B tokens each row.
    """
    tokens, (rows, wide) = len(slots), block_table.shape
    arguments = PlaceArguments(seq_lens, input_ids, positions, slots, block_table, tokens, tokens // rows, wide, page)
    launch("rowwise/step_inputs", "kimi_places", "places", seq_lens.device, arguments)


def supports_token_places(positions: Tensor, block_table: Tensor, page: int) -> bool:
    """Whether `places` takes them, on a Hopper GPU."""
    return runs_cuda(positions.device) and places.fits(positions=positions.flatten(), block_table=block_table)


def token_places(positions: Tensor, block_table: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """See `ops.mla.token_places`."""
    positions = positions.flatten()
    seq_lens, slots = torch.empty_like(positions, dtype=torch.int32), torch.empty_like(positions)
    places(seq_lens, None, positions, slots, block_table, page)
    return seq_lens, slots


@kernel_operation("rotary", "positions i64[*P], inv_freq f32[D] -> cos bf16[*P,D], sin bf16[*P,D]; dtype == bf16")
def rotary(
    positions: Tensor, inv_freq: Tensor, multiplier: float, dtype: torch.dtype, *, cos: Tensor, sin: Tensor
) -> None:
    """`ops.embedding.rotary_cos_sin` to BF16, with PyTorch's bits."""
    arguments = RotaryArguments(positions, inv_freq, cos, sin, positions.numel(), len(inv_freq), multiplier)
    launch("rowwise/step_inputs", "kimi_rotary", "rotary", positions.device, arguments)
