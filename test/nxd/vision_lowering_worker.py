"""Lowers the vision tower at its real shapes and prints the counts of one bucket as JSON.

python vision_lowering_worker.py TP_DEGREE PATCHES FRAMES
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

os.environ["PJRT_DEVICE"] = "CPU"
os.environ.pop("NXD_CPU_MODE", None)

import environment

environment.prepare(cpu=False)

from kimi_k2.config import KimiK2Config  # noqa: E402
from kimi_k2.neuron import contrib  # noqa: E402
from kimi_k2.plan.hlo import count  # noqa: E402


def main() -> None:
    ranks, patches, frames = (int(word) for word in sys.argv[1:])
    vision = contrib.load("vision")
    graph = contrib.load("vision_lowering").lower_vision(
        KimiK2Config.from_preset("kimi-k2.5"), vision.VisionBucket(patches, frames), ranks
    )
    counts = count(graph.hlo, graph.parameters)
    kinds: Counter[str] = Counter()
    for one, times in counts.collectives.items():
        kinds[f"{one.kind} {one.ranks}"] += times
    held = sum(size for name, size in counts.held.items() if not name.startswith("input."))
    print("COUNTS " + json.dumps({"flops": counts.flops, "held": held, "kinds": kinds}))


if __name__ == "__main__":
    main()
