"""vllm-neuron's worker and runner as its documents describe them, over stand-ins for its and vLLM's modules.

Pages, buckets, padding, one request a prefill, batched decodes, preemption and prefix hits; sampling is greedy.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from plain_tokens import expected
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.target import Target
from kimi_k2.sharding.experts.format import expert_formats

BLOCK = 4
PROMPT_BUCKETS = (8, 16, 32, 64)
LINE_BUCKETS = (1, 2, 4, 8)


class Meeting:
    """Where the ranks of a group, threads of one process, exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size, timeout=300), [torch.empty(0)] * size


class Group:
    """vLLM's GroupCoordinator."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank_in_group, self.world_size = meeting, rank, len(meeting.values)
        self.device_group = self

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.meeting.values[self.rank_in_group] = x
        self.meeting.barrier.wait()
        found = list(self.meeting.values)
        self.meeting.barrier.wait()
        return found

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x if self.world_size == 1 else torch.cat(self._exchange(x), dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.world_size == 1 else torch.stack(self._exchange(x)).sum(0)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.all_reduce(x).chunk(self.world_size, dim)[self.rank_in_group].contiguous()


class MetaGroup:
    """As `Group` for tensors without memory: shapes alone."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size, self.rank_in_group, self.device_group = world_size, rank, None

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.world_size, dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + 0

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, 0, x.shape[dim] // self.world_size)


HERE = threading.local()  # this rank's groups: tp, dp, ep


def on_ranks(tp: int, dp: int, ep: int, run: Callable[[int], Any]) -> list[Any]:
    """`run` on all ranks, a thread each; their results, or the first error."""
    expert_formats()  # found before there are threads
    heads, replicas = [Meeting(tp) for _ in range(dp)], [Meeting(dp) for _ in range(tp)]
    results: list[Any] = [None] * (tp * dp)
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        replica, at = divmod(number, tp)
        HERE.tp, HERE.dp, HERE.ep = Group(heads[replica], at), Group(replicas[at], replica), ep
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


class Sampler(torch.nn.Module):
    """The line's, greedy: logits of this rank's part of the vocabulary to tokens."""

    def __init__(self, sampling_config: Any, process_group: Any = None) -> None:
        super().__init__()
        assert sampling_config.all_greedy
        self.group = process_group

    def forward(self, logits: Tensor, sampling_params: Any, logit_mask: Any = None, tp_rank: Any = None) -> Tensor:
        whole = logits if self.group is None else self.group.all_gather(logits, -1)
        return (whole if logit_mask is None else whole.masked_fill(~logit_mask, float("-inf"))).argmax(-1)


def rejection_sampler(metadata: Any, sampled: Tensor) -> Tensor:
    """The line's, as its page says: drafts up to the first that was not sampled, what was sampled there, then -1."""
    targets, drafts = sampled.view(len(metadata.num_draft_tokens), -1), metadata.draft_token_ids
    agree = (targets[:, :-1] == drafts.view(len(targets), -1)).cumprod(1)
    kept = torch.arange(targets.shape[1]) <= agree.sum(1, keepdim=True)
    return targets.masked_fill(~kept, -1)


