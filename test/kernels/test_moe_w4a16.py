"""What a machine without a GPU can hold of the INT4 expert kernel: order, refusals, choices, ABI."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common import build
from kimi_k2.kernels.experts import fp8, w4a16
from kimi_k2.kernels.experts.tuning import ExpertChoice
from kimi_k2.kernels.experts.w4a16 import (
    RECORD,
    check_choice,
    moe_w4a16,
    supports,
)
from kimi_k2.kernels.experts.w4a16_layout import PreparedW4A16, checkpoint_order, prepare_w4a16
from kimi_k2.quantization.int4_group import dequantize_int4_group

T, K, E, H, INTER = 4, 2, 2, 512, 256
Checkpoint = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """The four stacked tensors, packed by compressed-tensors."""
    generator = torch.Generator().manual_seed(5)
    values = [
        torch.randint(-8, 8, s, generator=generator, dtype=torch.int8) for s in ((E, 2 * INTER, H), (E, H, INTER))
    ]
    packed = [torch.stack([pack_to_int32(expert, 4) for expert in v]) for v in values]
    scales = [torch.rand(*v.shape[:2], v.shape[2] // 32, generator=generator).bfloat16() for v in values]
    return packed[0], scales[0], packed[1], scales[1]


def test_prepared_weights_are_the_same_bytes_in_another_order(checkpoint: Checkpoint) -> None:
    original = checkpoint
    prepared = prepare_w4a16(*original)
    for before, after in zip(original, prepared, strict=True):
        assert after is not None
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        assert not torch.equal(before, after)
    for at, expert in product((0, 2), range(E)):
        words, scale = prepared[at], prepared[at + 1]
        assert words is not None and scale is not None
        found = checkpoint_order({"weight_packed": words[expert], "weight_scale": scale[expert]}, at == 0)
        assert torch.equal(found["weight_packed"], original[at][expert])
        assert torch.equal(found["weight_scale"], original[at + 1][expert])


def test_mixed_mode_holds_the_dequantized_weights(checkpoint: Checkpoint) -> None:
    prepared = prepare_w4a16(*checkpoint, w2_bf16=True)
    dense = dequantize_int4_group(checkpoint[2], checkpoint[3], dtype=torch.bfloat16)
    assert prepared.down_proj_scale is None
    given = prepare_w4a16(*checkpoint[:2], dense, None)
    assert torch.equal(given.down_proj_packed, prepared.down_proj_packed)


@pytest.mark.parametrize(
    ("place", "value", "name"),
    [
        (0, torch.zeros(E, 2 * INTER, H), "gate_up_proj_packed"),
        (0, torch.zeros(E, 384, H // 8, dtype=torch.int32), "gate_up_proj_packed"),
        (1, torch.zeros(E, 2 * INTER, H // 32), "gate_up_proj_scale"),
        (2, torch.zeros(E, H, 24, dtype=torch.int32), "down_proj_packed"),
        (3, None, "down_proj_scale"),
    ],
)
def test_weights_that_cannot_be_prepared_are_named(checkpoint: Checkpoint, place: int, value: Any, name: str) -> None:
    given: list[Any] = list(checkpoint)
    given[place] = value
    with pytest.raises(KernelError, match=name):
        prepare_w4a16(*given)


@pytest.mark.parametrize("module", [fp8, w4a16])
@pytest.mark.parametrize("fused", [True, False])
def test_workspace_covers_the_worst_routing(fused: bool, module: Any) -> None:
    rows = 16 if fused else 32
    sizes = module.workspace_sizes(40, 8, 384, 7168, 512, ExpertChoice(fused, rows, 2, 2, 1))
    tiles = max(320, -(-320 // rows))  # all pairs on distinct experts, or all on one
    assert sizes["flags"][0] >= tiles * 4
    assert sizes["partial"][0] >= tiles * 4 * 2 * rows * 256
    assert sizes["contrib"] == (320 * 2 * 7168, torch.float32 if fused else torch.bfloat16)
    assert sizes["count2"][0] == (40 if fused else 1) * 28  # a counter a slab of 256, and a token where tokens finish
    if module is w4a16:  # a token's 128 columns as a record: two e4m3 codes a value, offsets and a factor
        assert sizes["inter_q"] == (320 * 4 * (2 * 128 + 32), torch.uint8)
        assert sizes["xs"] == (40 * 56 * (2 * 128 + 32), torch.uint8)
        many = module.workspace_sizes(40, 8, 384, 7168, 512, ExpertChoice(False, 64, 1, 1, 1))
        assert many["inter_q"] == (320 * 512, torch.bfloat16)
        assert many["pair_slot"] == (320, torch.int32)  # by which the sums find a pair's output


def test_record_is_as_long_as_cuda_has_it() -> None:
    text = (build.KERNELS / "experts/csrc/w4a16.cuh").read_text()
    found = re.search(r"kRecord = (\d+);", text)
    assert found is not None
    assert int(found.group(1)) == RECORD


def test_support_needs_a_hopper_gpu() -> None:
    assert not supports(7168, 512, 384, torch.device("cpu"))


def test_prepared_order_is_that_of_the_operation() -> None:
    names = moe_w4a16.registered._opoverload._schema.arguments[1:5]
    assert tuple(argument.name for argument in names) == PreparedW4A16._fields


def test_splits_that_no_launch_sums_are_refused() -> None:
    check_choice(ExpertChoice(False, 32, 2, 1, 1))
    check_choice(ExpertChoice(False, 128, 1, 1, 1))
    for rows in (64, 128):
        with pytest.raises(KernelError, match="splits1 is 2"):
            check_choice(ExpertChoice(False, rows, 2, 1, 1))
