"""vllm-neuron's worker and runner as its documents describe them, over stand-ins for its and vLLM's modules.

Pages, buckets, padding, one request a prefill, batched decodes, preemption and prefix hits; sampling is greedy.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from e4m3 import to_kernel
from lowering import Lowering
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.nki.kernels import MODULES
from kimi_k2.plan.deployment import Target
from kimi_k2.sharding.experts import expert_formats
from nki_emulator import install
from nki_emulator.ranks import run_as_rank

BLOCK = 4
BUCKETS = (32,), (8,)  # tokens of a prompt, lines of a step: each has a graph
ALL_BUCKETS = (8, 16, 32, 64), (1, 2, 4, 8)
WANTED = 8
NULL = 208.0  # all of the null block, which is nobody's: were its values read, they would be seen
HERE = threading.local()  # this rank's groups: tp, dp, ep
FP8 = torch.float8_e4m3fn
SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")


# An operator, so that a captured graph has it as a node, the same one on all ranks.
@torch.library.custom_op("line::collective", mutates_args=())
def collective(x: Tensor, kind: str, dim: int, size: int, group: str) -> Tensor:
    here = getattr(HERE, group)
    found = here.met(x)
    if kind == "all-gather":
        return torch.cat(found, dim)
    total = torch.stack(found).sum(0)
    return total if kind == "all-reduce" else total.chunk(size, dim)[here.rank_in_group].contiguous()


@collective.register_fake
def _(x: Tensor, kind: str, dim: int, size: int, group: str) -> Tensor:
    if kind == "all-gather":
        return torch.cat([x] * size, dim)
    return torch.empty_like(x) if kind == "all-reduce" else x.chunk(size, dim)[0].contiguous()


class Group:
    """vLLM's GroupCoordinator; ranks are threads of one process, which meet at `barrier` and exchange `values`."""

    def __init__(self, barrier: threading.Barrier, values: list[Any], rank: int, name: str = "tp") -> None:
        self.barrier, self.values, self.rank_in_group, self.world_size = barrier, values, rank, len(values)
        self.name, self.device_group = name, self

    @classmethod
    def several(cls, size: int, name: str = "tp") -> list[Group]:
        barrier, values = threading.Barrier(size, timeout=300), [None] * size
        return [cls(barrier, values, rank, name) for rank in range(size)]

    def met(self, mine: Any) -> list[Any]:
        """What each rank brings."""
        self.values[self.rank_in_group] = mine
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def _collective(self, x: Tensor, kind: str, dim: int = 0) -> Tensor:
        return x if self.world_size == 1 else torch.ops.line.collective(x, kind, dim, self.world_size, self.name)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._collective(x, "all-gather", dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._collective(x, "all-reduce")

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self._collective(x, "reduce-scatter", dim)


def on_ranks(tp: int, dp: int, ep: int, run: Callable[[int], Any]) -> list[Any]:
    """`run` on all ranks, a thread each; their results, or the first error."""
    expert_formats()  # found before there are threads
    heads, replicas = [Group.several(tp) for _ in range(dp)], [Group.several(dp, "dp") for _ in range(tp)]

    def rank(number: int) -> Any:
        replica, at = divmod(number, tp)
        HERE.tp, HERE.dp, HERE.ep = heads[replica][at], replicas[at][replica], ep
        try:
            return run(number)
        except BaseException:
            for group in (*heads, *replicas):
                group[0].barrier.abort()
            raise

    with ThreadPoolExecutor(tp * dp) as threads:
        ranks = [threads.submit(rank, number) for number in range(tp * dp)]
    for error in sorted(
        filter(None, (rank.exception() for rank in ranks)), key=lambda e: isinstance(e, threading.BrokenBarrierError)
    ):
        raise error
    return [rank.result() for rank in ranks]


@dataclass
class NeuronConfig:
    """Fields of the line's own, with its defaults, that a test sets or that the model must refuse."""

    ep_degree: int = 1
    attention_dp_size: int = 1
    on_device_sampling_config: Any = None
    max_logprobs: int = 0
    quantization: str | None = None
    fp8_packed_kv: bool = False
    modules_to_not_convert: list[str] | None = None
    num_seqs_buckets: list[int] | None = None
    _model_supports_windowed_prefill: bool = False


SAMPLED: dict[str, Any] = {"on_device_sampling_config": SimpleNamespace(max_top_k=256), "max_logprobs": -1}


@torch.library.custom_op("line::uniform", mutates_args=())
def uniform(like: Tensor) -> Tensor:
    """One number in [0, 1) a line, the same on all ranks and routes of a step."""
    return torch.rand(len(like), 1, generator=torch.Generator().manual_seed(HERE.step))


uniform.register_fake(lambda like: like.new_empty(len(like), 1))


class Sampler(torch.nn.Module):
    """The line's, as its pages and a fork's `functional/sampling.py` have it: no token behind the first `max_top_k`.

    The mask comes first; each rank's best are gathered; of these the request's top_k, then its top_p.
    """

    def __init__(self, sampling_config: Any, process_group: Any = None) -> None:
        super().__init__()
        self.most, self.group = sampling_config.max_top_k, process_group

    def forward(
        self, logits: Tensor, sampling_params: Tensor, logit_mask: Tensor | None = None, tp_rank: Any = None
    ) -> Tensor:
        width = logits.shape[-1]
        first = 0 if self.group is None else tp_rank.to(torch.long) * width
        if logit_mask is not None:
            mine = logit_mask.index_select(-1, torch.arange(width, device=logits.device) + first)
            logits = logits.masked_fill(~mine, float("-inf"))
        values, numbers = logits.topk(min(self.most, width), dim=-1)
        numbers = numbers + first
        if self.group is not None:
            values, numbers = self.group.all_gather(values, -1), self.group.all_gather(numbers, -1)
            values, order = values.topk(min(self.most, values.shape[-1]), dim=-1)
            numbers = numbers.gather(-1, order)
        top_k, top_p, temperature = sampling_params.split(1, dim=-1)
        least = values.gather(-1, (top_k.to(torch.long) - 1).clamp(0, values.shape[-1] - 1))
        values = values.masked_fill((values < least) & (top_k > 0), float("-inf"))
        greedy = temperature < 1e-5
        weights = (values / temperature.masked_fill(greedy, 1.0)).softmax(-1)
        sums = weights.masked_fill(weights.cumsum(-1) - weights >= top_p, 0.0).cumsum(-1)
        drawn = (torch.ops.line.uniform(sums) * sums[:, -1:] >= sums).sum(-1, keepdim=True)
        return numbers.gather(-1, drawn.masked_fill(greedy, 0)).squeeze(-1)


def rejection_sampler(metadata: Any, sampled: Tensor) -> Tensor:
    """The line's, as its page says: drafts up to the first that was not sampled, what was sampled there, then -1."""
    targets, drafts = sampled.view(len(metadata["num_draft_tokens"]), -1), metadata["draft_token_ids"]
    agree = (targets[:, :-1] == drafts.view(len(targets), -1)).cumprod(1)
    kept = torch.arange(targets.shape[1]) <= agree.sum(1, keepdim=True)
    return targets.masked_fill(~kept, -1)


def launched(name: str, cores: int) -> Any:
    """One of our kernels on the emulator."""
    return getattr(importlib.import_module(f"kimi_k2.nki.kernels.{MODULES[name]}"), name)[cores]


def numbers_of(numbers: list[float], others: str) -> dict[str, Any]:
    """The arguments of `decode_layer` that are no tensors."""
    whole = [int(number) if number == int(number) else number for number in numbers]
    found: dict[str, Any] = dict(zip(others.split(","), whole, strict=True))
    return found | {"groups": (tuple(range(found["ranks"])),)}


@torch.library.custom_op("line::decode_layer", mutates_args=())
def decode_layer(cores: int, tensors: list[Tensor], named: str, numbers: list[float], others: str) -> list[Tensor]:
    """The kernel on this rank, whose others run it too; names of tensors and of numbers by commas."""
    arguments = dict(zip(named.split(","), map(to_kernel, tensors), strict=True)) | numbers_of(numbers, others)
    tp = HERE.tp

    def gather(group: Sequence[int], mine: Any) -> list[Any]:
        assert list(group) == list(range(tp.world_size))
        return list(tp.met(mine))

    kernel = launched("decode_layer", cores)
    results = run_as_rank(kernel, tp.rank_in_group, gather, (), arguments)
    return [
        torch.as_tensor(result).to(like.dtype)
        for result, like in zip(results, _like(cores, tensors, named), strict=True)
    ]


@decode_layer.register_fake
def _like(cores: int, tensors: list[Tensor], named: str, *_: Any) -> list[Tensor]:
    of = dict(zip(named.split(","), tensors, strict=True))
    tokens, hidden = of["hidden"].shape
    entries = [of["latents"].new_empty(1, tokens, n) for n in (of["w_uk"].shape[-1], of["rotation"].shape[1])]
    following = [] if "next_residual" not in of else [of["projected"].shape[1]]
    return [
        of["hidden"].new_empty(tokens, -(-hidden // 128), 128), *entries,
        *(of["hidden"].new_empty(tokens, -(-n // 128), 128) for n in following),
    ]  # fmt: skip


@torch.library.custom_op("line::write_pages", mutates_args=("former", "latter"))
def write_pages(former: Tensor, latter: Tensor, entries: Tensor, rows: Tensor, cores: int) -> None:
    launched("write_pages", cores)(*map(to_kernel, (former, latter, entries)), rows)


@torch.library.custom_op("line::written_pages", mutates_args=())
def written_pages(former: Tensor, latter: Tensor, entries: Tensor, rows: Tensor, cores: int) -> list[Tensor]:
    """The same where nothing is written in place: what the kernel gives."""
    pages = [former.clone(), latter.clone()]
    write_pages(*pages, entries, rows, cores)
    return pages


written_pages.register_fake(lambda former, latter, *_: [torch.empty_like(former), torch.empty_like(latter)])


class Launch:
    """The line's wrap_nki, `wrap_nki(kernel)[cores](...)` inside a graph: tensors are arguments, not parts of them."""

    def __init__(self, kernel: Any, cores: int = 0) -> None:
        self.kernel, self.cores = kernel, cores

    def __getitem__(self, cores: int) -> Launch:
        return Launch(self.kernel, cores)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.kernel.__name__ == "write_pages":
            torch.ops.line.write_pages(*arguments, self.cores)
            return arguments[0].view_as(arguments[0]), arguments[1].view_as(arguments[1])
        tensors = {name: argument for name, argument in named.items() if isinstance(argument, Tensor)}
        numbers = {
            name: float(argument) for name, argument in named.items() if name not in tensors and name != "groups"
        }
        assert named["groups"] == (tuple(range(named["ranks"])),)
        given = list(tensors.values()), ",".join(tensors), list(numbers.values()), ",".join(numbers)
        return torch.ops.line.decode_layer(self.cores, *given)


def stand_ins(*, kernels: bool | None = None) -> dict[str, ModuleType]:
    """Modules of vLLM and the line that the model imports; the kernels' too where it says whether they run."""
    contents: dict[str, dict[str, Any]] = {
        "vllm.config": {"get_current_vllm_config_or_none": lambda: getattr(HERE, "config", None)},
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: HERE.tp,
            "get_dp_group": lambda: HERE.dp,
            "get_dcp_group": lambda: SimpleNamespace(world_size=getattr(HERE, "dcp", 1)),
        },
        "vllm_neuron.parallel.neuron_parallel_state": {"get_neuron_ep_degree": lambda: HERE.ep},
        "vllm_neuron.model.kv_cache": {
            "KVSpec": SimpleNamespace,
            "LayerSpec": namedtuple("LayerSpec", "name num_kv_heads head_size dtype"),
        },
        "vllm_neuron.nn": {"Sampler": Sampler},
        "vllm_neuron.nn.rejection_sampler": {"rejection_sampler": rejection_sampler},
    }
    if kernels is not None:  # as 0.24 has them
        install()
        contents["vllm_neuron.utils.neuron_utils"] = {"can_run_kernel": lambda tensor: kernels}
        contents["libtorch_neuronx_lite.nki.nki_hop"] = {"wrap_nki": Launch}
    return modules(contents)


def modules(contents: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Modules of these contents, and the packages that they are in."""
    found: dict[str, ModuleType] = {}
    for name, values in contents.items():
        while name:
            found.setdefault(name, ModuleType(name)).__spec__ = ModuleSpec(name, None, is_package=True)
            vars(found[name]).update(values)
            name, values = name.rpartition(".")[0], {}
    return found


def put(monkeypatch: pytest.MonkeyPatch, found: dict[str, ModuleType]) -> None:
    """Let them be imported."""
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)


@dataclass
class Request:
    """One sequence: its prompt, what came of it, and its pages."""

    prompt: list[int]
    wanted: int = WANTED
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # tokens that the pages hold
    logits: list[Tensor] = field(default_factory=list)  # of each of its tokens
    params: tuple[float, float, float] = (1.0, 1.0, 0.0)  # top_k, top_p, temperature
    allowed: Callable[[], Tensor] | None = None  # bool [vocab_size], what its grammar takes next

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def with_kernels(monkeypatch: pytest.MonkeyPatch, cores: int, *, run: bool = True) -> None:
    """Our kernels beside the model, on logical cores of so many."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(cores))
    put(monkeypatch, stand_ins(kernels=run))


def eager(model: Any) -> Callable[..., list[Any]]:
    """A model that is not compiled; its results in a list."""

    def call(**named: Any) -> list[Any]:
        results = model(**named)
        return [result for result in results if result is not None] if isinstance(results, tuple) else [results]

    return call


class Runner:
    """NeuronModelRunner: it makes, loads, compiles and calls the model, and owns the pages.

    Args:
        directory: of the checkpoint; None for a model on the meta device, which is captured, not run.
        hf_config, neuron_config: of the model.
        rank: this one.
        blocks: pages of a layer, of `block` slots; `width` of them a line.
        padding: how a padded slot is spelled, 0 (0.24 and later) or -1 (0.21).
        segment: tokens of a prompt's segment; 0 reads prompts in one piece.
        buckets: sizes that a prompt's tokens and a step's lines are padded to.
        compile_with: what makes of the model what is called, which gives its results in a list.
        structured: `enable_structured_outputs`: every call has a mask.
        cache: dtype that `kv_cache_dtype` means; None for the model's.
    """

    def __init__(
        self, directory: Path | None, hf_config: Any, neuron_config: NeuronConfig, *, rank: int = 0, blocks: int = 64,
        block: int = BLOCK, padding: int = 0, segment: int = 0, width: int = 8, buckets: Any = BUCKETS,
        compile_with: Callable[[Any], Any] | None = None, structured: bool = False, cache: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        from kimi_k2.neuron.torch_native.model import KimiK2ForVllmNeuron

        device = torch.device("meta" if directory is None else "cpu")
        with torch.device("meta"):
            self.model = model = KimiK2ForVllmNeuron.from_configs(hf_config, neuron_config).eval()
        if directory is None:
            model.inv_freq, model.first_expert = model.inv_freq.to(device), model.first_expert.to(device)
        else:
            model.load_weights(directory, device, None)
        specs = model.get_kv_spec().layers
        self.names = [spec.name for spec in specs]
        shape = 2, blocks, specs[0].num_kv_heads, block, specs[0].head_size
        cache = cache or specs[0].dtype
        pages = torch.zeros(shape, device=device)
        pages[:, 0] = NULL
        self.pages = {spec.name: list(pages.to(cache, copy=True)) for spec in specs}  # K and V are one buffer's
        model.bind_kv_cache(self.pages)
        # Where the runner says none of this, the compiler of Trainium2 refuses e4m3fn (NCC_EVRF051).
        told = cache == FP8 or neuron_config.quantization == "fp8"
        assert told or all(parameter.dtype != FP8 for parameter in model.parameters()), (
            "the compiler is not told of FP8 values"
        )
        self.compiled = (compile_with or Lowering())(model)
        self.free, self.block, self.padding, self.segment = list(range(1, blocks)), block, padding, segment
        self.prompt_buckets: Sequence[int] = (segment,) if segment else buckets[0]
        self.line_buckets: Sequence[int] = buckets[1]
        self.rank, self.width, self.structured = rank, width, structured
        self.logits: list[Tensor] = []
        self.aux: list[Tensor] = []
        self.threshold = 1  # tokens a line of a decode step

    def inputs(
        self, requests: list[Request], ids: list[int], positions: list[int], slots: list[int], at: Sequence[int],
        longest: int, spec_decode_metadata: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Of the model: tokens of lines that `requests` begin; `at` are those whose logits are wanted."""
        prompt = longest > self.threshold
        table = torch.full((1 if prompt else len(ids) // longest, self.width), -1, dtype=torch.int32)
        params, mask = torch.tensor([[1.0, 1.0, 0.0]]).repeat(len(at), 1), None
        if self.structured:
            mask = torch.ones(len(at), self.model.config.vocab_size, dtype=torch.bool)
        for row, request in enumerate(requests):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
            params[row] = torch.tensor(request.params)
            if mask is not None and request.allowed is not None:
                mask[row] = request.allowed()
        metadata = {
            "block_table_tensor": table,
            "slot_mapping": torch.tensor(slots),
            "max_query_len": longest,
            "block_size": self.block,
            "max_blocks_per_seq": self.width,
            "decode_token_threshold": self.threshold,
            "cached_seq_len": torch.zeros(1, 1, dtype=torch.int32),
            "kv_segment_size": self.segment if prompt else 0,
        }
        return {
            "input_ids": torch.tensor(ids, dtype=torch.int32),
            "positions": torch.tensor(positions),
            "attn_metadata": dict.fromkeys(self.names, metadata),
            "sampling_positions": torch.tensor(at),
            "sampling_params": params,
            "spec_decode_metadata": spec_decode_metadata,
            "logit_mask": mask,
            "rank": torch.tensor(self.rank, dtype=torch.int32),
        }

    def step(
        self,
        lines: Sequence[tuple[Request, list[int]]],
        total: int,
        longest: int,
        at: Sequence[int],
        drafts: Any = None,
    ) -> Tensor:
        """The next tokens of requests, padded to `total`."""
        ids, positions, slots = [], [], []
        for request, tokens in lines:
            for position, token in enumerate(tokens, request.cached):
                if position == len(request.blocks) * self.block:
                    request.blocks.append(self.free.pop(0))
                ids.append(token)
                positions.append(position)
                slots.append(request.blocks[position // self.block] * self.block + position % self.block)
        pad = total - len(ids)
        ids, slots = ids + [0] * pad, slots + [self.padding] * pad
        positions += [positions[-1] if longest > self.threshold else 0] * pad
        HERE.step = getattr(HERE, "step", 0) + 1
        named = self.inputs([request for request, _ in lines], ids, positions, slots, at, longest, drafts)
        first, *others = self.compiled(**named)
        if self.model.aux_layers:
            self.aux.append(others.pop(0))
        if self.model.sampling is None:
            others, first = [first], first.argmax(-1)
        self.logits += others
        return first  # type: ignore[no-any-return]

    def _keep(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """What was sampled for each, without what a rejected draft left."""
        for row, request in enumerate(requests):
            request.output += [token for token in tokens[row].tolist() if token >= 0]
            if self.logits:
                request.logits.append(self.logits[-1][row])

    def prefill(self, request: Request) -> None:
        """A prompt (after a preemption with its own output), whole or in segments; the last gives a token."""
        while request.cached < len(request.tokens):
            part = request.tokens[request.cached :][: self.segment or None]
            wide = next(size for size in self.prompt_buckets if size >= len(part))
            sampled = self.step([(request, part)], wide, wide, [len(part) - 1])
            request.cached += len(part)
        self._keep([request], sampled.unsqueeze(1))

    def decode(self, requests: Sequence[Request], drafts: Sequence[list[int]] = ()) -> None:
        """A token for each, behind as many drafts a line as `threshold` has room for; padded to a bucket of lines."""
        rows, count = next(size for size in self.line_buckets if size >= len(requests)), self.threshold
        metadata = None
        if count > 1:
            ids = torch.tensor(drafts).flatten()
            ids = torch.nn.functional.pad(ids, (0, rows * (count - 1) - len(ids)))
            metadata = {"num_draft_tokens": [count - 1] * rows, "draft_token_ids": ids}
        ahead = drafts or [[]] * len(requests)
        lines = [(request, [request.tokens[-1], *drafted]) for request, drafted in zip(requests, ahead, strict=True)]
        sampled = self.step(lines, rows * count, count, range(rows * count), metadata)
        self._keep(requests, sampled.view(rows, count))
        for request in requests:
            request.cached = len(request.tokens) - 1


def serve(runner: Runner, prompts: list[list[int]], wanted: int = WANTED) -> list[Request]:
    """Requests at different times, one of them preempted in the middle and one with a shared prefix."""
    requests = [Request(list(prompt), wanted) for prompt in prompts]
    waiting, running, step = list(requests), [], 0  # type: ignore[var-annotated]
    while waiting or running:
        if waiting and step % 2 == 0:
            request = waiting.pop(0)
            for other in running:
                if runner.segment and not request.blocks and other.prompt[:BLOCK] == request.prompt[:BLOCK]:
                    request.blocks, request.cached = other.blocks[:1], BLOCK  # a prefix hit
            runner.prefill(request)
            running.append(request)
        elif running:
            runner.decode(running)
        if step == 5 and len(running) > 1:
            waiting.insert(0, victim := running.pop(0))
            runner.free += victim.blocks
            victim.blocks, victim.cached = [], 0
        running = [request for request in running if len(request.output) < wanted]
        step += 1
    nobodys = [half[0].float() for halves in runner.pages.values() for half in halves]
    assert all(bool((page == NULL).all()) for page in nobodys), "the null block"
    return requests


def verify(runner: Runner, requests: list[Request], replies: list[list[int]], tokens: int, wanted: int) -> int:
    """Steps to `wanted` tokens of each, `tokens` a line, every other step's last draft wrong; the replies come."""
    runner.threshold, steps = tokens, 0
    while min(len(request.output) for request in requests) < wanted:
        ahead = [
            [*right, 0, 0, 0][len(request.output) :][: tokens - 1]
            for request, right in zip(requests, replies, strict=True)
        ]
        runner.decode(requests, [[*drafts[:-1], drafts[-1] + steps % 2] for drafts in ahead])
        steps += 1
    for request, right in zip(requests, replies, strict=True):
        assert request.output[: len(right)] == right[: len(request.output)]
    return steps


def on_meta(config: KimiK2Config, target: Target, rank: int = 0) -> Runner:
    """A planned deployment's rank on tensors without memory; one replica."""
    layout, line = target.layout, target.torch_native
    assert line is not None
    HERE.tp, (HERE.dp,), HERE.ep = Group.several(layout.ranks)[rank], Group.several(1, "dp"), layout.moe_ep
    neuron = NeuronConfig(ep_degree=layout.moe_ep, quantization=layout.experts)
    if line.on_device_sampling_config is not None:
        neuron.on_device_sampling_config = SimpleNamespace(**line.on_device_sampling_config)
    return Runner(
        None, SimpleNamespace(to_dict=config.to_hf_dict, dtype=torch.bfloat16), neuron, rank=rank, blocks=256,
        block=line.block_size, segment=(line.kv_segment_size_buckets or (0,))[0],
        cache=FP8 if line.kv_cache_dtype == "fp8" else None, structured=line.enable_structured_outputs,
        compile_with=eager,
    )  # fmt: skip


def hf_config(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> SimpleNamespace:
    """What the runner hands over of config.json."""
    raw = json.loads((directory / "config.json").read_text()) | changes
    if isinstance(held := raw.get("quantization_config"), dict):
        held |= {"total_num_heads": 4, "total_num_kv_heads": 4}  # vLLM's notes to its compressed-tensors
    return SimpleNamespace(to_dict=lambda: raw, dtype=dtype)


def prompts(directory: Path, seed: int = 5) -> list[list[int]]:
    """Eight of drawn lengths; the third begins like the second, and so on."""
    vocabulary = KimiK2Config.from_pretrained(directory).vocab_size
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 24, (8,), generator=generator).tolist()
    drawn = [torch.randint(0, vocabulary, (min(length, 18),), generator=generator).tolist() for length in lengths]
    for at in range(2, len(drawn), 3):
        drawn[at] = drawn[at - 1][:5] + drawn[at]
    return drawn


@functools.cache
def plain(directory: Path, seed: int = 5, count: int = 8) -> tuple[list[list[int]], list[Tensor]]:
    """The plain model's greedy tokens of the first of `prompts`, each alone, and the logits of each."""
    model, tokens, logits = KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32), [], []
    for prompt in prompts(directory, seed)[:count]:
        ids = list(prompt)
        for _ in range(WANTED):
            out = model(torch.tensor([ids]))[0]
            ids.append(int(out[-1].argmax()))
        tokens.append(ids[len(prompt) :])
        logits.append(out[len(prompt) - 1 :])
    return tokens, logits


def differences(directory: Path, requests: list[Request], seed: int = 5) -> tuple[int, float]:
    """Requests whose tokens are not the plain model's, and how far logits are off."""
    tokens, logits = plain(directory, seed, len(requests))
    wrong = sum(request.output != right for request, right in zip(requests, tokens, strict=True))
    off = [
        torch.stack(request.logits) - right for request, right in zip(requests, logits, strict=True) if request.logits
    ]
    return wrong, float(torch.cat(off).abs().max()) if off else 0.0


def alone(directory: Path, *, dtype: torch.dtype = torch.float32, changes: Any = None, **options: Any) -> Runner:
    """A runner on one rank; options are the runner's, or of NeuronConfig."""
    (HERE.tp,), (HERE.dp,), HERE.ep = Group.several(1), Group.several(1, "dp"), 1
    fields = {name: options.pop(name) for name in NeuronConfig.__dataclass_fields__ if name in options}
    return Runner(directory, hf_config(directory, dtype, **(changes or {})), NeuronConfig(**fields), **options)


def served(
    directory: Path, *, tp: int = 1, dp: int = 1, ep: int = 1, held: str = "bf16", sample: bool = False, seed: int = 5,
    count: int = 8, **options: Any,
) -> list[list[Request]]:  # fmt: skip
    """The first of `prompts` as each rank served them."""
    options.setdefault("compile_with", Lowering())

    def run(rank: int) -> list[Request]:
        config = NeuronConfig(ep_degree=ep, quantization=held, **(SAMPLED if sample else {}))
        runner = Runner(directory, hf_config(directory), config, rank=rank % tp, **options)
        return serve(runner, prompts(directory, seed)[:count])

    return on_ranks(tp, dp, ep, run)
