"""vLLM's first model runner with drafts, and its drafter, whose passes follow a step of ours that verifies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kimi_k2.serving.vllm.adapter import CommonAttentionMetadata, CUDAGraphMode, SpecDecodeMetadata
from kimi_k2.serving.vllm.runner import Runner

# Attentions of a head on a GPU whose metadata takes nothing of the host but sizes.
ATTENTIONS = {"FLASH_ATTN", "FLASH_ATTN_MLA"}
# What of a drafter would have it do something else, by its attribute.
OTHERWISE = (
    "needs_extra_input_slots", "uses_mrope", "parallel_drafting", "use_heterogeneous_vocab", "constant_draft_positions",
    "_enable_probabilistic_draft_probs", "_share_mtp_indices",
)  # fmt: skip


class VerifyingRunner(Runner):
    """Likewise with drafts, as many of each request.

    Attributes:
        pages: int32 [requests, pages], of the step that runs; rows of nobody are zeros.
        drafted: int32 [requests * drafts], the step's drafts.
    """

    def __init__(self, worker: Any, most: int) -> None:
        super().__init__(worker)
        whole = {"dtype": torch.int32, "device": self.of.seq_lens.device}
        self.pages = torch.zeros(most, self.of.input_batch.block_table[0].block_table.gpu.shape[1], **whole)
        self.drafted = torch.zeros(most * (self.width - 1), **whole)
        self._starts = self._every(self.width, most + 1, 0)
        self._starts_on_host, self._prefilling = self._starts.cpu(), torch.zeros(most, dtype=torch.bool)
        self._metadata: dict[int, Any] = {}
        self._known = {field.name for field in fields(CommonAttentionMetadata)}

    def _every(self, stride: int, count: int, first: int) -> Tensor:
        """int32 `first`, `first` + `stride` and so on."""
        return torch.arange(count, dtype=torch.int32, device=self.pages.device) * stride + first

    def _carried_on(self, scheduled: Any, cached: Any, count: int) -> list[int] | None:
        of, batch, drafts = self.of, self.of.input_batch, self.width - 1
        if getattr(scheduled, "num_spec_tokens_to_schedule", 0) not in (0, drafts):
            return None
        ahead, index = bool(of.use_async_scheduling), batch.req_id_to_index
        if ahead:
            # What the step before has sampled and drafted is still on the GPU, by the order of its requests.
            sampled, accepted, drafted = (
                batch.prev_sampled_token_ids, of.valid_sampled_token_count_gpu, of._draft_token_ids
            )  # fmt: skip
            if sampled is None or accepted is None or batch.prev_req_id_to_index != index:
                return None
            if not isinstance(drafted, Tensor) or drafted.shape != (count, drafts) or len(accepted) != count:
                return None
        rows = []
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            row, state = index.get(request), of.requests.get(request)
            if row is None or len(scheduled.scheduled_spec_decode_tokens.get(request, ())) != drafts:
                return None
            if computed < batch.num_prompt_tokens[row] or (ahead and state.prev_num_draft_len != drafts):
                return None
            rows.append(row)
        return rows

    def advance(self, scheduled: Any, rows: Sequence[int]) -> Tensor:
        """Also gives int [requests], of each the tokens before the step's."""
        of, batch, count = self.of, self.of.input_batch, len(rows)
        new = count * self.width
        computed: Tensor = of.num_computed_tokens[:count]
        ids = of.input_ids.gpu[:new].view(count, self.width)
        with of.synchronize_input_prep():
            # What this defers corrects lengths on the host, which the next step's schedule overwrites before any use.
            of._update_states(scheduled)
            if any(blocks is not None for blocks in scheduled.scheduled_cached_reqs.new_block_ids):
                batch.block_table.commit_block_table(count)
            known = batch.num_computed_tokens_cpu_tensor[:count]
            torch.add(known, self.width, out=of.optimistic_seq_lens_cpu[:count])
            of.optimistic_seq_lens_cpu[count:].fill_(0)
            of.discard_request_mask.np[:count] = False  # and on the GPU by the step
            if of.use_async_scheduling:
                computed += of.valid_sampled_token_count_gpu
                ids[:, 0].copy_(batch.prev_sampled_token_ids[:count, 0])
                ids[:, 1:].copy_(of._draft_token_ids)
            else:
                at = batch.num_computed_tokens_cpu[:count]
                for row in range(count):
                    tokens = batch.token_ids_cpu[row, at[row] : at[row] + self.width]
                    of.input_ids.np[row * self.width : (row + 1) * self.width] = tokens
                of.input_ids.copy_to_gpu(new)
                computed.copy_(known, non_blocking=True)
        return computed

    def leave(self, scheduled: Any, logits: Tensor, hidden: Tensor, aux: Sequence[Tensor] = (), **others: Any) -> None:
        """With what vLLM's rejection sampler and drafter are told."""
        count = len(logits) // self.width
        common = self._common(count, int(self.of.optimistic_seq_lens_cpu[:count].max()))
        told = {"spec_decode_metadata": self._verified(count), "spec_decode_common_attn_metadata": common}
        super().leave(scheduled, logits, hidden, aux, **told, **others)

    def _verified(self, count: int) -> Any:
        """What the rejection sampler is told of so many requests."""
        if count not in self._metadata:
            width, drafts = self.width, self.width - 1
            every = self._every(1, count * width, 0).view(count, width)
            self._metadata[count] = SpecDecodeMetadata(
                draft_token_ids=self.drafted[: count * drafts], num_draft_tokens=[drafts] * count,
                cu_num_draft_tokens=self._every(drafts, count, drafts),
                cu_num_sampled_tokens=self._every(width, count, width),
                target_logits_indices=every[:, :-1].flatten(), bonus_logits_indices=every[:, -1].contiguous(),
                logits_indices=every.flatten(),
            )  # fmt: skip
        return self._metadata[count]

    def _common(self, count: int, longest: int) -> Any:
        """What the drafter is told of so many requests, the longest of which has so many tokens at most."""
        held = self.buffers(count)
        said = {
            "query_start_loc": self._starts[: count + 1], "query_start_loc_cpu": self._starts_on_host[: count + 1],
            "seq_lens": held.seq_lens, "num_reqs": count, "num_actual_tokens": count * self.width,
            "max_query_len": self.width, "max_seq_len": longest, "block_table_tensor": self.pages[:count],
            "slot_mapping": held.slots, "positions": held.positions,
            "seq_lens_cpu_upper_bound": self.of.optimistic_seq_lens_cpu[:count],
            "is_prefilling": self._prefilling[:count],
        }  # fmt: skip
        return CommonAttentionMetadata(**{name: value for name, value in said.items() if name in self._known})

    def drafts_by(self, propose: Callable[..., Any] | None) -> Any:
        """Have the runner draft by a function, given what its own is given, which is returned; or by its own again."""
        if propose is None:
            del self.of.propose_draft_token_ids
            return None
        stock, self.of.propose_draft_token_ids = self.of.propose_draft_token_ids, propose
        return stock

    def following(self, sampled: Any) -> tuple[Tensor, Tensor]:
        """Of what was sampled each request's last token, and how many of its tokens were taken; in the records too."""
        of = self.of
        of._draft_probs = of._draft_prob_req_ids = None
        following, accepted = of.drafter.prepare_next_token_ids_padded(
            sampled, of.requests, of.input_batch, of.discard_request_mask.gpu
        )
        of._copy_valid_sampled_token_count(following, accepted)
        return following, accepted

    def draft(self, requests: int, aux: Sequence[Tensor], following: Tensor, accepted: Tensor) -> Tensor:
        """Of vLLM's own drafter, int64 [requests, drafts], launch by launch."""
        of, drafter, held = self.of, self.of.drafter, self.buffers(requests)
        common = self._common(requests, drafter.max_model_len)
        common.seq_lens = common.seq_lens.clone()  # is counted on
        common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound.clone()
        common, last, rejected = drafter.prepare_inputs_padded(common, self._verified(requests), accepted)
        with _launched(drafter):
            drafted: Tensor = drafter.propose(
                num_speculative_tokens=self.width - 1, target_token_ids=held.ids, target_positions=held.positions,
                target_hidden_states=torch.cat(tuple(aux), dim=-1), next_token_ids=following,
                token_indices_to_sample=last, common_attn_metadata=common,
                sampling_metadata=of.input_batch.sampling_metadata, num_rejected_tokens_gpu=rejected,
            )  # fmt: skip
        return drafted

    def against_drafts(self) -> str | None:
        """Why vLLM is to run its drafter; None if its passes can be recorded."""
        config, drafter = self.of.speculative_config, getattr(self.of, "drafter", None)
        groups = getattr(drafter, "draft_attn_groups", [])
        attentions = {group.backend.get_name() for group in groups}
        ranks = config.draft_parallel_config.tensor_parallel_size if drafter is not None and groups else 1
        for reason, holds in (
            (f"drafts by {config.method}", config.method != "eagle3" or not groups),
            ("a head without hidden states of layers", not getattr(self.of, "use_aux_hidden_state_outputs", False)),
            ("drafts that are not padded", bool(config.disable_padded_drafter_batch)),
            ("a head of several ranks", ranks > 1),
            *((f"a drafter with {name}", bool(getattr(drafter, name, False))) for name in OTHERWISE),
            (f"a head's attention by {attentions}", self.on_gpu and not attentions <= ATTENTIONS),
        ):
            if holds:
                return reason
        return None


@contextmanager
def _launched(drafter: Any) -> Iterator[None]:
    """No graphs of vLLM's meanwhile, which another cannot hold."""
    drafter._determine_batch_execution_and_padding = lambda tokens, **_: (CUDAGraphMode.NONE, tokens, None)
    try:
        yield
    finally:
        del drafter._determine_batch_execution_and_padding
