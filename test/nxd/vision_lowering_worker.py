"""Lowers the vision tower at its real shapes and prints the counts of one bucket as JSON.

python vision_lowering_worker.py TP_DEGREE PATCHES FRAMES
python vision_lowering_worker.py PRESET LAYERS         # the prefill graph with media, and the text class's
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

from hlo import count, peak_live_bytes  # noqa: E402

from kimi_k2.config import KimiK2Config  # noqa: E402
from kimi_k2.neuron import contrib  # noqa: E402
from kimi_k2.neuron.compile import build_application  # noqa: E402
from kimi_k2.plan.deployment import Deployment  # noqa: E402


def lower_text(name: str, layers: int) -> None:
    """Counts of the prefill graphs of both classes, and the shapes of the inputs for media."""
    import torch

    preset = Deployment.load(name)
    config = KimiK2Config.from_preset("kimi-k2.5", num_hidden_layers=layers)
    text = build_application(preset, config, "kimi-k2.5", disable_argmax_kernel=True)
    module, lowering = contrib.load("image_to_text"), contrib.load("lowering")
    tower = module.KimiK25VisionNeuronConfig(vision_buckets=[[1024, 1]], tp_degree=16, torch_dtype=torch.bfloat16)
    load = contrib.load("config").load_kimi_config(config)
    whole = module.KimiK25InferenceConfig(text.config.neuron_config, tower, load_config=load)
    media = module.NeuronKimiK25ForImageToText("kimi-k2.5", whole)
    found = {}
    for key, app in (("text", text), ("media", media)):
        graph = lowering.lower(app, "context_encoding_model")
        counts = count(graph.hlo, graph.parameters)
        found[key] = {
            "bucket": graph.bucket,
            "flops": counts.flops,
            "collectives": sum(counts.collectives.values()),
            "inputs": {where: list(shape) for where, (_, shape) in graph.inputs.items()},
        }
    print("COUNTS " + json.dumps(found))


def main() -> None:
    if not sys.argv[1].isdigit():
        lower_text(sys.argv[1], int(sys.argv[2]))
        return
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
    live = peak_live_bytes(graph.hlo).nbytes
    print("COUNTS " + json.dumps({"flops": counts.flops, "held": held, "kinds": kinds, "live": live}))


if __name__ == "__main__":
    main()
