"""Matrix products of BF16 operands whose sums stay in float32."""

from __future__ import annotations

import torch
from torch import Tensor

Dims = list[int]


def dot_float32(left: Tensor, right: Tensor, contracting: tuple[Dims, Dims], batch: tuple[Dims, Dims]) -> Tensor:
    """XLA's dot_general with a float32 result, whatever the operands' dtype.

    Trainium's matrix engine takes BF16 and sums in float32; a BF16 result rounds the sums, and operands widened to
    float32 run at a quarter of the speed. Elsewhere than on XLA the operands are widened, which gives the same numbers.

    Args:
        left, right: operands of one dtype.
        contracting, batch: dimensions of `left` and of `right` that are summed over, and that are paired.

    Returns:
        float32 [batch dimensions, left's others, right's others].
    """
    if left.device.type == "xla":
        import torch_xla

        out: Tensor = torch_xla._XLAC._xla_dot_general(
            left, right, (contracting, batch), preferred_element_type=torch.float32
        )
        return out
    letters = iter("abcdefghijklmnop")
    names = [["" for _ in range(tensor.dim())] for tensor in (left, right)]
    shared = [*zip(*batch, strict=True), *zip(*contracting, strict=True)]
    for one, other in shared:
        names[0][one] = names[1][other] = next(letters)
    own = [[name or next(letters) for name in side] for side in names]
    free = [
        "".join(letter for letter, name in zip(o, n, strict=True) if not name) for o, n in zip(own, names, strict=True)
    ]
    paired = "".join(own[0][one] for one, _ in zip(*batch, strict=True))
    equation = f"{''.join(own[0])},{''.join(own[1])}->{paired}{free[0]}{free[1]}"
    return torch.einsum(equation, left.to(torch.float32), right.to(torch.float32))
