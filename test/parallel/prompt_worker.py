"""One rank that reads prompts of many sizes, captured and launched one by one, and says what it captured.

On GPUs over NCCL in BF16; on CPUs over gloo, where a stand-in for a graph computes again what it was made of.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.graphs import Work
from kimi_k2.engine.prompt_step import PromptStep, Size, padded_width
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops.collective import gather_last
from kimi_k2.parallel.apply import AllReduce, load_rank
from kimi_k2.sharding.manifest import made_layout

# Sums of two prompts of 430 tokens are too long to be pushed on GPUs. Five sizes come often, 150 once, and 200 twice
# before the third, of which rank 1 refuses to make a graph. Half as long on CPUs, where nothing is pushed.
LENGTHS = (5, 16, 5, 14, 300, 290, 5, 430, 300, 440, 80, 257, 3, 80, 150, 448, 200, 40, 40, 193, 33, 5, 7, 200)
SLOTS = 600


class Read:
    """A PromptStep that tells what became of each prompt.

    Attributes:
        refuses: a capture of so many columns fails here; 0 for none.
        told: `replay`, `capture` or `refusal` with its size, in their order.
    """

    def __init__(self, model: KimiK2ForCausalLM, reduce: AllReduce, refuses: int, device: torch.device) -> None:
        gather, self.refuses = partial(gather_last, group=None), refuses
        graph = device.type == "cuda"
        steps = [
            DecodeStep(model, new_cache(model, 2, SLOTS), reduce=reduce, gather=gather, graph=graph) for _ in range(2)
        ]
        self.step, self.launched, self.device = PromptStep(steps[0]), PromptStep(steps[1]), device
        self.told: list[tuple[str, Size]] = []
        self.capturing = False
        self.size: Size = (0, 0, False)
        self.graphs, steps[0].record = steps[0].record, self.recorded  # type: ignore[assignment]
        self.capture, self.run = self.step._capture, self.step.run
        self.step._capture = self.captured  # type: ignore[method-assign]
        self.step.run = self.ran  # type: ignore[method-assign]

    def captured(self, size: Size, ids: Tensor, positions: Tensor, last: Tensor) -> bool:
        """`_capture`, whose size `recorded` tells."""
        self.size = size
        return self.capture(size, ids, positions, last)

    def ran(
        self, ids: Tensor, positions: Tensor, last: Tensor, length: int, whole: bool = False, media: Any = None
    ) -> Tensor:
        """Nothing that a graph can hold, where the other rank records all its sums."""
        if ids.shape[1] == self.refuses and self.capturing:
            raise RuntimeError("refused by rank 1")
        return self.run(ids, positions, last, length, whole)

    def recorded(self, work: Work) -> Any:
        """As GraphRecorder, with a stand-in on a CPU."""
        self.capturing = True
        try:
            if self.graphs is not None:
                found: Any = self.graphs(work)
            elif self.size[0] == self.refuses:
                raise RuntimeError("refused by rank 1")
            else:
                logits = torch.empty(2, self.step.model.config.vocab_size)
                found = SimpleNamespace(replay=lambda: logits.copy_(work()[0]), made=(logits,))
                found.reset = partial(setattr, found, "replay", None)  # a call from now on fails
        except RuntimeError:
            self.told.append(("refusal", self.size))
            raise
        finally:
            self.capturing = False
        self.told.append(("capture", self.size))
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
            if (wide, wide, whole) in self.step._captured:
                self.told.append(("replay", (wide, wide, whole)))
            found = self.step(ids, positions, last).clone()
            extra = 0, wide - length
            ids, positions = pad(ids, extra).to(self.device), pad(positions, extra, value=-1).to(self.device)
            if held := self.step._captured.get((wide, wide, whole)):
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
def run(rank: int, source: str, rendezvous: str, out: str, where: str, conversions: Sequence[str]) -> None:
    """For each conversion saves what became of the prompts: of sums pushed, and of sums by the group, where rank 1
    cannot capture one size.
    """
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if where == "cuda" else torch.device("cpu")
    gpu = {"backend": "nccl", "device_id": device} if where == "cuda" else {"backend": "gloo"}
    if where == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(init_method=f"file://{rendezvous}", rank=rank, world_size=2, **gpu)
    config, dtype = KimiK2Config.from_pretrained(source), torch.bfloat16 if where == "cuda" else torch.float32
    lengths = LENGTHS if where == "cuda" else [-(-length // 2) for length in LENGTHS]
    saved = []
    for converted in conversions:
        model = load_rank(converted, config, made_layout(converted), rank, dtype=dtype, device=device)
        for push, refuses in ((True, 0), (False, rank * padded_width(lengths[-1]))):
            read = Read(model, AllReduce(None, push=push), refuses, device)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                read.prompts(lengths)
            warned = sum("launched one by one, not captured" in str(warning.message) for warning in caught)
            saved.append((read.told, list(read.step._captured), read.step._refused.copy(), warned))
            read.step.close()
            assert not read.step._captured
    torch.save(saved, f"{out}-{rank}")
    dist.barrier()
    dist.destroy_process_group()  # NCCL waits here for graphs that hold its launches


if __name__ == "__main__":
    a = sys.argv
    run(int(a[1]), a[2], a[3], a[4], a[5], a[6:])