def stand_ins() -> dict[str, ModuleType]:
    """Modules of vLLM and the line that the model imports."""
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

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Runner:
    """Loads the model and runs requests as the line's runner does.

    Args:
        padding: how a padded slot is spelled, 0 (0.24 and later) or -1 (0.21).
        segment: tokens of a prompt's segment; 0 reads prompts in one piece.
        compile_with: what the model is passed through, say torch.compile.
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
        width: int = 24,
        compile_with: Callable[[Any], Any] = lambda model: model,
        poison: bool = True,
    ) -> None:
        from kimi_k2.neuron.torch_native.model import KimiK2ForVllmNeuron

        with torch.device("meta"):
            model = KimiK2ForVllmNeuron.from_configs(hf_config, neuron_config)
        model.load_weights(directory, torch.device("cpu"), None)
        specs = model.get_kv_spec().layers
        self.names = [spec.name for spec in specs]
        shape = (blocks, specs[0].num_kv_heads, BLOCK, specs[0].head_size)
        # The null block is nobody's: were its values read, they would be seen.
        self.pages = {spec.name: [torch.zeros(shape, dtype=spec.dtype) for _ in range(2)] for spec in specs}
        if poison:
            for halves in self.pages.values():
                for half in halves:
                    half[0] = 1e4
        model.bind_kv_cache(self.pages)
        self.model, self.compiled = model.eval(), compile_with(model.eval())
        self.free, self.padding, self.segment = list(range(1, blocks)), padding, segment
        self.rank, self.width = torch.tensor(rank, dtype=torch.int32), width
        self.neuron_config, self.logits, self.aux = neuron_config, [], []  # type: ignore[var-annotated]
        self.threshold = 1  # tokens a line of a decode step

    def slot(self, request: Request, position: int) -> int:
        return request.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def table(self, requests: list[Request], rows: int) -> Tensor:
        table = torch.full((rows, self.width), -1, dtype=torch.int32)
        for row, request in enumerate(requests):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        return table

    def call(
        self,
        ids: Any,
        positions: Any,
        slots: Any,
        table: Tensor,
        at: Any,
        longest: int,
        segment: int,
        spec_decode_metadata: Any = None,
    ) -> Tensor:
        metadata = {
            "block_table_tensor": table,
            "slot_mapping": torch.tensor(slots, dtype=torch.int64),
            "max_query_len": longest,
            "block_size": BLOCK,
            "max_blocks_per_seq": self.width,
            "decode_token_threshold": self.threshold,
            "cached_seq_len": torch.zeros(1, 1, dtype=torch.int32),
            "kv_segment_size": segment,
        }
        sampled = torch.tensor(at, dtype=torch.int64)
        out = self.compiled(
            input_ids=torch.tensor(ids, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int64),
            attn_metadata=dict.fromkeys(self.names, metadata),
            sampling_positions=sampled,
            sampling_params=torch.tensor([[1.0, 1.0, 0.0]]).expand(len(at), 3),
            spec_decode_metadata=spec_decode_metadata,
            logit_mask=None,
            rank=self.rank,
        )
        if self.model.aux_layers:
            self.aux.append(out[1])
            out = (out[0], *out[2:]) if self.model.sampling is not None else out[0]
        if isinstance(out, tuple):
            self.logits.append(out[1])
            return out[0]  # type: ignore[no-any-return]
        self.logits.append(out)
        return out.argmax(-1)  # type: ignore[no-any-return]

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
            wide = next(size for size in PROMPT_BUCKETS if size >= count)
            pad = wide - count
            positions = list(range(start, end))
            slots = [self.slot(request, at) for at in positions] + [self.padding] * pad
            ids = tokens[start:end] + [0] * pad
            table = self.table([request], 1)
            segment = 8 if self.segment or start else 0
            sampled = self.call(ids, positions + [end - 1] * pad, slots, table, [count - 1], wide, segment)
            request.cached = end
        request.output.append(int(sampled[0]))

    def decode(self, requests: list[Request]) -> None:
        """A token for each; lines are padded to a bucket with nothing."""
        rows = next(size for size in LINE_BUCKETS if size >= len(requests))
        for request in requests:
            self.grow(request, len(request.tokens))
        pad = rows - len(requests)
        positions = [len(request.tokens) - 1 for request in requests]
        slots = [self.slot(request, at) for request, at in zip(requests, positions, strict=True)]
        ids = [request.tokens[-1] for request in requests] + [0] * pad
        sampled = self.call(
            ids, positions + [0] * pad, slots + [self.padding] * pad, self.table(requests, rows), range(rows), 1, 0
        )
        for request, token in zip(requests, sampled.tolist(), strict=False):
            request.cached += 1
            request.output.append(token)

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
        table = self.table(requests, len(requests))
        accepted = self.call(ids, positions, slots, table, range(len(ids)), count, 0, metadata)
        for request, tokens in zip(requests, accepted.tolist(), strict=True):
            request.output += [token for token in tokens if token >= 0]

    def preempt(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks, request.cached = [], 0

    def share(self, request: Request, other: Request, tokens: int) -> None:
        """A prefix hit: whole blocks of the other's prompt."""
        whole = tokens // BLOCK
        request.blocks, request.cached = other.blocks[:whole], whole * BLOCK


