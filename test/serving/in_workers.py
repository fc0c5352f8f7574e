"""What an engine's own processes import by name: a logits processor, and classes for `worker_extension_cls` of vLLM.

vLLM's are asked for by names that this module makes when they are asked for: so the import in each worker patches it.
`Amx` has vLLM believe in AMX, without which its MLA on a CPU takes whole prompts and pages of 16; `Spread` also lets
block tables of a CPU store tokens of caches that are spread over ranks; `Balanced` lets experts be moved there, and
with `CutPages` vLLM cuts its pages, and with `Routed` answers have the experts that were chosen.
`Refused0`, `Refused1` and so on have the second of two ranks refuse a run of a decode step while graphs are recorded, 0
none; `Piece0` and so on a run of a piece of steps with prompts. On a CPU a stand-in records both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.engine.graphs import Recorded
from kimi_k2.engine.prompt_step import padded_width

WIDEST = 256  # tokens of a step in pieces on a CPU
SIZES = [1, 2, 4]
MEMORY = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current",
          "peak": "allocated_bytes.all.peak"}  # fmt: skip


class Again:
    """Stands for the recorder of CUDA graphs: a replay runs the work again, into the same memory.

    Args:
        capture: within which the work is recorded.
    """

    def __init__(self, capture: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.capture = capture

    def __call__(self, work: Any) -> Any:
        with self.capture():
            made = work()

        def replay() -> None:
            for tensor, anew in zip(made, work(), strict=True):
                tensor.copy_(anew)

        return Recorded(replay, made, lambda: None)

    def let_go(self, tensor: Any) -> Any:
        return tensor

    def held(self) -> int:
        return 0


class Memory:
    """Methods that a worker gets; the names are ours, since vLLM refuses those that its worker has."""

    def kimi_k2_memory(self, release: str = "") -> dict[str, int]:
        """Bytes of PyTorch's allocator on a GPU; with `release` it first gives back what it holds unused."""
        if not torch.cuda.is_available():
            return {}
        if release:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        stats = torch.cuda.memory_stats()
        return {name: int(stats[key]) for name, key in MEMORY.items()}


def forced() -> type:
    """A logits processor that leaves the n-th of the tokens that `engines.forced` names as the only one.

    Two engines then say the log-probabilities of the same tokens, and their errors can be compared one by one.
    """
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forced(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Tensor], Tensor] | None:
            tokens: Any = (params.extra_args or {}).get("forced")

            def only(made: list[int], logits: Tensor) -> Tensor:
                token = tokens[min(len(made), len(tokens) - 1)]  # a step may be ahead of the last token
                kept = logits[token].clone()
                logits.fill_(float("-inf"))
                logits[token] = kept
                return logits

            return only if tokens else None

    return Forced


def amx() -> None:
    """Pages of any size, prompts in parts, cached prefixes: vLLM asks anew where it makes a drafter."""
    torch.cpu._is_amx_tile_supported = lambda: True


