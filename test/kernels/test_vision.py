"""The tower's kernels as far as a CPU can run them: the rotation in Triton's interpreter, batches of SDPA, choices."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kimi_k2.errors import KernelError
from kimi_k2.kernels.vision.attention import batched
from kimi_k2.kernels.vision.rotate import rotated_qkv
from kimi_k2.ops.registry import TABLE, load_providers
from kimi_k2.ops.vision import Segments, segment_attention


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_rotation_agrees_with_float64() -> None:
    worker = Path(__file__).with_name("vision_interpret_worker.py")
    done = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.splitlines()[-1]) < 1e-6


def test_batches_of_one_length_are_segments() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(24, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    segments = Segments([8, 8, 8])
    torch.testing.assert_close(batched(q, k, v, segments, 0.3), segment_attention(q, k, v, segments, 0.3))


def test_attention_against_its_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(12, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    segments = Segments([5, 1, 6])
    block = torch.block_diag(*[torch.ones(length, length) for length in segments.lengths]).bool()
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    weights = scores.masked_fill(~block, float("-inf")).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, v)
    torch.testing.assert_close(segment_attention(q, k, v, segments, 0.3), wanted)
    assert segments.offsets.tolist() == [0, 5, 6, 12]
    assert (segments.longest, segments.uniform) == (6, False)


def test_malformed_operands() -> None:
    qkv, cos = torch.zeros(4, 3, 2, 8), torch.zeros(4, 1, 4)
    for bad in ((qkv[:, :2], cos, cos), (qkv, cos[:3], cos), (qkv, cos, cos.double()), (qkv.transpose(1, 2), cos, cos)):
        with pytest.raises(KernelError):
            rotated_qkv(*bad)


def test_order_of_the_table() -> None:
    load_providers()
    names = ["flash_attn_3", "flash_attn", "torch_varlen", "sdpa_batched", "plain"]
    assert TABLE["segment_attention"].names == names
    assert TABLE["rotated_qkv"].names == ["triton", "plain"]
