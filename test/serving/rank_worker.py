"""One of two ranks over gloo, as vLLM's engine calls our model where a CPU has no such engine.

Usage: rank_worker.py balanced RANK MEETING MODEL REDUNDANT: vLLM's own balancer moves experts. Its function that looks
up and counts experts is a kernel for GPUs; that one alone is written again here, as vLLM describes it.
Or: rank_worker.py replayed RANK OUT MODEL CONVERTED MOE_TP MOE_EP: steps with prompts are recorded and replayed, by a
stand-in for CUDA graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from in_workers import Again
from safetensors.torch import load_file
from test_paged_layer import LENGTHS, Layers
from torch import Tensor, nn
from vllm.distributed.eplb import eplb_state
from vllm.model_executor.layers.fused_moe.router import base_router

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import Batch
from kimi_k2.errors import KernelError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.apply import AllReduce, load_rank
from kimi_k2.serving.paged.model import PagedModel
from kimi_k2.serving.vllm import ranks
from kimi_k2.serving.vllm.model import KimiK2ForVllm
from kimi_k2.serving.vllm.prompt_graphs import PromptGraphs
from kimi_k2.serving.vllm.ranks import least_of_ranks
from kimi_k2.sharding.layout import STORED, Layout

TOKENS, WINDOW = 40, 2
WIDEST = 64
PIECES_OF_A_SIZE = 4  # three layers


def look_up_and_count(
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor,
    **_: Any,
) -> Tensor:
    """Which of an expert's copies serves a token goes by the token's place."""
    place = torch.arange(len(topk_ids))[:, None] * 2654435769 & 0xFFFFFFFF
    found = logical_to_physical_map[topk_ids, place % logical_replica_count[topk_ids]]
    if record_enabled:
        expert_load_view += torch.bincount(found.flatten(), minlength=len(expert_load_view)).int()
    return found


class Event:
    """Stands in for a GPU's."""

    def __init__(self, **_: Any) -> None:
        self.record = self.synchronize = lambda *_: None
        self.elapsed_time = lambda _: 0.0


def balanced(rank: int, _: str, directory: str, redundant: str) -> None:
    group, config = cast(Any, dist.group.WORLD), KimiK2Config.from_pretrained(directory)
    coordinator = SimpleNamespace(device_group=group, cpu_group=group, world_size=2, rank_in_group=rank)
    stood_in = dict.fromkeys(("get_ep_group", "get_eplb_group"), lambda: coordinator)
    vars(eplb_state).update(stood_in, get_node_count=lambda: 1)
    vars(base_router)["eplb_map_to_physical_and_record"] = look_up_and_count
    vars(torch)["Event"] = vars(torch.cuda)["Event"] = Event

    # The model as vLLM's engine has it, without caches.
    model: Any = object.__new__(KimiK2ForVllm)
    nn.Module.__init__(model)
    layout, held = Layout(1, 2, target="cuda", experts=STORED), cast(Any, [None] * 9)
    where = TOKENS, torch.float32, torch.device("cpu")
    model.paged = PagedModel(config, layout, rank, group, held, *where, redundant=int(redundant))
    model._let_experts_be_moved()

    def load() -> None:
        for file in sorted(Path(directory).glob("*.safetensors")):
            model.load_weights(load_file(file).items())

    load()
    settings = SimpleNamespace(
        window_size=WINDOW, step_interval=4 * WINDOW, use_async=False, policy="default", communicator="torch_nccl",
        log_balancedness=False, enable_migration_batching=False,
    )  # fmt: skip
    parallel = SimpleNamespace(eplb_config=settings, enable_elastic_ep=False, num_ubatches=1)
    state = eplb_state.EplbState(cast(Any, parallel), torch.device("cpu"))
    state.add_model(model, cast(Any, SimpleNamespace(model="tiny", compute_hash=lambda: "tiny")))
    (moved,) = state.model_states.values()
    whole = KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def check() -> None:
        """As the whole plain model, by each layer; where each row is is known."""
        torch.manual_seed(3)
        for at, (number, place) in enumerate(model.paged.places.items()):
            x, step = torch.randn(TOKENS, whole.config.hidden_size), model.paged.steps[number]
            torch.testing.assert_close(step.reduce(step.feed_forward(x)), whole.model.layers[number].mlp(x))
            assert list(place.held()) == moved.physical_to_logical_map[at].view(2, -1)[rank].tolist()

    before = moved.physical_to_logical_map.clone()
    assert before.shape == (len(model.paged.places), whole.config.n_routed_experts + int(redundant))
    check()
    counted = moved.expert_load_pass.sum(1)
    assert counted.tolist() == [TOKENS * whole.config.num_experts_per_tok] * len(counted)
    for _step in range(WINDOW + 1):  # it begins at three quarters of the interval
        check()
        state.step()
    assert not torch.equal(moved.physical_to_logical_map, before)
    check()
    load()  # a checkpoint that comes after the move
    check()