def spread() -> None:
    """See `vllm.v1.worker.block_table`: interleaved runs of tokens within as many pages' slots as there are ranks."""
    from vllm.v1.worker.block_table import BlockTable

    amx()

    def compute_slot_mapping(self: Any, num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
        ranks, run, page = self.dcp_world_size, self.cp_kv_cache_interleave_size, self.block_size
        counts = query_start_loc[: num_reqs + 1].diff()
        request = torch.arange(num_reqs).repeat_interleave(counts)
        at = positions[: len(request)]
        pages = self.block_table.gpu[request, at // (page * ranks)].long()
        within = at % (page * ranks)
        slots = pages * page + within // (ranks * run) * run + within % run
        self.slot_mapping.gpu.fill_(-1)
        self.slot_mapping.gpu[: len(at)] = torch.where(within // run % ranks == self.dcp_rank, slots, -1)

    BlockTable.compute_slot_mapping = compute_slot_mapping


class Event:
    """Stands for an event of a GPU's, or for a stream, where what is copied is there at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.record = self.synchronize = self.wait = self.wait_event = self.wait_stream = lambda *_: None
        self.elapsed_time = lambda _: 0.0


def balanced() -> None:
    """vLLM's own balancer, which its runner on a CPU does not make.

    Its function that looks up and counts experts is a kernel for GPUs; that one alone is written again here, as vLLM
    describes it.
    """
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.model_executor.layers.fused_moe.router import base_router
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

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

    def load_model(self: Any, **named: Any) -> None:
        load(self, **named)
        self._moe_model, self.eplb_state = self.model, EplbState(self.parallel_config, self.device)
        self.eplb_state.add_model(self.model, self.model_config)

    vars(base_router)["eplb_map_to_physical_and_record"] = look_up_and_count
    vars(torch)["Event"] = vars(torch.cuda)["Event"] = Event
    CPUModelRunner.load_model = load_model


def routed() -> None:
    """What vLLM's second runner does for experts in answers, done by its first: the second asks for Triton.

    Both ends are vLLM's own: what takes experts from a model, and what gives a request's rows to the scheduler.
    """
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    make, execute, sample = Runner.initialize_kv_cache, Runner.execute_model, Runner.sample_tokens

    def initialize_kv_cache(self: Any, config: Any, *given: Any, **named: Any) -> None:
        make(self, config, *given, **named)
        self.taken, self.step = get_aux_output_connector(self.model, self.vllm_config, config), None

    def execute_model(self: Any, scheduled: Any, *given: Any) -> Any:
        self.taken.begin_step(scheduled.aux_output_connector_metadata)
        made, batch = execute(self, scheduled, *given), self.input_batch
        names = list(batch.req_ids)
        counts = [scheduled.num_scheduled_tokens.get(name, 0) for name in names]
        rows = torch.tensor([0, *counts]).cumsum(0).numpy()
        before = batch.num_computed_tokens_cpu[: len(names)].copy()
        said = SimpleNamespace(req_ids=names, query_start_loc_np=rows, num_computed_tokens_np=before)
        self.step = self.taken.prepare_output(said) if made is None else None
        return made

    def sample_tokens(self: Any, grammar: Any) -> Any:
        made = sample(self, grammar)
        if self.step is not None:
            counts = torch.tensor([len(tokens) for tokens in made.sampled_token_ids]).numpy()
            self.step.enqueue_cpu_copy(counts, 0 * counts)
            made.aux_output_connector_output = self.step.process_output()
        return made

    Runner.initialize_kv_cache, Runner.execute_model, Runner.sample_tokens = (
        initialize_kv_cache, execute_model, sample_tokens
    )  # fmt: skip


class Exchanges:
    """In place of torch.distributed for our operations, as a library is for graphs.

    It connects ranks when they first exchange a size, which waits for all of them. While a graph is recorded that must
    not be, and what is exchanged waits for nobody; nor is it there.
    """

    def __init__(self) -> None:
        self.recording, self.connected = False, set[tuple[str, torch.Size]]()

    def __getattr__(self, name: str) -> Any:
        work = getattr(dist, name)

        def exchange(*given: Any, **named: Any) -> None:
            size = name, given[-1].shape
            if not self.recording:
                self.connected.add(size)
                work(*given, **named)
            elif size not in self.connected:
                raise RuntimeError(f"{name} of {list(size[1])} would wait for the other rank")

        return exchange if name in ("all_reduce", "all_gather") else work

    @contextmanager
    def captured(self) -> Iterator[None]:
        self.recording = True
        try:
            yield
        finally:
            self.recording = False


def refusing(work: Callable[..., Any], run: int) -> Callable[..., Any]:
    """The work, whose run of that number the second of two ranks refuses."""
    from vllm.distributed.parallel_state import get_tp_group

    runs = count(1)

    def refused(*given: Any) -> Any:
        if next(runs) == run and get_tp_group().rank_in_group == 1:
            raise RuntimeError("refused by the second rank")
        return work(*given)

    return refused


def refused(run: int) -> None:
    """On a CPU a stand-in records, and vLLM's runner says that it is on a GPU."""
    from vllm.platforms import current_platform

    from kimi_k2.ops import collective
    from kimi_k2.ops.mla import next_step
    from kimi_k2.serving.vllm import decode_steps as module
    from kimi_k2.serving.vllm.runner import Runner

    exchanges, steps, against = Exchanges(), module.decode_steps, Runner.against

    class Recorder(Again):
        """Says when it first repeats a step."""

        said = False

        def __init__(self, weak: Any) -> None:
            super().__init__(exchanges.captured)

        def __call__(self, work: Any) -> Any:
            found = super().__call__(work)

            def replay() -> None:
                if not self.said:
                    print("a decode step is replayed", flush=True)
                self.said = True
                found.replay()

            return found._replace(replay=replay)

    def on_gpu(runner: Any, *given: Any) -> Any:
        """And of which sizes its own graphs are."""
        exchanges.connected.clear()  # vLLM's own runs have connected nothing
        runner.it.captured = SIZES
        return steps(runner, *given)

    vars(module)["next_step"] = refusing(next_step, run)  # the first thing in a step
    if current_platform.is_cpu():
        vars(collective)["dist"] = exchanges
        vars(module)["GraphRecorder"] = Recorder
        Runner.against = lambda self, mode, page: against(self, "FULL", page)  # type: ignore[method-assign]
        Runner.on_gpu = True  # type: ignore[method-assign, assignment]
        vars(module)["decode_steps"] = on_gpu  # the worker imports it late
        vars(torch.cuda)["synchronize"] = lambda *_: None


def cut_pages() -> None:
    """Our attention says that its kernels take pages of 16, as on a GPU of 64."""
    from kimi_k2.serving.vllm.attention import LatentBackend

    amx()
    LatentBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_: [16])  # type: ignore[method-assign, assignment]


def piece(run: int) -> None:
    """The first rank may by then have recorded sums that the second has not."""
    from vllm.platforms import current_platform

    from kimi_k2.ops import collective
    from kimi_k2.serving.vllm.model import KimiK2ForVllm
    from kimi_k2.serving.vllm.prompt_graphs import PromptGraphs
    from kimi_k2.serving.vllm.ranks import least_of_ranks

    exchanges, forward = Exchanges(), KimiK2ForVllm.forward

    class Graphs(PromptGraphs):
        def __call__(self, x: Tensor, *given: Any) -> Any:
            print("a step with prompts is replayed", flush=True)
            made, padding = super().__call__(x, *given), slice(len(x), padded_width(len(x)))
            assert not self.x[padding].any() and not self.values[padding].any()  # whatever ran before
            return made

    def first(self: Any, *given: Any, **named: Any) -> Any:
        if not self._recorded:  # vLLM's worker on a CPU measures no memory
            self._recorded = True
            graphs = Graphs(self.paged.steps, self.plain.model.norm, WIDEST, Again(exchanges.captured), least_of_ranks)
            reason = graphs.capture()
            print(f"no graph of pieces: {reason}", flush=True)
            self._graphs = None if reason else graphs
        return forward(self, *given, **named)

    PromptGraphs._piece = refusing(PromptGraphs._piece, run)  # type: ignore[method-assign]
    if current_platform.is_cpu():
        vars(collective)["dist"] = exchanges
        KimiK2ForVllm.forward = first  # type: ignore[method-assign]


PATCHES: dict[str, Callable[..., None]] = {
    "Amx": amx, "Spread": spread, "Balanced": balanced, "CutPages": cut_pages, "Routed": routed,
    "Refused": refused, "Piece": piece,
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """See the module."""
    if name == "Forced":
        return forced()
    patch = name.rstrip("0123456789")
    if patch not in PATCHES:
        raise AttributeError(name)
    PATCHES[patch](*map(int, filter(None, [name.removeprefix(patch)])))
    return type(name, (), {})
