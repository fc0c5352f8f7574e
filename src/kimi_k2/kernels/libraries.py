"""Compile every CUDA C++ library before its first use: `python -m kimi_k2.kernels.libraries`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from kimi_k2.kernels.build import load_library

# Source file of csrc/ to how the names of the files that it is made of begin, as the modules ask for them.
LIBRARIES = {
    "decode_experts.cu": "decode_",
    "decode_linear.cu": "decode_",
    "decode_norm.cu": "decode_",
    "decode_values.cu": "decode_",
    "gate_launch.cu": "gate_",
    "mla_launch.cu": "",
    "moe_fp8_launch.cu": "moe_",
    "w4a16_decode.cu": "",
    "w4a16_launch.cu": "",
}


def build_all(workers: int | None = None) -> dict[str, float]:
    """Seconds that each library took, compiled side by side; what the cache holds already takes none.

    Raises:
        KernelError: there is no CUDA compiler, or it fails.
    """

    def build(source: str) -> float:
        begin = time.perf_counter()
        load_library(source, LIBRARIES[source])
        return time.perf_counter() - begin

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return dict(zip(LIBRARIES, pool.map(build, LIBRARIES), strict=True))


if __name__ == "__main__":
    for name, seconds in build_all().items():
        print(f"{name}: {seconds:.1f} s")
