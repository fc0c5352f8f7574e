"""One rank of the plain model over gloo: the greedy tokens of each request alone; rank 0 writes them as JSON.

Usage: ranks_worker.py RANK SOURCE CONVERTED MOE_TP MOE_EP ASKED.json RESULT.json; ASKED has `dtype` and `requests`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.parallel.apply import load_rank
from kimi_k2.sharding.layout import STORED, Layout


@torch.inference_mode()
def run(rank: int, source: str, converted: str, moe_tp: int, moe_ep: int, asked: str, result: str) -> None:
    layout, job = Layout(moe_tp, moe_ep, target="cuda", experts=STORED), json.loads(Path(asked).read_text())
    dist.init_process_group("gloo", init_method=f"file://{result}.meet", rank=rank, world_size=layout.ranks)
    config = KimiK2Config.from_pretrained(source)
    model = load_rank(converted, config, layout, rank, dtype=getattr(torch, job["dtype"]))
    tokens = [
        generate(model, [one["prompt"]], SamplingParams(one["new_tokens"], ignore_eos=True)).token_ids[0]
        for one in job["requests"]
    ]
    if rank == 0:
        Path(result).write_text(json.dumps(tokens))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    a = sys.argv
    run(int(a[1]), a[2], a[3], int(a[4]), int(a[5]), a[6], a[7])
