"""NaN, Inf and impossible scales in any stored tensor are refused, with file and tensor, converted or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import kimi
from damage import EXPERT, SHARD, private_copy
from damage import value as damaged

from kimi_k2.errors import NonfiniteError
from kimi_k2.quantization.rows import CHUNK_VALUES, is_finite, nonfinite
from kimi_k2.quantization.stored import formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16], ids=str)
def test_every_pattern_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    integer = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    patterns = torch.arange(256**dtype.itemsize, dtype=torch.int32).to(integer).view(dtype)
    good = patterns.to(torch.float32).isfinite()
    assert is_finite(patterns[good])
    assert not any(is_finite(value) for value in patterns[~good].split(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# At both ends, in the middle, and at the end of a part that is read at a time: its last value, and 64 bytes before.
@pytest.mark.parametrize("index", [0, 1_000_000, -1, "last", "near"])
def test_one_bad_value_among_many_is_found(dtype: torch.dtype, index: int | str) -> None:
    tensor = torch.linspace(-400, 400, 1_500_001).to(dtype)
    if isinstance(index, str):
        chunk = CHUNK_VALUES // dtype.itemsize
        index = 2 * chunk - (1 if index == "last" else 64 // dtype.itemsize)
    assert is_finite(tensor)
    assert is_finite(tensor[:0])
    for value in (torch.nan, torch.inf, -torch.inf)[: 1 if dtype == torch.float8_e4m3fn else 3]:  # which has no Inf
        tensor[index] = value
        assert not is_finite(tensor)


def test_the_fault_counts() -> None:
    tensor = torch.ones(4, 5)
    tensor[1, 2], tensor[3, 0], tensor[3, 1] = torch.nan, torch.inf, -torch.inf
    assert nonfinite(tensor) == "1 NaN and 2 Inf among 20 values, the first at [1, 2]"
    assert nonfinite(-torch.ones(3)) is None
    assert nonfinite(torch.full((2,), -1, dtype=torch.int32)) is None


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_scales_that_no_quantizer_makes(name: str) -> None:
    held = formats()[name]()
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = 0
    stored = held.quantize(weight)
    (suffix,) = held.scales
    scale = stored[suffix]
    assert held.impossible_scales(stored) is None
    counted = f"{int((scale > 0).sum())} of {scale.numel()} scales are "
    for factor, says in ((-1.0, f"{counted}negative"), (1e38, f"{counted}above")):
        found = held.impossible_scales({**stored, suffix: (scale.float() * factor).to(scale.dtype)})
        assert found is not None
        assert found[0] == suffix
        assert says in found[1]
    # Zero is right where all values are, and nowhere else.
    zero = scale.clone()
    zero[0, 0] = 0
    assert held.impossible_scales({**stored, suffix: zero}) is None
    zero[-1, -1] = 0
    count = {"fp8": 128 * 128, "int4": 32}[name]
    found = held.impossible_scales({**stored, suffix: zero})
    assert found is not None
    assert found[1].startswith("2 of ")
    lost = int(found[1].split("and ")[1].split()[0])
    assert 0.8 * count < lost <= count


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-packed"])
def test_an_exponent_that_is_no_number(name: str) -> None:
    held = formats()[name]()
    stored = held.quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    assert held.contradiction(stored) is None
    stored["weight_scale"][1, 1] = 255
    assert held.contradiction(stored) == ("weight_scale", "1 of 8 exponents are NaN (255)")


LAYOUTS = [Layout(2, experts=experts) for experts in ("bf16", "blockwise", "per_channel")]
LAYOUTS += [Layout(1, target="cuda", experts="stored")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.experts))
@pytest.mark.parametrize(
    ("suffix", "values"),
    [("weight", b"\xff" * 4), ("weight_scale_inv", b"\xff" * 4), ("weight_scale_inv", b"\0\0\x80\xbf")],
)
def test_every_conversion_refuses_unless_told_otherwise(
    fp8: Path, tmp_path: Path, layout: Layout, suffix: str, values: bytes
) -> None:
    """NaN in either dtype, and a scale of -1."""
    directory, name = private_copy(fp8, tmp_path / "source"), f"{EXPERT}.{suffix}"
    damaged(name, values)(directory)
    with pytest.raises(NonfiniteError) as caught:
        Presharder(directory, tmp_path / "out", layout).run()
    assert (caught.value.file, caught.value.tensor) == (str(directory / SHARD), name)
    assert not (tmp_path / "out" / "manifest.json").exists()
    options = ["--tp", layout.moe_tp, "--target", layout.target, "--experts", layout.experts, "--allow-nonfinite"]
    kimi("convert", directory, tmp_path / "allowed", *options)
