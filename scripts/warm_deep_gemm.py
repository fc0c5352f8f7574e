"""Compile stock vLLM's FP8 GEMMs for a rank's linears, several at once, before a server looks for them.

DeepGEMM compiles a kernel, about a second each, when a shape first asks for it, one after the other; vLLM's own warm-up
goes through all of them. Here each of a slice's linears has a process of its own, and the sizes are those that
`vllm_slice.py` meets. The cache is DeepGEMM's: `DG_JIT_CACHE_DIR`, or vLLM's default for it.

    python scripts/warm_deep_gemm.py
    python scripts/warm_deep_gemm.py --linears 1024x7168 7168x512
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path

# Rows and columns of the linears of `vllm_slice.SLICE`: qkv_a, q_b, kv_b, o, dense MLP, shared expert.
LINEARS = ((2112, 7168), (1536, 1536), (2048, 512), (7168, 1024), (4608, 7168), (7168, 2304), (512, 7168), (7168, 256))
TOKENS = (
    1, 4, 16, 64, 8192, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8, 32, 128, 256, 512, 7680,
    24, 48, 96, 192, 384, 768, 1536, 2560, 3584, 8128,
)  # fmt: skip
BLOCK = 128


def compile_for(linear: tuple[int, int], tokens: tuple[int, ...]) -> str:
    """Run a linear once for each number of tokens."""
    import torch

    rows, columns = linear

    sys.path.insert(0, str(deep_gemm_parent()))
    import deep_gemm

    deep_gemm.set_pdl(True)
    weight = torch.zeros(rows, columns, device="cuda", dtype=torch.float8_e4m3fn)
    weight_scale = torch.ones(-(-rows // BLOCK), columns // BLOCK, device="cuda")
    start = time.monotonic()
    for count in tokens:
        x = torch.zeros(count, columns, device="cuda", dtype=torch.float8_e4m3fn)
        aligned = -(-count // 4) * 4  # rows of a scale column, 16 bytes
        scale = torch.ones(columns // BLOCK, aligned, device="cuda")[:, :count].t()
        out = torch.empty(count, rows, device="cuda", dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt((x, scale), (weight, weight_scale), out, disable_ue8m0_cast=False)
    torch.cuda.synchronize()
    return f"{rows} x {columns}, {len(tokens)} sizes: {time.monotonic() - start:.1f} s"


def shape(text: str) -> tuple[int, int]:
    """Of `ROWSxCOLUMNS`."""
    rows, columns = text.split("x")
    return int(rows), int(columns)


def deep_gemm_parent() -> Path:
    """Where vLLM keeps its DeepGEMM.

    Raises:
        RuntimeError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise RuntimeError("vllm is not installed")
    return Path(spec.origin).parent / "third_party"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linears", nargs="+", type=shape, default=LINEARS, metavar="ROWSxCOLUMNS", help="a slice's")
    linears = parser.parse_args().linears
    root = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache/vllm"))
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(root / "deep_gemm"))
    jobs = [(linear, TOKENS[half::2]) for half in range(2) for linear in linears]
    with get_context("spawn").Pool(len(jobs)) as pool:
        for said in pool.starmap(compile_for, jobs, chunksize=1):
            sys.stdout.write(f"{said}\n")
