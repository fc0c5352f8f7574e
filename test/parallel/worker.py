"""One rank of a gloo group: loads its file, generates from two prompts, rank 0 saves all logits."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from kimi_k2.config import KimiK2Config
from kimi_k2.parallel.load import load_rank
from kimi_k2.sharding.plan import Layout


def run(rank: int, source: str, converted: str, moe_tp: int, moe_ep: int, rendezvous: str, out: str) -> None:
    """Logits of a prefill of 7 tokens and of 3 decode steps, saved by rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=moe_tp * moe_ep)
    layout = Layout(moe_tp, moe_ep, target="cuda", experts="stored")
    config = KimiK2Config.from_pretrained(source)
    model = load_rank(converted, config, layout, rank, dtype=torch.float32)
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (2, 10))
    cache = model.new_cache(2, 10)
    steps = [model(ids[:, :7], torch.arange(7).expand(2, 7), cache)]
    steps += [model(ids[:, p : p + 1], torch.full((2, 1), p), cache) for p in range(7, 10)]
    if rank == 0:
        torch.save((ids, torch.cat(steps, dim=1)), out)
    # Without it one process may close its sockets while another still sends.
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may still run, and an interpreter that unloads around them aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    a = sys.argv
    run(int(a[1]), a[2], a[3], int(a[4]), int(a[5]), a[6], a[7])
