"""vllm-neuron's worker and runner as its documents describe them, over stand-ins for its and vLLM's modules.

Pages, buckets, padding, one request a prefill, batched decodes, preemption and prefix hits; sampling is greedy.
"""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import torch
from lowering import Lowering
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.nki.kernels import MODULES
from kimi_k2.plan.target import Target
from kimi_k2.sharding.experts.format import expert_formats
from nki_emulator import install

BLOCK = 4
BUCKETS = (32,), (8,)  # tokens of a prompt, lines of a step: each has a graph
ALL_BUCKETS = (8, 16, 32, 64), (1, 2, 4, 8)


class Meeting:
    """Where the ranks of a group, threads of one process, exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size, timeout=300), [torch.empty(0)] * size


HERE = threading.local()  # this rank's groups: tp, dp, ep


def exchange(x: Tensor, group: str) -> list[Tensor]:
    """Every rank's x, in the order of ranks."""
    here = getattr(HERE, group)
    here.meeting.values[here.rank_in_group] = x
    here.meeting.barrier.wait()
    found = list(here.meeting.values)
    here.meeting.barrier.wait()
    return found


# Operators, so that a captured graph has them as nodes, the same ones on all ranks.
@torch.library.custom_op("line::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    return torch.cat(exchange(x, group), dim)


@torch.library.custom_op("line::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str) -> Tensor:
    return torch.stack(exchange(x, group)).sum(0)


@torch.library.custom_op("line::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    mine: Tensor = torch.stack(exchange(x, group)).sum(0).chunk(size, dim)[getattr(HERE, group).rank_in_group]
    return mine.contiguous()


all_gather.register_fake(lambda x, dim, size, group: torch.cat([x] * size, dim))
all_reduce.register_fake(lambda x, group: torch.empty_like(x))
reduce_scatter.register_fake(lambda x, dim, size, group: x.chunk(size, dim)[0].contiguous())


class Group:
    """vLLM's GroupCoordinator."""

    def __init__(self, meeting: Meeting, rank: int, name: str = "tp") -> None:
        self.meeting, self.rank_in_group, self.world_size, self.name = meeting, rank, len(meeting.values), name
        self.device_group = self

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x if self.world_size == 1 else torch.ops.line.all_gather(x, dim, self.world_size, self.name)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.world_size == 1 else torch.ops.line.all_reduce(x, self.name)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x if self.world_size == 1 else torch.ops.line.reduce_scatter(x, dim, self.world_size, self.name)


def on_ranks(tp: int, dp: int, ep: int, run: Callable[[int], Any]) -> list[Any]:
    """`run` on all ranks, a thread each; their results, or the first error."""
    expert_formats()  # found before there are threads
    heads, replicas = [Meeting(tp) for _ in range(dp)], [Meeting(dp) for _ in range(tp)]
    results: list[Any] = [None] * (tp * dp)
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        replica, at = divmod(number, tp)
        HERE.tp, HERE.dp, HERE.ep = Group(heads[replica], at), Group(replicas[at], replica, "dp"), ep
        try:
            results[number] = run(number)
        except BaseException as error:
            errors.append(error)
            for meeting in (*heads, *replicas):
                meeting.barrier.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(tp * dp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results


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
        weights = (values / torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)).softmax(-1)
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= top_p, 0.0)
        sums = weights.cumsum(-1)
        drawn = (torch.ops.line.uniform(weights) * sums[:, -1:] >= sums).sum(-1, keepdim=True)
        chosen = torch.where(temperature < 1e-5, torch.zeros_like(drawn), drawn)
        return numbers.gather(-1, chosen).squeeze(-1)


def rejection_sampler(metadata: Any, sampled: Tensor) -> Tensor:
    """The line's, as its page says: drafts up to the first that was not sampled, what was sampled there, then -1."""
    targets, drafts = sampled.view(len(metadata.num_draft_tokens), -1), metadata.draft_token_ids
    agree = (targets[:, :-1] == drafts.view(len(targets), -1)).cumprod(1)
    kept = torch.arange(targets.shape[1]) <= agree.sum(1, keepdim=True)
    return targets.masked_fill(~kept, -1)


def launched(name: str, cores: int) -> Any:
    """One of our kernels on the emulator."""
    return getattr(importlib.import_module(f"kimi_k2.nki.kernels.{MODULES[name]}"), name)[cores]


def to_kernel(value: Tensor) -> Any:
    """Trainium's name for e4m3 below 256, and torch for the rest."""
    if value.dtype == torch.float8_e4m3fn:
        return value.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)
    return value.contiguous()


@torch.library.custom_op("line::nki", mutates_args=())
def nki(name: str, cores: int, tensors: list[Tensor], named: str, numbers: list[float], at: int) -> list[Tensor]:
    """A kernel's positional tensors and, among them from `at` on, its numbers; the last tensors go by name."""
    parts: list[Any] = [to_kernel(one) for one in tensors]
    names = [one for one in named.split(",") if one]
    count = len(parts) - len(names)
    whole = [int(one) if one == int(one) else one for one in numbers]
    made = launched(name, cores)(*parts[:at], *whole, *parts[at:count], **dict(zip(names, parts[count:], strict=True)))
    many = [torch.as_tensor(one) for one in (made if isinstance(made, tuple | list) else [made])]
    return [one.to(like.dtype).reshape(like.shape) for one, like in zip(many, _like(name, tensors), strict=True)]


def _like(name: str, tensors: list[Tensor]) -> list[Tensor]:
    x, other = tensors[0], tensors[1]
    if name == "noaux_tc_router":
        top = x.new_empty(len(x), 8, dtype=torch.float32)
        return [top.to(torch.int32), top, x.new_empty(len(x), other.shape[1], dtype=torch.float32)]
    if name == "selective_experts":
        return [x.new_empty(x.shape, dtype=torch.float32)]
    return [x.new_empty(*x.shape[:2], tensors[4].shape[1], dtype=torch.float32)]  # mla_decode_pages


nki.register_fake(lambda name, cores, tensors, named, numbers, at: _like(name, tensors))


@torch.library.custom_op("line::write_pages", mutates_args=("former", "latter"))
def write_pages(former: Tensor, latter: Tensor, entries: Tensor, rows: Tensor, cores: int) -> None:
    launched("write_pages", cores)(former, latter, entries.contiguous(), rows)


@torch.library.custom_op("line::written_pages", mutates_args=())
def written_pages(
    former: Tensor, latter: Tensor, entries: Tensor, rows: Tensor, cores: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same where nothing is written in place: what the kernel gives."""
    made = former.clone(), latter.clone()
    write_pages(*made, entries, rows, cores)
    return made


written_pages.register_fake(lambda former, latter, *_: (torch.empty_like(former), torch.empty_like(latter)))


class Launch:
    """The line's wrap_nki: `wrap_nki(kernel)[cores](...)` inside a graph."""

    def __init__(self, kernel: Any, cores: int = 0) -> None:
        self.kernel, self.cores = kernel, cores

    def __getitem__(self, cores: int) -> Launch:
        return Launch(self.kernel, cores)

    def __call__(self, *arguments: Any, **named: Tensor) -> Any:
        name = self.kernel.__name__
        if name == "write_pages":
            torch.ops.line.write_pages(*arguments, self.cores)
            return arguments[0].view_as(arguments[0]), arguments[1].view_as(arguments[1])
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        numbers = [float(one) for one in arguments if not isinstance(one, Tensor)]
        at = [isinstance(one, Tensor) for one in arguments].index(False)
        made = torch.ops.line.nki(name, self.cores, tensors + list(named.values()), ",".join(named), numbers, at)
        return made if len(made) > 1 else made[0]


def stand_ins(*, kernels: bool | None = None) -> dict[str, ModuleType]:
    """Modules of vLLM and the line that the model imports; the kernels' too where it says whether they run."""
    contents: dict[str, dict[str, Any]] = {
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: HERE.tp,
            "get_dp_group": lambda: HERE.dp,
            "get_dcp_group": lambda: SimpleNamespace(world_size=getattr(HERE, "dcp", 1)),
        },
        "vllm_neuron.parallel.neuron_parallel_state": {"get_neuron_ep_degree": lambda: HERE.ep},
        "vllm_neuron.model.kv_cache": {
            "KVSpec": lambda layers: SimpleNamespace(layers=layers),
            "LayerSpec": lambda name, heads, size, dtype: SimpleNamespace(
                name=name, num_kv_heads=heads, head_size=size, dtype=dtype
            ),
        },
        "vllm_neuron.nn": {"Sampler": Sampler},
        "vllm_neuron.nn.rejection_sampler": {"rejection_sampler": rejection_sampler},
    }
    if kernels is not None:  # as 0.24 has them
        install()
        contents["vllm_neuron.utils.neuron_utils"] = {"can_run_kernel": lambda tensor: kernels}
        contents["libtorch_neuronx_lite.nki.nki_hop"] = {"wrap_nki": Launch}
    made: dict[str, ModuleType] = {}
    for name, values in contents.items():
        steps = name.split(".")
        for end in range(1, len(steps) + 1):
            made.setdefault(".".join(steps[:end]), ModuleType(".".join(steps[:end])))
        vars(made[name]).update(values)
    return made


@dataclass
class Request:
    """One sequence: its prompt, what came of it, and its pages."""

    prompt: list[int]
    wanted: int
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # tokens that the pages hold
    logits: list[Tensor] = field(default_factory=list)  # of each of its tokens
    params: tuple[float, float, float] = (1.0, 1.0, 0.0)  # top_k, top_p, temperature
    allowed: Callable[[], Tensor] | None = None  # bool [vocab_size], what its grammar takes next

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def eager(model: Any) -> Callable[..., list[Any]]:
    """A model that is not compiled; its results in a list."""

    def call(**named: Any) -> list[Any]:
        made = model(**named)
        return [part for part in made if part is not None] if isinstance(made, tuple) else [made]

    return call


class Runner:
    """Loads the model and runs requests as the line's runner does.

    Args:
        padding: how a padded slot is spelled, 0 (0.24 and later) or -1 (0.21).
        segment: tokens of a prompt's segment; 0 reads prompts in one piece.
        buckets: sizes that a prompt's tokens and a step's lines are padded to.
        compile_with: what makes of the model what is called, which gives its results in a list.
        poison: fill the null block with what would be seen.
        structured: `enable_structured_outputs`: every call has a mask.
    """

    def __init__(
        self,
        directory: Path,
        hf_config: Any,
        neuron_config: Any,
        *,
        rank: int = 0,
        blocks: int = 64,
        padding: int = 0,
        segment: int = 0,
        width: int = 8,
        buckets: tuple[tuple[int, ...], tuple[int, ...]] = BUCKETS,
        compile_with: Callable[[Any], Any] | None = None,
        poison: bool = True,
        structured: bool = False,
    ) -> None:
        from kimi_k2.neuron.torch_native.model import KimiK2ForVllmNeuron

        with torch.device("meta"):
            model = KimiK2ForVllmNeuron.from_configs(hf_config, neuron_config)
        model.load_weights(directory, torch.device("cpu"), None)
        specs = model.get_kv_spec().layers
        self.names = [spec.name for spec in specs]
        shape = (blocks, specs[0].num_kv_heads, BLOCK, specs[0].head_size)
        # The null block is nobody's: were its values read, they would be seen. K and V are one buffer's.
        self.pages = {spec.name: list(torch.zeros(2, *shape, dtype=spec.dtype)) for spec in specs}
        if poison:
            for halves in self.pages.values():
                for half in halves:
                    half[0] = 1e4
        model.bind_kv_cache(self.pages)
        self.model, self.compiled = model.eval(), (compile_with or Lowering())(model.eval())
        self.free, self.padding, self.segment = list(range(1, blocks)), padding, segment
        self.prompt_buckets, self.line_buckets = ((segment,), buckets[1]) if segment else buckets
        self.rank, self.width = torch.tensor(rank, dtype=torch.int32), width
        self.neuron_config, self.logits, self.aux = neuron_config, [], []  # type: ignore[var-annotated]
        self.threshold = 1  # tokens a line of a decode step
        self.structured = structured

    def slot(self, request: Request, position: int) -> int:
        return request.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def table(self, requests: list[Request], rows: int) -> Tensor:
        table = torch.full((rows, self.width), -1, dtype=torch.int32)
        for row, request in enumerate(requests):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        return table

    def call(
        self,
        requests: list[Request],
        ids: list[int],
        positions: list[int],
        slots: list[int],
        at: Sequence[int],
        longest: int,
        spec_decode_metadata: Any = None,
    ) -> Tensor:
        """A step: tokens of lines that `requests` begin; `at` are those whose logits are wanted."""
        prompt = longest > self.threshold
        table = self.table(requests, 1 if prompt else len(ids) // longest)
        HERE.step = getattr(HERE, "step", 0) + 1
        params, mask = torch.tensor([[1.0, 1.0, 0.0]]).repeat(len(at), 1), None
        for row, request in enumerate(requests):
            params[row] = torch.tensor(request.params)
        if self.structured:
            mask = torch.ones(len(at), self.model.config.vocab_size, dtype=torch.bool)
            for row, request in enumerate(requests):
                if request.allowed is not None:
                    mask[row] = request.allowed()
        metadata = {
            "block_table_tensor": table,
            "slot_mapping": torch.tensor(slots, dtype=torch.int64),
            "max_query_len": longest,
            "block_size": BLOCK,
            "max_blocks_per_seq": self.width,
            "decode_token_threshold": self.threshold,
            "cached_seq_len": torch.zeros(1, 1, dtype=torch.int32),
            "kv_segment_size": self.segment if prompt else 0,
        }
        results = self.compiled(
            input_ids=torch.tensor(ids, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int64),
            attn_metadata=dict.fromkeys(self.names, metadata),
            sampling_positions=torch.tensor(at, dtype=torch.int64),
            sampling_params=params,
            spec_decode_metadata=spec_decode_metadata,
            logit_mask=mask,
            rank=self.rank,
        )
        first, *others = results
        if self.model.aux_layers:
            self.aux.append(others.pop(0))
        if self.model.sampling is None:
            self.logits.append(first)
            return first.argmax(-1)  # type: ignore[no-any-return]
        self.logits += others
        return first  # type: ignore[no-any-return]

    def grow(self, request: Request, length: int) -> None:
        while len(request.blocks) * BLOCK < length:
            request.blocks.append(self.free.pop(0))

    def prefill(self, request: Request) -> None:
        """A prompt (after a preemption with its own output), whole or in segments; the last gives a token."""
        tokens = request.tokens
        while request.cached < len(tokens):
            start = request.cached
            end = min(len(tokens), start + self.segment) if self.segment else len(tokens)
            self.grow(request, end)
            count = end - start
            wide = next(size for size in self.prompt_buckets if size >= count)
            pad = wide - count
            positions = list(range(start, end))
            slots = [self.slot(request, at) for at in positions] + [self.padding] * pad
            ids = tokens[start:end] + [0] * pad
            sampled = self.call([request], ids, positions + [end - 1] * pad, slots, [count - 1], wide)
            request.cached = end
        request.output.append(int(sampled[0]))
        self._keep(request, 0)

    def _keep(self, request: Request, row: int) -> None:
        if self.logits:
            request.logits.append(self.logits[-1][row])

    def decode(self, requests: list[Request]) -> None:
        """A token for each; lines are padded to a bucket with nothing."""
        rows = next(size for size in self.line_buckets if size >= len(requests))
        for request in requests:
            self.grow(request, len(request.tokens))
        pad = rows - len(requests)
        positions = [len(request.tokens) - 1 for request in requests]
        slots = [self.slot(request, at) for request, at in zip(requests, positions, strict=True)]
        ids = [request.tokens[-1] for request in requests] + [0] * pad
        sampled = self.call(requests, ids, positions + [0] * pad, slots + [self.padding] * pad, range(rows), 1)
        for row, (request, token) in enumerate(zip(requests, sampled.tolist(), strict=False)):
            request.cached += 1
            request.output.append(token)
            self._keep(request, row)

    def verify(self, requests: list[Request], drafts: list[list[int]]) -> None:
        """A step of one token and as many drafts a line; keeps what the rejection sampler gives."""
        count = self.threshold
        ids = [token for one, drafted in zip(requests, drafts, strict=True) for token in (one.tokens[-1], *drafted)]
        positions: list[int] = []
        slots: list[int] = []
        for request in requests:
            start = len(request.tokens) - 1
            self.grow(request, start + count)
            positions += range(start, start + count)
            slots += [self.slot(request, at) for at in range(start, start + count)]
        metadata = SimpleNamespace(
            num_draft_tokens=[count - 1] * len(requests), draft_token_ids=torch.tensor(drafts).flatten()
        )
        accepted = self.call(requests, ids, positions, slots, range(len(ids)), count, metadata)
        for request, tokens in zip(requests, accepted.tolist(), strict=True):
            request.output += [token for token in tokens if token >= 0]

    def preempt(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks, request.cached = [], 0

    def share(self, request: Request, other: Request, tokens: int) -> None:
        """A prefix hit: whole blocks of the other's prompt."""
        whole = tokens // BLOCK
        request.blocks, request.cached = other.blocks[:whole], whole * BLOCK


def serve(runner: Runner, prompts: list[list[int]], wanted: int) -> list[Request]:
    """Requests at different times, one of them preempted in the middle and one with a shared prefix."""
    requests = [Request(list(prompt), wanted) for prompt in prompts]
    waiting: list[Request] = list(requests)
    running: list[Request] = []
    step = 0
    while waiting or running:
        if waiting and step % 2 == 0:
            request = waiting.pop(0)
            common = next(
                (
                    other
                    for other in running
                    if runner.segment and other.prompt[:BLOCK] == request.prompt[:BLOCK] and not request.blocks
                ),
                None,
            )
            if common is not None:
                runner.share(request, common, BLOCK)
            runner.prefill(request)
            running.append(request)
        elif running:
            runner.decode(running)
        if step == 5 and len(running) > 1:
            waiting.insert(0, victim := running.pop(0))
            runner.preempt(victim)
        running = [request for request in running if len(request.output) < request.wanted]
        step += 1
    return requests


def on_meta(config: KimiK2Config, target: Target, rank: int) -> Any:
    """The model of a planned deployment's rank on tensors without memory; one replica."""
    from kimi_k2.neuron.torch_native.model import KimiK2ForVllmNeuron, layer_name

    layout, line = target.layout, target.torch_native
    assert line is not None
    HERE.tp, HERE.dp, HERE.ep = Group(Meeting(layout.ranks), rank), Group(Meeting(1), 0), layout.moe_ep
    neuron = NeuronConfig(ep_degree=layout.moe_ep, quantization=layout.experts)
    if line.on_device_sampling_config is not None:
        neuron.on_device_sampling_config = SimpleNamespace(**line.on_device_sampling_config)
    hf = SimpleNamespace(to_dict=config.to_hf_dict, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = KimiK2ForVllmNeuron.from_configs(hf, neuron)
        model.inv_freq, model.first_expert = model.inv_freq.to("meta"), model.first_expert.to("meta")
        half = torch.empty(256, 1, line.block_size, config.cache_dim // 2, dtype=torch.bfloat16)
        layers = range(config.num_hidden_layers)
        model.bind_kv_cache({layer_name(layer): [half.clone(), half.clone()] for layer in layers})
    return model


def call_on_meta(config: KimiK2Config, target: Target, tokens: int, lines: int, slots: int) -> dict[str, Any]:
    """What the runner would call with: a step of `lines` sequences of `slots` slots each, or a prompt."""
    from kimi_k2.neuron.torch_native.model import layer_name

    line = target.torch_native
    assert line is not None

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    metadata = {
        "block_table_tensor": empty(lines, slots // line.block_size, dtype=torch.int32),
        "slot_mapping": empty(tokens),
        "max_query_len": tokens // lines,
        "block_size": line.block_size,
        "decode_token_threshold": 1,
        "kv_segment_size": (line.kv_segment_size_buckets or (0,))[0] if tokens > lines else 0,
    }
    structured = line.enable_structured_outputs
    return {
        "input_ids": empty(tokens, dtype=torch.int32),
        "positions": empty(tokens),
        "attn_metadata": {layer_name(layer): metadata for layer in range(config.num_hidden_layers)},
        "sampling_positions": empty(lines),
        "sampling_params": empty(lines, 3, dtype=torch.float32),
        "logit_mask": empty(lines, config.vocab_size, dtype=torch.bool) if structured else None,
        "rank": empty(dtype=torch.int32),
    }


WANTED = 8


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
    drawn = [torch.randint(0, vocabulary, (min(one, 18),), generator=generator).tolist() for one in lengths]
    for at in range(2, len(drawn), 3):
        drawn[at] = drawn[at - 1][:5] + drawn[at]
    return drawn


@functools.cache
def plain(directory: Path, seed: int = 5) -> tuple[list[list[int]], list[Tensor]]:
    """The plain model's greedy tokens of `prompts`, each alone, and the logits of each."""
    model, tokens, logits = KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32), [], []
    with torch.no_grad():
        for prompt in prompts(directory, seed):
            ids = list(prompt)
            for _ in range(WANTED):
                out = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0]
                ids.append(int(out[-1].argmax()))
            tokens.append(ids[len(prompt) :])
            logits.append(out[len(prompt) - 1 :])
    return tokens, logits


def differences(directory: Path, requests: list[Request], seed: int = 5) -> tuple[int, float]:
    """Tokens that are not the plain model's, and how far logits are off."""
    tokens, logits = plain(directory, seed)
    wrong = sum(one != two for request, right in zip(requests, tokens, strict=True)
                for one, two in zip(request.output, right, strict=True))  # fmt: skip
    off = [torch.stack(one.logits) - right for one, right in zip(requests, logits, strict=True) if one.logits]
    return wrong, float(torch.cat(off).abs().max()) if off else 0.0


def alone(
    directory: Path,
    config: NeuronConfig,
    *,
    dtype: torch.dtype = torch.float32,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Runner:
    """A runner on one rank."""
    HERE.tp, HERE.dp, HERE.ep = Group(Meeting(1), 0), Group(Meeting(1), 0), 1
    return Runner(directory, hf_config(directory, dtype, **(changes or {})), config, **options)


def served(
    directory: Path,
    *,
    tp: int = 1,
    dp: int = 1,
    ep: int = 1,
    held: str = "bf16",
    sample: bool = False,
    seed: int = 5,
    lowering: Callable[[Any], Any] | None = None,
    **options: Any,
) -> list[list[Request]]:
    """`prompts` as each rank served them."""
    compile_with = lowering or Lowering()

    def run(rank: int) -> list[Request]:
        config = NeuronConfig(ep_degree=ep, quantization=held)
        if sample:
            config.on_device_sampling_config, config.max_logprobs = SimpleNamespace(max_top_k=256), -1
        made = Runner(
            directory, hf_config(directory), config, rank=rank % tp, compile_with=compile_with, **options
        )  # fmt: skip
        return serve(made, prompts(directory, seed), WANTED)

    return on_ranks(tp, dp, ep, run)
