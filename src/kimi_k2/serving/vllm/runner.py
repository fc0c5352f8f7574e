"""vLLM's first model runner: buffers that steps of ours fill, and records, kept as it would keep them itself.

What the scheduler says of a step is read here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from kimi_k2.serving.vllm.adapter import Deployment, ExecuteModelState, SchedulerOutput, set_forward_context

# What the scheduler may say of a step that needs nothing done but its decodes; of all else it must be empty.
EXPECTED = {
    "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens", "num_common_prefix_blocks",
    "has_structured_output_requests", "pending_structured_output_tokens",
}  # fmt: skip
OF_DRAFTS = {"scheduled_spec_decode_tokens", "num_spec_tokens_to_schedule"}
# What `sample_tokens` of vLLM's runner takes from `execute_model`.
STATE = (
    "scheduler_output", "logits", "spec_decode_metadata", "spec_decode_common_attn_metadata", "hidden_states",
    "sample_hidden_states", "aux_hidden_states", "ec_connector_output", "cudagraph_stats", "slot_mappings",
)  # fmt: skip


@dataclass(frozen=True)
class Buffers:
    """The runner's on its device, of a batch's first requests.

    Attributes:
        ids: int32 [new tokens].
        positions: int64 [new tokens].
        slots: int64 [new tokens], where their entries go.
        seq_lens: int32 [requests], with the new tokens.
        pages: int32 [requests, pages].
        discarded: bool [requests], of whose samples nothing is kept.
        page: tokens of a page.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    pages: Tensor
    discarded: Tensor
    page: int


class Runner:
    """vLLM's first model runner, whose decode steps are ours.

    Args:
        worker: of vLLM's, that has it; its cache is in place.

    Attributes:
        of: vLLM's object.
        it: its deployment.
        width: new tokens of each request.
    """

    def __init__(self, worker: Any) -> None:
        self.worker, self.of, self._second = worker, worker.model_runner, worker.use_v2_model_runner
        self.it, self.width = Deployment(self.of.vllm_config), 1 + getattr(self.of, "num_spec_tokens", 0)
        expected = EXPECTED | (OF_DRAFTS if self.width > 1 else set())
        self._others = [field.name for field in fields(SchedulerOutput) if field.name not in expected]

    @property
    def on_gpu(self) -> bool:
        """Whether its device is one."""
        return bool(self.of.device.type == "cuda")

    def against(self, mode: str, page: int) -> str | None:
        """Why it is to prepare all steps itself; None if they can be ours.

        Args:
            mode: of vLLM's CUDA graphs.
            page: slots a page of the cache.
        """
        table = self.of.input_batch.block_table[0]
        for reason, holds in (
            ("its second model runner", self._second),
            ("what its runner hands to sampling has changed", ExecuteModelState._fields != STATE),
            ("prompts as embeddings", bool(getattr(self.of, "enable_prompt_embeds", False))),
            ("several caches", len(self.of.kv_cache_config.kv_cache_groups) != 1),
            (f"pages of {table.block_size} tokens in parts of {page}", table.block_size != page),
            (f"cudagraph_mode {mode}", self.on_gpu and not mode.startswith("FULL")),
        ):
            if holds:
                return reason
        return None

    def buffers(self, requests: int) -> Buffers:
        """Of so many."""
        of, table, rows = self.of, self.of.input_batch.block_table[0], requests * self.width
        return Buffers(
            of.input_ids.gpu[:rows], of.positions[:rows], table.slot_mapping.gpu[:rows], of.seq_lens[:requests],
            table.block_table.gpu[:requests], of.discard_request_mask.gpu[:requests], table.block_size,
        )  # fmt: skip

    def empty(self) -> None:
        """Have the batch be rows of no sequence, of which nothing is stored."""
        self.of.seq_lens.zero_()
        self.of.optimistic_seq_lens_cpu.zero_()

    def context(self, metadata: Any, tokens: int) -> AbstractContextManager[None]:
        """In which vLLM runs a model over so many new tokens."""
        context: AbstractContextManager[None] = set_forward_context(metadata, self.of.vllm_config, num_tokens=tokens)
        return context

    def rows(self, scheduled: Any, most: int) -> list[int] | None:
        """Where in the batch each of a step's requests is, `most` at most; None where the runner must prepare the step.

        Else the step has the batch's requests, `width` new tokens of each, and nothing else is to be done.
        """
        count, cached = self.of.input_batch.num_reqs, scheduled.scheduled_cached_reqs
        if not 0 < count <= most or len(cached.req_ids) != count or cached.resumed_req_ids:
            return None
        if scheduled.total_num_scheduled_tokens != count * self.width:
            return None
        busy = self.of.execute_model_state is not None or self.of.num_prompt_logprobs
        if busy or any(getattr(scheduled, name) for name in self._others):
            return None
        return self._carried_on(scheduled, cached, count)

    def _carried_on(self, scheduled: Any, cached: Any, count: int) -> list[int] | None:
        """`rows`, where each request's new tokens follow from the step before."""
        batch = self.of.input_batch
        # The tokens sampled last are still on the GPU, by the order of their own step.
        if batch.prev_sampled_token_ids is not None and batch.prev_req_id_to_index != batch.req_id_to_index:
            return None
        lengths, rows = self.of.optimistic_seq_lens_cpu[:count].tolist(), []
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            row, state = batch.req_id_to_index.get(request), self.of.requests.get(request)
            # The step before ended with this request's newest token, and nothing of it was taken back. A prompt's last
            # token is vLLM's: the runner still discards what the prompt's rows sample.
            if row is None or not state.num_prompt_tokens <= computed == lengths[row] == state.num_tokens - 1:
                return None
            rows.append(row)
        return rows

    def advance(self, scheduled: Any, rows: Sequence[int]) -> Tensor | None:
        """Put a step's tokens and pages into the buffers, and its requests into the records."""
        of, batch, cached = self.of, self.of.input_batch, scheduled.scheduled_cached_reqs
        count, event = len(rows), of.prepare_inputs_event
        if event is not None:
            event.synchronize()  # copies to the GPU have read what is written here
        grown = False
        for row, request, computed, blocks in zip(
            rows, cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            state = of.requests[request]
            state.num_computed_tokens = computed
            batch.num_computed_tokens_cpu[row] = computed
            if blocks is not None:
                for block_ids, new in zip(state.block_ids, blocks, strict=True):
                    block_ids.extend(new)
                batch.block_table.append_row(blocks, row)
                grown = True
        batch.refresh_metadata()
        of.optimistic_seq_lens_cpu[:count] += 1
        if grown:
            batch.block_table.commit_block_table(count)
        sampled = batch.prev_sampled_token_ids
        if sampled is None:
            of.input_ids.np[:count] = batch.token_ids_cpu[range(count), batch.num_computed_tokens_cpu[:count]]
            of.input_ids.copy_to_gpu(count)
        else:
            of.input_ids.gpu[:count].copy_(sampled[:count, 0], non_blocking=True)
        if event is not None and (grown or sampled is None):
            event.record()
        return None

    def leave(self, scheduled: Any, logits: Tensor, hidden: Tensor, aux: Sequence[Tensor] = (), **others: Any) -> None:
        """What a step has made, for the runner's `sample_tokens`; `aux` is what a draft's head wants."""
        state = {
            "scheduler_output": scheduled, "logits": logits, "hidden_states": hidden, "sample_hidden_states": hidden,
            "aux_hidden_states": list(aux) or None,
        }  # fmt: skip
        self.of.execute_model_state = ExecuteModelState(**dict.fromkeys(STATE) | state | others)
        self.of.kv_connector_output = None
