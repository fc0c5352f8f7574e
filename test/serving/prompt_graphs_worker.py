"""One of two ranks over gloo that records steps with prompts and replays them, by a stand-in for CUDA graphs.

Usage: prompt_graphs_worker.py RANK SOURCE CONVERTED MOE_TP MOE_EP OUT
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from again import Again
from test_paged_layer import LENGTHS, STEPS, Layers
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import Batch
from kimi_k2.errors import KernelError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.apply import AllReduce, load_rank
from kimi_k2.serving.vllm import ranks
from kimi_k2.serving.vllm.prompt_graphs import PromptGraphs
from kimi_k2.serving.vllm.ranks import least_of_ranks
from kimi_k2.sharding.layout import STORED, Layout

WIDEST = 64
PIECES_OF_A_SIZE = 4  # three layers


class Sum(AllReduce):
    """Keeps the shapes that were summed."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor) -> Tensor:
        """See `AllReduce`."""
        if self.active:
            self.seen.append(tuple(x.shape))
        return super().__call__(x)


class Recording(Again):
    """Records as a capture does, which sums nothing; a replay runs the work again, with its sums."""

    def __init__(self, reduce: AllReduce, refused: int | None = None) -> None:
        super().__init__(reduce.alone)
        self.refused, self.count = refused, 0

    def __call__(self, work: Any) -> Any:
        """See `Again`."""
        if self.count == self.refused:
            raise RuntimeError("cannot be recorded\nand a trace")
        self.count += 1
        return super().__call__(work)


class Replayed(Layers):
    """Steps with prompts are replayed."""

    graphs: PromptGraphs
    replays = 0

    def run(self, x: Tensor, made: Batch) -> Tensor:
        """See `Layers`."""
        if not made.chunks:
            return super().run(x, made)
        self.replays += 1
        assert self.graphs.takes(len(x))
        return self.graphs(x, made, self.caches)


def refusals(layers: Layers, reduce: Sum, fails: bool) -> list[tuple[str | None, list[tuple[int, ...]]]]:
    """What each attempt to record ends with, and what was summed: rank 1 fails in a record, then in a trial run."""
    norm, found = layers.model.model.norm, []
    for trial in (False, True):
        record = Recording(reduce, refused=PIECES_OF_A_SIZE + 1 if fails and not trial else None)
        graphs, walks = PromptGraphs(layers.steps, norm, WIDEST, record, least_of_ranks), 0
        walk = graphs._walk

        def failing(*given: Any, walk: Any = walk) -> Any:
            nonlocal walks
            walks += 1
            if walks == 3:  # a size has a trial run and a record
                raise KernelError("does not take it")
            return walk(*given)

        if trial and fails:
            setattr(graphs, "_walk", failing)  # noqa: B010
        reduce.seen = []
        reason = graphs.capture()
        assert not any(graphs.takes(tokens) for tokens in range(1, WIDEST + 1))
        assert reduce.active
        found.append((reason, reduce.seen.copy()))
    return found


@torch.inference_mode()
def run(rank: int, source: str, converted: str, moe_tp: int, moe_ep: int, out: str) -> None:
    """Saves `refusals`, and the hidden states of sequences whose steps with prompts are replayed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.meet", rank=rank, world_size=2)
    vars(ranks)["get_tp_group"] = lambda: SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
    assert [least_of_ranks(rank + 5), least_of_ranks(-rank), least_of_ranks(rank == 0)] == [
        5,
        -1,
        0,
    ]
    config, layout = KimiK2Config.from_pretrained(source), Layout(moe_tp, moe_ep, target="cuda", experts=STORED)
    whole = KimiK2ForCausalLM.from_pretrained(source, keep_quantized=True)
    ids = [torch.randint(10, config.vocab_size, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    model, reduce = load_rank(converted, config, layout, rank, dtype=torch.float32), Sum()
    model.prepare()
    layers, states = Replayed(model, reduce), [list[Tensor]() for _ in LENGTHS]
    refused = refusals(layers, reduce, fails=rank == 1)
    layers.graphs = PromptGraphs(layers.steps, model.model.norm, WIDEST, Recording(reduce), least_of_ranks)
    assert layers.graphs.capture() is None
    for number, new in enumerate(STEPS):
        for row, found in layers.step(new, ids, padding=number % 3).items():
            states[row].append(found.clone())
    errors = []
    for sequence, parts in zip(ids, states, strict=True):
        wanted = whole.model(sequence.unsqueeze(0), torch.arange(len(sequence)).unsqueeze(0), None, len(sequence))[0]
        errors.append(float((torch.cat(parts) - wanted).abs().max() / wanted.abs().max()))
    torch.save({"refused": refused, "errors": errors, "replays": layers.replays}, f"{out}-{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    a = sys.argv
    run(int(a[1]), a[2], a[3], int(a[4]), int(a[5]), a[6])
