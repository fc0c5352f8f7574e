"""NaN, Inf and impossible scales in any stored tensor are refused, with file and tensor, converted or loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import kimi
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_k2.errors import NonfiniteError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.quantization.rows import CHUNK_VALUES, is_finite, nonfinite
from kimi_k2.quantization.stored import formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


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


def put(value: float) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor.view(-1)[tensor.numel() // 2] = value

    return change


CASES = [
    ("fp8", f"{EXPERT}.weight", put(torch.nan)),
    ("fp8", f"{EXPERT}.weight_scale_inv", put(torch.nan)),
    ("fp8", f"{EXPERT}.weight_scale_inv", put(-1.0)),
    ("fp8", "model.layers.0.mlp.up_proj.weight_scale_inv", put(torch.inf)),
    ("thinking", f"{EXPERT}.weight_scale", put(torch.nan)),
    ("thinking", f"{EXPERT}.weight_scale", put(-0.5)),
    ("bf16", f"{EXPERT}.weight", put(torch.nan)),
]


@pytest.mark.parametrize(("source", "name", "change"), CASES)
def test_conversion_and_loading_refuse(
    checkpoints: dict[str, Path], tmp_path: Path, source: str, name: str, change: Callable[[Tensor], None]
) -> None:
    directory = Path(shutil.copytree(checkpoints[source], tmp_path / "source"))
    shard = spoil(directory, name, change)
    outputs = ["bf16", "blockwise", "per_channel"]
    layouts = [Layout(2, experts=experts) for experts in outputs] + [Layout(1, 1, "cuda", "stored")]
    layouts = layouts if EXPERT in name else layouts[-2:-1]
    for number, layout in enumerate(layouts):
        output = tmp_path / f"out{number}"
        with pytest.raises(NonfiniteError) as caught:
            Presharder(directory, output, layout).run()
        assert (caught.value.file, caught.value.tensor) == (str(shard), name)
        assert not (output / "manifest.json").exists()
        command = ["convert", str(directory), str(tmp_path / f"allowed{number}"), "--allow-nonfinite"]
        command += ["--tp", str(layout.moe_tp), "--target", layout.target, "--experts", layout.experts]
        kimi(*command)
    with pytest.raises(NonfiniteError) as caught:
        KimiK2ForCausalLM.from_pretrained(directory)
    assert caught.value.tensor == name


def spoil(directory: Path, name: str, change: Callable[[Tensor], None]) -> Path:
    """Change one tensor's values in place; its shard."""
    for shard in directory.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            change(tensors[name])
            save_file(tensors, shard)
            return shard
    raise KeyError(name)