class Sum(AllReduce):
    """Keeps the shapes that were summed."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self.active:
            self.seen.append(tuple(x.shape))
        return super().__call__(x)


class Recording(Again):
    """Records as a capture does, which sums nothing; a replay runs the work again, with its sums."""

    def __init__(self, reduce: AllReduce, refused: int | None = None) -> None:
        super().__init__(reduce.alone)
        self.refused, self.count = refused, 0

    def __call__(self, work: Any) -> Any:
        if self.count == self.refused:
            raise RuntimeError("cannot be recorded\nand a trace")
        self.count += 1
        return super().__call__(work)


class Replayed(Layers):
    """Steps with prompts are replayed."""

    graphs: PromptGraphs
    replays = 0

    def run(self, x: Tensor, made: Batch) -> Tensor:
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
            vars(graphs)["_walk"] = failing
        reduce.seen = []
        found.append((graphs.capture(), reduce.seen.copy()))
        assert not any(graphs.takes(tokens) for tokens in range(1, WIDEST + 1))
        assert reduce.active
    return found


def replayed(rank: int, out: str, source: str, converted: str, moe_tp: str, moe_ep: str) -> None:
    """Saves `refusals`, and how far sequences whose steps with prompts are replayed are from the plain model's."""
    vars(ranks)["Group"] = lambda _: SimpleNamespace(size=2, on_host=dist.group.WORLD)
    assert [least_of_ranks(rank + 5), least_of_ranks(-rank), least_of_ranks(rank == 0)] == [5, -1, 0]
    config = KimiK2Config.from_pretrained(source)
    layout = Layout(int(moe_tp), int(moe_ep), target="cuda", experts=STORED)
    whole = KimiK2ForCausalLM.from_pretrained(source, keep_quantized=True)
    ids = [torch.randint(10, config.vocab_size, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    model, reduce = load_rank(converted, config, layout, rank, dtype=torch.float32), Sum()
    model.prepare()
    layers = Replayed(model, reduce)
    refused = refusals(layers, reduce, fails=rank == 1)
    layers.graphs = PromptGraphs(layers.steps, model.model.norm, WIDEST, Recording(reduce), least_of_ranks)
    assert layers.graphs.capture() is None
    errors = []
    for sequence, states in zip(ids, layers.all_steps(ids), strict=True):
        wanted = whole.model(sequence.unsqueeze(0), torch.arange(len(sequence)).unsqueeze(0), None, len(sequence))[0]
        errors.append(float((states - wanted).abs().max() / wanted.abs().max()))
    torch.save({"refused": refused, "errors": errors, "replays": layers.replays}, f"{out}-{rank}")


JOBS: dict[str, Callable[..., None]] = {"balanced": balanced, "replayed": replayed}


@torch.inference_mode()
def main(job: str, rank: str, meeting: str, *given: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}.meet", rank=int(rank), world_size=2)
    JOBS[job](int(rank), meeting, *given)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
