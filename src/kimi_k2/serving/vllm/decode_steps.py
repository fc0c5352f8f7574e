"""Decode steps of a batch that has not changed, prepared on the GPU.

vLLM's runner makes the inputs of every step anew on the host: about a hundred small tensor operations, which for few
requests take longer than the step. Where the same requests as in the step before each get one more token, the new
inputs follow from the old ones. They are then computed in the CUDA graph that holds the model and its head, and the
host only keeps vLLM's records. Sampling, structured output, stops and the scheduler are vLLM's as ever.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch
from kimi_k2.engine.graphs import GraphRecorder, Recorded, Recorder, on_all_ranks
from kimi_k2.ops.mla import next_step
from kimi_k2.serving.vllm.adapter import (
    Deployment,
    ExecuteModelState,
    SchedulerOutput,
    set_forward_context,
    weak_ref_tensor,
)
from kimi_k2.serving.vllm.ranks import connect, least_of_ranks
from kimi_k2.serving.vllm.support import against_decode_steps

logger = logging.getLogger("vllm.kimi_k2")

# Requests of a step up to which there are graphs: beyond, the GPU is busy while the host prepares.
MOST = 128
# What the scheduler may say of a step that needs nothing done but its decodes; of all else it must be empty.
EXPECTED = {
    "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens", "num_common_prefix_blocks",
    "has_structured_output_requests", "pending_structured_output_tokens",
}  # fmt: skip
# What `sample_tokens` of vLLM's runner takes from `execute_model`.
STATE = (
    "scheduler_output", "logits", "spec_decode_metadata", "spec_decode_common_attn_metadata", "hidden_states",
    "sample_hidden_states", "aux_hidden_states", "ec_connector_output", "cudagraph_stats", "slot_mappings",
)  # fmt: skip

Forward = Callable[[], tuple[Tensor, ...]]


class DecodeSteps:
    """Those of one runner of vLLM's, whose buffers and records it keeps as the runner itself would.

    Args:
        runner: vLLM's first model runner, its cache in place.
        model: ours in it.
        sizes: of batches to which others are padded, ascending.

    Attributes:
        width: new tokens of each request.
    """

    width = 1

    def __init__(self, runner: Any, model: Any, sizes: Sequence[int]) -> None:
        self.runner, self.model, self.sizes = runner, model, list(sizes)
        self.others = [one.name for one in fields(SchedulerOutput) if one.name not in EXPECTED]
        self._replays: dict[int, Forward] = {}

    def capture(self, record: Recorder) -> list[Recorded]:
        """Make a graph of each size, the largest first, whose memory the others then use. Every rank must call this."""
        paged = self.model.paged
        with paged.plain.computing():
            connect(paged.exchanges(), paged.plain.lm_head.weight.device, [size * self.width for size in self.sizes])
        # Rows of no sequence: nothing is stored, and the kernels have been built and tuned by vLLM's own runs.
        self.runner.seq_lens.zero_()
        self.runner.optimistic_seq_lens_cpu.zero_()
        graphs = []
        for size in reversed(self.sizes):
            work = self._work(size)
            if size == self.sizes[-1]:
                with paged.alone():
                    work()
            recorded = record(work)
            graphs += [recorded._replace(made=()), *self._more(size, recorded, record)]
            self._replays[size] = replaying(recorded.replay, tuple(map(record.let_go, recorded.made)))
        return graphs

    def _more(self, size: int, recorded: Recorded, record: Recorder) -> list[Recorded]:
        """Graphs of what follows a step of so many requests."""
        return []

    def size(self, count: int) -> int:
        """Of the batch to which `count` requests are padded."""
        return self.sizes[bisect_left(self.sizes, count)]

    def carries_on(self, scheduled: Any) -> bool:
        """Whether a step has the batch's requests, `width` new tokens of each, and nothing else to be done."""
        runner, count, cached = self.runner, self.runner.input_batch.num_reqs, scheduled.scheduled_cached_reqs
        if not 0 < count <= self.sizes[-1] or len(cached.req_ids) != count or cached.resumed_req_ids:
            return False
        if scheduled.total_num_scheduled_tokens != count * self.width:
            return False
        busy = runner.execute_model_state is not None or runner.num_prompt_logprobs
        return not busy and not any(getattr(scheduled, name) for name in self.others)

    def rows(self, scheduled: Any) -> list[int] | None:
        """Where in the batch each of the step's requests is; None where vLLM's runner must prepare the step."""
        runner, batch, cached = self.runner, self.runner.input_batch, scheduled.scheduled_cached_reqs
        count, index = batch.num_reqs, batch.req_id_to_index
        if not self.carries_on(scheduled):
            return None
        # The tokens sampled last are still on the GPU, by the order of their own step.
        if batch.prev_sampled_token_ids is not None and batch.prev_req_id_to_index != index:
            return None
        lengths, rows = runner.optimistic_seq_lens_cpu[:count].tolist(), []
        for request, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            row, state = index.get(request), runner.requests.get(request)
            # The step before ended with this request's newest token, and nothing of it was taken back.
            if row is None or computed != lengths[row] or computed + 1 != state.num_tokens:
                return None
            if outputs < len(state.output_token_ids) or computed < state.num_prompt_tokens:
                return None
            rows.append(row)
        return rows

    def run(self, scheduled: Any, rows: Sequence[int]) -> None:
        """As the runner's `execute_model`: the logits are left for its `sample_tokens`."""
        runner, batch, cached = self.runner, self.runner.input_batch, scheduled.scheduled_cached_reqs
        count, event = len(rows), runner.prepare_inputs_event
        if event is not None:
            event.synchronize()  # copies to the GPU have read what is written here
        grown = False
        for row, request, computed, blocks in zip(
            rows, cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            state = runner.requests[request]
            state.num_computed_tokens = computed
            batch.num_computed_tokens_cpu[row] = computed
            if blocks is not None:
                for block_ids, new in zip(state.block_ids, blocks, strict=True):
                    block_ids.extend(new)
                batch.block_table.append_row(blocks, row)
                grown = True
        batch.refresh_metadata()
        runner.optimistic_seq_lens_cpu[:count] += 1
        if grown:
            batch.block_table.commit_block_table(count)
        sampled = batch.prev_sampled_token_ids
        if sampled is None:
            at = batch.num_computed_tokens_cpu[:count]
            runner.input_ids.np[:count] = batch.token_ids_cpu[range(count), at]
            runner.input_ids.copy_to_gpu(count)
        else:
            runner.input_ids.gpu[:count].copy_(sampled[:count, 0], non_blocking=True)
        if event is not None and (grown or sampled is None):
            event.record()
        size = self.size(count)
        hidden, logits = (self._replays.get(size) or self._work(size))()
        self.leave(scheduled, logits[:count], hidden[:count])

    def leave(self, scheduled: Any, logits: Tensor, hidden: Tensor, **others: Any) -> None:
        """What a step has made, for the runner's `sample_tokens`."""
        made = {
            "scheduler_output": scheduled,
            "logits": logits,
            "hidden_states": hidden,
            "sample_hidden_states": hidden,
        }
        self.runner.execute_model_state = ExecuteModelState(**dict.fromkeys(STATE) | made | others)
        self.runner.kv_connector_output = None

    def _work(self, size: int) -> Forward:
        """A step of so many rows over the runner's buffers: hidden states [size, H], logits [size, vocab_size]."""
        runner, table = self.runner, self.runner.input_batch.block_table[0]
        ids, positions, seq_lens = runner.input_ids.gpu[:size], runner.positions[:size], runner.seq_lens[:size]
        pages, slots = table.block_table.gpu[:size], table.slot_mapping.gpu[:size]
        batch = Batch(size, size, seq_lens, slots, pages)

        def work() -> tuple[Tensor, ...]:
            next_step(seq_lens, ids, positions, slots, pages, table.block_size)
            return self.through(batch, ids, positions)

        return work

    def through(self, batch: Batch, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The model's hidden states of a batch, logits, and the states that a draft's head wants."""
        metadata = {layer.name: batch for layer in self.model.held}
        with set_forward_context(metadata, self.runner.vllm_config, num_tokens=len(ids)):
            made = self.model(input_ids=ids, positions=positions)
        hidden, aux = made if isinstance(made, tuple) else (made, [])
        return hidden, self.model.compute_logits(hidden), *aux


def replaying(replay: Callable[[], Any], made: tuple[Tensor, ...]) -> Forward:
    """What repeats a step, and gives what it makes."""

    def again() -> tuple[Tensor, ...]:
        replay()
        return made

    return again


def reason_against(runner: Any, second: bool, mode: str) -> str | None:
    """Why vLLM is to prepare all steps; None if decode steps can be ours."""
    refused = against_decode_steps(Deployment(runner.vllm_config))
    if refused is not None:
        return refused
    lacking = [name for name in ("seq_lens", "positions", "optimistic_seq_lens_cpu") if not hasattr(runner, name)]
    for reason, holds in (
        ("its second model runner", second),
        (f"its runner has changed: {', '.join(lacking)}", bool(lacking)),
        ("what its runner hands to sampling has changed", ExecuteModelState._fields != STATE),
        ("prompts as embeddings", bool(getattr(runner, "enable_prompt_embeds", False))),
        ("several caches", len(runner.kv_cache_config.kv_cache_groups) != 1),
        (f"cudagraph_mode {mode}", runner.device.type == "cuda" and not mode.startswith("FULL")),
    ):
        if holds:
            return reason
    return None


def decode_steps(runner: Any, model: Any, second: bool, kind: type[DecodeSteps] = DecodeSteps) -> DecodeSteps | None:
    """Of a kind, as a deployment allows them; a line says so. Every rank must call this: all have them, or none."""
    reason = reason_against(runner, second, model.graph_mode)
    if not least_of_ranks(reason is None):
        logger.info("kimi-k2: decode steps are prepared by vLLM: %s", reason or "on another rank")
        return None
    width = 1 + getattr(runner, "num_spec_tokens", 0)
    most = min(MOST // width, runner.scheduler_config.max_num_seqs)
    if runner.device.type != "cuda":
        return kind(runner, model, range(1, most + 1))
    captured = runner.compilation_config.cudagraph_capture_sizes or ()  # in tokens
    sizes = sorted({size // width for size in captured if 0 < size // width <= most})
    if not sizes:
        return None
    began, steps, record = time.monotonic(), kind(runner, model, sizes), GraphRecorder(weak_ref_tensor)
    made, because = on_all_ranks(lambda: steps.capture(record), lambda here: bool(least_of_ranks(here)))
    if not made:
        logger.warning("kimi-k2: decode steps are prepared by vLLM: no graph of them: %s", because)
        return None
    torch.cuda.synchronize()
    logger.info(
        "kimi-k2: decode steps of up to %d requests follow each other on the GPU: %d sizes, %.2f GiB, %.1f s",
        sizes[-1], len(sizes), record.held() / 2**30, time.monotonic() - began,
    )  # fmt: skip
    return steps
