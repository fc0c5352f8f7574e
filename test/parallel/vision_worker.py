"""One rank of the tower: encodes 1, 3 and 16 images with the others; saves all embeddings, and what it ran itself.

On CPUs in float32 over gloo; on GPUs in BF16 over NCCL, where one rank computes the same in float32 too. The source
`real` is a tower of the published size with random weights, and larger images.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import kimi_k2.parallel.vision as parallel_vision
from kimi_k2.bench.kernels.vision import random_model
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.vision import VisionEncoder, run_pack
from kimi_k2.media.patches import Media
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.vision_config import Grid

COUNTS = (1, 3, 16)


def drawn_media(count: int, longest: int = 16) -> list[Media]:
    """Images of uneven sizes up to `longest` patches a side, one of every five a video chunk."""
    generator = torch.Generator().manual_seed(count)
    media = []
    for number in range(count):
        height, width = (2 * int(side) for side in torch.randint(1, longest // 2 + 1, (2,), generator=generator))
        grid = Grid(3 if number % 5 == 4 else 1, height, width)
        pixels = torch.randint(0, 256, (grid.patches, 3, 14, 14), dtype=torch.uint8, generator=generator)
        media.append(Media(grid, pixels))
    return media


def wide_distance(model: VisionModel, results: list[list[Tensor]], longest: int) -> float:
    """Relative L2 distance of the results to the same model's in float32."""
    config = KimiK2Config.from_preset("kimi-k2.5") if longest > 16 else None
    if config is None:
        return 0.0
    torch.backends.cuda.matmul.allow_tf32 = False
    wide = VisionModel(config, dtype=torch.float32).to(model.device).eval()
    wide.load_state_dict(model.state_dict())
    media = [one for count in COUNTS for one in drawn_media(count, longest)]
    wanted = torch.cat([run_pack(wide, [one]).cpu() for one in media])
    found = torch.cat([rows for own in results for rows in own]).float()
    return float((found - wanted).norm() / wanted.norm())


def run(rank: int, ranks: int, source: str, rendezvous: str, out: str, where: str) -> None:
    """`ranks` 1 needs no group: what the others are held to."""
    torch.set_num_threads(1)
    device, _, dtype = where.partition(":")
    if device == "cuda":
        torch.cuda.set_device(rank)
    longest, pack_patches = (64, 4096) if source == "real" else (16, 256)
    if source == "real":
        model = random_model(getattr(torch, dtype), device)
    else:
        model = VisionModel.from_pretrained(source, dtype=getattr(torch, dtype), device=device)
    ran: list[int] = []

    def counted(model: VisionModel, pack: Sequence[Media]) -> Tensor:
        ran.append(len(pack))
        return run_pack(model, pack)

    if ranks == 1:
        encoder = VisionEncoder(model, pack_patches=pack_patches, cache_bytes=0)
    else:
        gpu = {"backend": "nccl", "device_id": torch.device("cuda", rank)} if device == "cuda" else {"backend": "gloo"}
        dist.init_process_group(init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, **gpu)
        parallel_vision.run_pack = counted  # type: ignore[attr-defined]
        encoder = parallel_vision.data_parallel(model, pack_patches=pack_patches, cache_bytes=0)
    results, packs = [], []
    for count in COUNTS:
        ran.clear()
        results.append([rows.cpu() for rows in encoder.encode(drawn_media(count, longest))])
        packs.append(sum(ran))
    torch.save((results, packs, wide_distance(model, results, longest) if ranks == 1 else None), out)
    if ranks > 1:
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
            sys.stdout.flush()
            os._exit(0)
        dist.destroy_process_group()


if __name__ == "__main__":
    a = sys.argv
    run(int(a[1]), int(a[2]), a[3], a[4], a[5], a[6])
