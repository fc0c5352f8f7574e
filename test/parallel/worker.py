"""One rank of a group: loads its file, generates from two prompts, rank 0 saves all logits.

On CPUs over gloo, on GPUs over NCCL, in one dtype after the other.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.bench.kernels.model import decide_routes
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops.collective import gather_last
from kimi_k2.parallel.apply import AllReduce, load_rank
from kimi_k2.sharding.layout import Layout

PROMPT, TOKENS = 7, 10


@torch.inference_mode()
def run(
    rank: int, source: str, converted: str, moe_tp: int, moe_ep: int, rendezvous: str, out: str, where: str
) -> None:
    """Of each dtype, logits of a prefill of 7 tokens and of 3 decode steps, by the plain model and by DecodeStep.

    Rank 0 saves.
    """
    torch.set_num_threads(1)
    device, _, dtypes = where.partition(":")
    gpu = {"backend": "nccl", "device_id": torch.device("cuda", rank)} if device == "cuda" else {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(init_method=f"file://{rendezvous}", rank=rank, world_size=moe_tp * moe_ep, **gpu)
    layout = Layout(moe_tp, moe_ep, target="cuda", experts="stored")
    config = KimiK2Config.from_pretrained(source)
    found = []
    for dtype in dtypes.split(","):
        model = load_rank(converted, config, layout, rank, dtype=getattr(torch, dtype), device=device)
        if device == "cuda":
            decide_routes(model)
        found.append(generate(model, graph=device == "cuda" and dtype == "bfloat16"))
    if rank == 0:
        torch.save(found, out)
    # Without it one process may close its sockets while another still sends.
    dist.barrier()
    if device == "cuda":
        # NCCL's group would wait for the step's graph.
        torch.cuda.synchronize()
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()


def generate(model: KimiK2ForCausalLM, graph: bool) -> list[Tensor]:
    """Token ids, logits of the plain model, those of DecodeStep."""
    device = model.lm_head.weight.device
    ids = torch.randint(0, model.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    cache = new_cache(model, 2, TOKENS)
    first = model(ids[:, :PROMPT], torch.arange(PROMPT, device=device).expand(2, PROMPT), cache)
    positions = [torch.full((2,), p, device=device) for p in range(PROMPT, TOKENS)]
    again = new_cache(model, 2, TOKENS)
    again.data.copy_(cache.data)
    plain = [model(ids[:, p : p + 1], at[:, None], cache) for p, at in enumerate(positions, PROMPT)]
    reduce, gather = AllReduce(None), partial(gather_last, group=None)
    step = DecodeStep(model, again, reduce=reduce, gather=gather, graph=graph)
    stepped = [step(ids[:, p], at).clone() for p, at in enumerate(positions, PROMPT)]
    return [tensor.cpu() for tensor in (ids, torch.cat([first, *plain], dim=1), torch.stack(stepped, 1))]


if __name__ == "__main__":
    a = sys.argv
    run(int(a[1]), a[2], a[3], int(a[4]), int(a[5]), a[6], a[7], a[8])
