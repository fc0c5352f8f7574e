"""One rank of a group, on CPUs over gloo, on GPUs over NCCL: `worker.py JOB RANK ...`.

- generate: loads its file, generates from two prompts; rank 0 saves all logits, in one dtype after the other.
- read_prompts: prompts of many sizes, captured and launched one by one; says what it captured. On CPUs a stand-in for a
  graph computes again what it was made of.
- encode: 1, 3 and 16 images with the others; saves all embeddings, and what it ran itself.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import kimi_k2.parallel.vision as parallel_vision
from kimi_k2.bench.kernels.model import decide_routes
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.graphs import Work
from kimi_k2.engine.prompt_step import PromptStep, Size, padded_width
from kimi_k2.engine.vision import VisionEncoder, run_pack
from kimi_k2.media.patches import Media
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.ops.collective import gather_last
from kimi_k2.parallel.apply import AllReduce, load_rank
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import made_layout
from kimi_k2.vision_config import Grid

PROMPT, TOKENS = 7, 10


@contextmanager
def group(rank: int, ranks: int, rendezvous: str, kind: str, *, leaves: bool = False) -> Iterator[torch.device]:
    """The rank's device, in a process group over NCCL on GPUs, else gloo; one rank needs none.

    NCCL's group would wait for the graphs of a GPU's steps: there the process ends in it, unless it `leaves`.
    """
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    gpu = {"backend": "nccl", "device_id": device} if kind == "cuda" else {"backend": "gloo"}
    if kind == "cuda":
        torch.cuda.set_device(rank)
    if ranks > 1:
        dist.init_process_group(init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, **gpu)
    yield device
    if ranks > 1:
        dist.barrier()  # without it one process may close its sockets while another still sends
        if kind == "cuda" and not leaves:
            torch.cuda.synchronize()
            sys.stdout.flush()
            os._exit(0)
        dist.destroy_process_group()


@torch.inference_mode()
def generate(
    rank: int, source: str, converted: str, moe_tp: str, moe_ep: str, rendezvous: str, out: str, where: str
) -> None:
    """Of each dtype, logits of a prefill of 7 tokens and of 3 decode steps, by the plain model and by DecodeStep.

    Rank 0 saves.
    """
    kind, _, dtypes = where.partition(":")
    layout, config = (
        Layout(int(moe_tp), int(moe_ep), target="cuda", experts="stored"),
        KimiK2Config.from_pretrained(source),
    )
    with group(rank, layout.ranks, rendezvous, kind):
        found = []
        for dtype in dtypes.split(","):
            model = load_rank(converted, config, layout, rank, dtype=getattr(torch, dtype), device=kind)
            if kind == "cuda":
                decide_routes(model)
            found.append(steps(model, graph=kind == "cuda" and dtype == "bfloat16"))
        if rank == 0:
            torch.save(found, out)


def steps(model: KimiK2ForCausalLM, graph: bool) -> list[Tensor]:
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


# Sums of two prompts of 430 tokens are too long to be pushed on GPUs. Five sizes come often, 150 once, and 200 twice
# before the third, of which rank 1 refuses to make a graph. Half as long on CPUs, where nothing is pushed.
LENGTHS = (5, 16, 5, 14, 300, 290, 5, 430, 300, 440, 80, 257, 3, 80, 150, 448, 200, 40, 40, 193, 33, 5, 7, 200)
SLOTS = 600


class Read:
    """A PromptStep that tells what it holds behind each prompt.

    Attributes:
        refuses: a capture of so many columns fails here; 0 for none.
        told: each prompt's size, and the sizes that graphs are held of behind it.
    """

    def __init__(self, model: KimiK2ForCausalLM, reduce: AllReduce, refuses: int, device: torch.device) -> None:
        gather, graph = partial(gather_last, group=None), device.type == "cuda"
        steps = [
            DecodeStep(model, new_cache(model, 2, SLOTS), reduce=reduce, gather=gather, graph=graph) for _ in range(2)
        ]
        self.step, self.launched = map(PromptStep, steps)
        self.device, self.refuses, self.told = device, refuses, list[tuple[Size, list[Size]]]()
        self.size: Size = (0, 0, False)
        self.graphs, steps[0].record = steps[0].record, self.record  # type: ignore[assignment]

    def record(self, work: Work) -> Any:
        """As GraphRecorder, with a stand-in on a CPU."""

        def refused() -> Any:
            raise RuntimeError("refused by rank 1")

        # Nothing that a graph can hold, where the other rank records all its sums.
        work = refused if self.size[0] == self.refuses else work
        if self.graphs is not None:
            return self.graphs(work)
        if work is refused:
            refused()
        logits = torch.empty(2, self.step.model.config.vocab_size)
        found = SimpleNamespace(replay=lambda: logits.copy_(work()[0]), made=(logits,))
        found.reset = partial(setattr, found, "replay", None)  # a call from now on fails
        return found

    def prompts(self, lengths: Sequence[int]) -> None:
        """Two prompts of each length, of some the second shorter: the bits of the launches."""
        generator = torch.Generator().manual_seed(1)
        for length in lengths:
            ids = torch.randint(0, self.step.model.config.vocab_size, (2, length), generator=generator)
            positions = torch.arange(length).repeat(2, 1)
            last = torch.tensor([length - 1, length // 2 if length % 5 else length - 1])
            positions[1, last[1] + 1 :] = -1
            wide = padded_width(length)
            whole = length == wide and bool((positions >= 0).all())
            self.size = wide, wide, whole
            found = self.step(ids, positions, last).clone()
            self.told.append((self.size, list(self.step._captured)))
            extra = 0, wide - length
            ids, positions = pad(ids, extra).to(self.device), pad(positions, extra, value=-1).to(self.device)
            if held := self.step._captured.get(self.size):
                assert all(map(torch.equal, held.given, (ids, positions)))
            wanted = self.launched.run(ids, positions, last.to(self.device), wide, whole)
            self.compare(found, wanted, f"{length} tokens, {self.told[-1:]}")
        self.compare(self.step.cache.data, self.launched.cache.data, "cache")

    def compare(self, found: Tensor, wanted: Tensor, what: str) -> None:
        """Equal bits; a CPU's library of GEMMs adds in an order that depends on where its operands lie."""
        limit = 0.0 if self.device.type == "cuda" else 1e-5
        distance = ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()
        assert distance <= limit, f"{what}: {distance:.1e}"


