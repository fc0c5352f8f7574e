"""Compile every CUDA C++ library before its first use: `python -m kimi_k2.kernels.libraries`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from kimi_k2.kernels.build import SOURCES, load_library

# Those of csrc/ that offer C functions are libraries; the others are included.
LIBRARIES = sorted(path.name for path in SOURCES.glob("*.cu") if 'extern "C"' in path.read_text(encoding="utf-8"))


def build_all(workers: int | None = None) -> dict[str, float]:
    """Seconds that each library took, compiled side by side; what the cache holds already takes none.

    Raises:
        KernelError: there is no CUDA compiler, or it fails.
    """

    def build(source: str) -> float:
        begin = time.perf_counter()
        load_library(source)
        return time.perf_counter() - begin

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return dict(zip(LIBRARIES, pool.map(build, LIBRARIES), strict=True))


if __name__ == "__main__":
    for name, seconds in build_all().items():
        print(f"{name}: {seconds:.1f} s")
