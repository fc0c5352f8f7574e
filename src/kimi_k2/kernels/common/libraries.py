"""Compile every CUDA C++ library before its first use: `python -m kimi_k2.kernels.common.libraries`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from kimi_k2.kernels.common.build import KERNELS, build_library
from kimi_k2.terminal import say

# Every .cu file offers C functions; headers are .cuh.
LIBRARIES = sorted(f"{path.parents[1].name}/{path.stem}" for path in KERNELS.glob("*/csrc/*.cu"))


def build_all(workers: int | None = None) -> dict[str, float]:
    """Seconds that each library took, compiled side by side; what the cache holds already takes none.

    Raises:
        KernelError: there is no CUDA compiler, or it fails.
    """

    def build(library: str) -> float:
        begin = time.perf_counter()
        build_library(library)
        return time.perf_counter() - begin

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return dict(zip(LIBRARIES, pool.map(build, LIBRARIES), strict=True))


if __name__ == "__main__":
    for name, seconds in build_all().items():
        say(f"{name}: {seconds:.1f} s")