@torch.inference_mode()
def read_prompts(rank: int, source: str, rendezvous: str, out: str, where: str, *conversions: str) -> None:
    """For each conversion saves what became of the prompts: of sums pushed, and of sums by the group, where rank 1
    cannot capture one size.
    """
    config, dtype = KimiK2Config.from_pretrained(source), torch.bfloat16 if where == "cuda" else torch.float32
    lengths = LENGTHS if where == "cuda" else [-(-length // 2) for length in LENGTHS]
    with group(rank, 2, rendezvous, where, leaves=True) as device:  # NCCL waits for graphs that hold its launches
        saved = []
        for converted in conversions:
            model = load_rank(converted, config, made_layout(converted), rank, dtype=dtype, device=device)
            for push, refuses in ((True, 0), (False, rank * padded_width(lengths[-1]))):
                read = Read(model, AllReduce(None, push=push), refuses, device)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    read.prompts(lengths)
                warned = sum("launched one by one, not captured" in str(warning.message) for warning in caught)
                saved.append((read.told, read.step._refused.copy(), warned))
                read.step.close()
                assert not read.step._captured
        torch.save(saved, f"{out}-{rank}")


COUNTS = (1, 3, 16)


def drawn_media(count: int) -> list[Media]:
    """Images of uneven sizes up to 16 patches a side, one of every five a video chunk."""
    generator = torch.Generator().manual_seed(count)
    media = []
    for number in range(count):
        height, width = (2 * int(side) for side in torch.randint(1, 9, (2,), generator=generator))
        grid = Grid(3 if number % 5 == 4 else 1, height, width)
        pixels = torch.randint(0, 256, (grid.patches, 3, 14, 14), dtype=torch.uint8, generator=generator)
        media.append(Media(grid, pixels))
    return media


def encode(rank: int, size: str, source: str, rendezvous: str, out: str, where: str) -> None:
    """One rank is what the others are held to."""
    ranks, (kind, _, dtype) = int(size), where.partition(":")
    ran: list[int] = []

    def counted(model: VisionModel, pack: Sequence[Media]) -> Tensor:
        ran.append(len(pack))
        return run_pack(model, pack)

    with group(rank, ranks, rendezvous, kind):
        model = VisionModel.from_pretrained(source, dtype=getattr(torch, dtype), device=kind)
        parallel_vision.run_pack = counted  # type: ignore[attr-defined]
        make = parallel_vision.data_parallel if ranks > 1 else VisionEncoder
        encoder = make(model, pack_patches=256, cache_bytes=0)
        results, packs = [], []
        for count in COUNTS:
            ran.clear()
            results.append([rows.cpu() for rows in encoder.encode(drawn_media(count))])
            packs.append(sum(ran))
        torch.save((results, packs), out)


if __name__ == "__main__":
    jobs: dict[str, Any] = {job.__name__: job for job in (generate, read_prompts, encode)}
    jobs[sys.argv[1]](int(sys.argv[2]), *sys.argv[3:])
