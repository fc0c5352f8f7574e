"""One rank of the vision tower in NxD's CPU mode: packs of images and of video chunks, results to a file.

WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 python vision_worker.py job.json
"""

from __future__ import annotations

import os
from typing import Any

os.environ["NXD_CPU_MODE"] = "1"

import environment

environment.prepare()

import torch  # noqa: E402
from neuronx_distributed.parallel_layers import parallel_state  # noqa: E402

from kimi_k2.config import KimiK2Config  # noqa: E402
from kimi_k2.vision_config import Grid  # noqa: E402


def answer(job: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pixels and features of each pack."""
    neuron = job["neuron_config"]
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=neuron["tp_degree"], skip_collective_init=True)
    vision = environment.contrib("vision")
    buckets = [vision.VisionBucket(*bucket) for bucket in job["buckets"]]
    config = KimiK2Config.from_pretrained(job["checkpoint"])
    encoder = vision.NeuronKimiK25VisionEncoder(job["checkpoint"], config, buckets, torch.float32)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for grids in job["packs"]:
        sizes = [Grid(*grid) for grid in grids]
        generator = torch.Generator().manual_seed(len(results))
        pixels = torch.rand(sum(grid.patches for grid in sizes), 3, 14, 14, generator=generator) * 2 - 1
        results.append((pixels, encoder(pixels, sizes)))
    return results


if __name__ == "__main__":
    environment.serve(answer)