def serve(runner: Runner, prompts: list[list[int]], wanted: int) -> list[list[int]]:
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
    return [request.output for request in requests]


def on_meta(config: KimiK2Config, target: Target, group: Any) -> Any:
    """The model of a planned deployment on tensors without memory; of `group`'s rank, one replica."""
    from kimi_k2.neuron.torch_native.model import KimiK2ForVllmNeuron, layer_name

    layout = target.layout
    HERE.tp, HERE.dp, HERE.ep = group, Group(Meeting(1), 0), layout.moe_ep
    neuron = NeuronConfig(ep_degree=layout.moe_ep, quantization=layout.experts)
    hf = SimpleNamespace(to_dict=config.to_hf_dict, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = KimiK2ForVllmNeuron.from_configs(hf, neuron)
        model.inv_freq, model.first_expert = model.inv_freq.to("meta"), model.first_expert.to("meta")
        assert target.torch_native is not None
        half = torch.empty(256, 1, target.torch_native.block_size, config.cache_dim // 2, dtype=torch.bfloat16)
        layers = range(config.num_hidden_layers)
        model.bind_kv_cache({layer_name(layer): [half, half.clone()] for layer in layers})
    return model


def call_on_meta(model: Any, tokens: int, lines: int, slots: int, block: int, segment: int) -> Any:
    """A step of `lines` sequences of `slots` slots each, or a prompt."""
    from kimi_k2.neuron.torch_native.model import layer_name

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    metadata = {
        "block_table_tensor": empty(lines, slots // block, dtype=torch.int32),
        "slot_mapping": empty(tokens),
        "max_query_len": tokens // lines,
        "block_size": block,
        "decode_token_threshold": 1,
        "kv_segment_size": segment,
    }
    return model(
        input_ids=empty(tokens, dtype=torch.int32),
        positions=empty(tokens),
        attn_metadata={layer_name(layer): metadata for layer in range(2)},
        sampling_positions=empty(lines),
        rank=empty(dtype=torch.int32),
    )


WANTED = 8


def hf_config(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> SimpleNamespace:
    """What the runner hands over of config.json."""
    raw = json.loads((directory / "config.json").read_text()) | changes
    if isinstance(held := raw.get("quantization_config"), dict):
        held |= {"total_num_heads": 4, "total_num_kv_heads": 4}  # vLLM's notes to its compressed-tensors
    return SimpleNamespace(to_dict=lambda: raw, dtype=dtype)


def prompts(directory: Path) -> list[list[int]]:
    """Eight of drawn lengths; the third begins like the second."""
    vocabulary = KimiK2Config.from_pretrained(directory).vocab_size
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 40, (8,), generator=generator).tolist()
    drawn = [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    drawn[2] = drawn[1][:5] + drawn[2]
    return drawn


def plain_tokens(directory: Path) -> list[list[int]]:
    """The plain model's greedy tokens of `prompts`, each alone."""
    return expected(directory, "float32", [{"prompt": one, "new_tokens": WANTED} for one in prompts(directory)])


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
    directory: Path, *, tp: int = 1, dp: int = 1, ep: int = 1, held: str = "bf16", sample: bool = False, **options: Any
) -> list[list[list[int]]]:
    """Tokens of `prompts` that each rank served."""

    def run(rank: int) -> list[list[int]]:
        config = NeuronConfig(ep_degree=ep, quantization=held)
        if sample:
            config.on_device_sampling_config, config.max_logprobs = SimpleNamespace(all_greedy=True), -1
        return serve(
            Runner(directory, hf_config(directory), config, rank=rank % tp, **options), prompts(directory), WANTED
        )

    return on_ranks(tp, dp, ep, run)
