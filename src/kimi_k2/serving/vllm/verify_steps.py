"""Steps that verify drafts, of requests that each have as many, prepared on the GPU; and the drafts that follow.

As `decode_steps`, with one new token and all of its drafts a request. vLLM's rejection sampler runs between two graphs:
that of the target with its inputs, and that of its drafter's passes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch
from kimi_k2.engine.graphs import CANNOT, Recorded, Recorder
from kimi_k2.ops.mla import chunk_slots
from kimi_k2.serving.vllm.adapter import CommonAttentionMetadata, SpecDecodeMetadata
from kimi_k2.serving.vllm.decode_steps import DecodeSteps, Forward
from kimi_k2.serving.vllm.draft_passes import DraftPasses, against_draft_passes

logger = logging.getLogger("vllm.kimi_k2")

# Beside those of `decode_steps`, what the scheduler may say of such a step.
EXPECTED = {"scheduled_spec_decode_tokens", "num_spec_tokens_to_schedule"}
COMMON = {one.name for one in fields(CommonAttentionMetadata)}


class VerifySteps(DecodeSteps):
    """Those of one runner of vLLM's.

    Args:
        runner: vLLM's first model runner with drafts, its cache in place.
        model: ours in it.
        sizes: of batches, in requests, to which others are padded, ascending.
    """

    def __init__(self, runner: Any, model: Any, sizes: Sequence[int]) -> None:
        super().__init__(runner, model, sizes)
        self.width = 1 + runner.num_spec_tokens
        self.others = [name for name in self.others if name not in EXPECTED]
        most, device = self.sizes[-1], runner.seq_lens.device
        pages = runner.input_batch.block_table[0].block_table.gpu.shape[1]
        whole = {"dtype": torch.int32, "device": device}
        self.lengths = torch.full((most,), -1, **whole)
        self.pages, self.row_pages = torch.zeros(most, pages, **whole), torch.zeros(most * self.width, pages, **whole)
        self.row_lens, self.drafted = (
            torch.zeros(most * self.width, **whole),
            torch.zeros(most * (self.width - 1), **whole),
        )
        self.places, self.starts = torch.arange(self.width, device=device), self._every(self.width, most + 1, 0)
        self._starts_on_host, self._prefilling = self.starts.cpu(), torch.zeros(most, dtype=torch.bool)
        self._metadata: dict[int, Any] = {}
        reason = against_draft_passes(runner)
        self.passes = DraftPasses(self) if reason is None else None
        if reason is not None:
            logger.info("kimi-k2: passes of the drafter are prepared by vLLM: %s", reason)

    def _every(self, stride: int, count: int, first: int) -> Tensor:
        """int32 `first`, `first` + `stride` and so on."""
        return torch.arange(count, dtype=torch.int32, device=self.runner.seq_lens.device) * stride + first

    def _more(self, size: int, recorded: Recorded, record: Recorder) -> list[Recorded]:
        if self.passes is None:
            return []
        recorded.replay()  # so that what the passes take is finite
        try:
            return [self.passes.capture(size, recorded.made[2:], record)]
        except CANNOT as error:
            logger.warning("kimi-k2: passes of the drafter are prepared by vLLM: no graph of them: %s", error)
            self.passes.close()
            self.passes = None
            return []

    def rows(self, scheduled: Any) -> list[int] | None:
        """See `DecodeSteps`."""
        runner, batch, cached = self.runner, self.runner.input_batch, scheduled.scheduled_cached_reqs
        count, index, drafts = batch.num_reqs, batch.req_id_to_index, self.width - 1
        if not self.carries_on(scheduled) or getattr(scheduled, "num_spec_tokens_to_schedule", 0) not in (0, drafts):
            return None
        ahead = bool(runner.use_async_scheduling)
        if ahead:
            # What the step before has sampled and drafted is still on the GPU, by the order of its requests.
            sampled, accepted, drafted = (
                batch.prev_sampled_token_ids, runner.valid_sampled_token_count_gpu, runner._draft_token_ids
            )  # fmt: skip
            if sampled is None or accepted is None or batch.prev_req_id_to_index != index:
                return None
            if not isinstance(drafted, Tensor) or drafted.shape != (count, drafts) or len(accepted) != count:
                return None
        rows = []
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            row, state = index.get(request), runner.requests.get(request)
            if row is None or len(scheduled.scheduled_spec_decode_tokens.get(request, ())) != drafts:
                return None
            if computed < batch.num_prompt_tokens[row] or (ahead and state.prev_num_draft_len != drafts):
                return None
            rows.append(row)
        return rows

    def run(self, scheduled: Any, rows: Sequence[int]) -> None:
        """See `DecodeSteps`."""
        runner, batch, count = self.runner, self.runner.input_batch, len(rows)
        size, new = self.size(count), count * self.width
        computed, ids = runner.num_computed_tokens[:count], runner.input_ids.gpu[:new].view(count, self.width)
        with runner.synchronize_input_prep():
            # What this defers corrects lengths on the host, which the next step's schedule overwrites before any use.
            runner._update_states(scheduled)
            if any(blocks is not None for blocks in scheduled.scheduled_cached_reqs.new_block_ids):
                batch.block_table.commit_block_table(count)
            known = batch.num_computed_tokens_cpu_tensor[:count]
            torch.add(known, self.width, out=runner.optimistic_seq_lens_cpu[:count])
            runner.optimistic_seq_lens_cpu[count:].fill_(0)
            runner.discard_request_mask.np[:count] = False  # and on the GPU by the step
            if runner.use_async_scheduling:
                computed += runner.valid_sampled_token_count_gpu
                ids[:, 0].copy_(batch.prev_sampled_token_ids[:count, 0])
                ids[:, 1:].copy_(runner._draft_token_ids)
            else:
                at = batch.num_computed_tokens_cpu[:count]
                for row in range(count):
                    tokens = batch.token_ids_cpu[row, at[row] : at[row] + self.width]
                    runner.input_ids.np[row * self.width : (row + 1) * self.width] = tokens
                runner.input_ids.copy_to_gpu(new)
                computed.copy_(known, non_blocking=True)
            self.lengths[:count].copy_(computed)
            if size > count:
                self.lengths[count:size].fill_(-1)
        hidden, logits, *aux = (self._replays.get(size) or self._work(size))()
        common = self.common(count, int(runner.optimistic_seq_lens_cpu[:count].max()))
        self.leave(
            scheduled, logits[:new], hidden[:new], aux_hidden_states=[one[:new] for one in aux] or None,
            spec_decode_metadata=self.metadata(count), spec_decode_common_attn_metadata=common,
        )  # fmt: skip
        if self.passes is not None:
            self.passes.follow(scheduled, size, aux)

    def metadata(self, count: int) -> Any:
        """What vLLM's rejection sampler is told of `count` requests."""
        if count not in self._metadata:
            width, drafts = self.width, self.width - 1
            every = torch.arange(count * width, dtype=torch.int32, device=self.lengths.device).view(count, width)
            self._metadata[count] = SpecDecodeMetadata(
                draft_token_ids=self.drafted[: count * drafts], num_draft_tokens=[drafts] * count,
                cu_num_draft_tokens=self._every(drafts, count, drafts),
                cu_num_sampled_tokens=self._every(width, count, width),
                target_logits_indices=every[:, :-1].flatten(), bonus_logits_indices=every[:, -1].contiguous(),
                logits_indices=every.flatten(),
            )  # fmt: skip
        return self._metadata[count]

    def common(self, count: int, longest: int) -> Any:
        """What a drafter of vLLM's is told of `count` requests, the longest of which has so many tokens at most."""
        runner, new = self.runner, count * self.width
        slots = runner.input_batch.block_table[0].slot_mapping.gpu[:new]
        said = {
            "query_start_loc": self.starts[: count + 1], "query_start_loc_cpu": self._starts_on_host[: count + 1],
            "seq_lens": runner.seq_lens[:count], "num_reqs": count, "num_actual_tokens": new,
            "max_query_len": self.width, "max_seq_len": longest, "block_table_tensor": self.pages[:count],
            "slot_mapping": slots, "positions": runner.positions[:new],
            "seq_lens_cpu_upper_bound": runner.optimistic_seq_lens_cpu[:count],
            "is_prefilling": self._prefilling[:count],
        }  # fmt: skip
        return CommonAttentionMetadata(**{name: one for name, one in said.items() if name in COMMON})

    def _work(self, size: int) -> Forward:
        """A step of so many requests over the runner's buffers.

        Returns:
            Hidden states [size * width, H], logits [size * width, vocab_size], and the states that a head wants.
        """
        runner, table, width = self.runner, self.runner.input_batch.block_table[0], self.width
        rows = size * width
        ids, positions, seq_lens = runner.input_ids.gpu[:rows], runner.positions[:rows], runner.seq_lens[:size]
        lengths, pages, slots = self.lengths[:size], self.pages[:size], table.slot_mapping.gpu[:rows]
        row_lens, row_pages, drafted = self.row_lens[:rows], self.row_pages[:rows], self.drafted[: size * (width - 1)]
        batch = Batch(rows, rows, row_lens, slots, row_pages)

        def work() -> tuple[Tensor, ...]:
            there = lengths.unsqueeze(1) >= 0
            at = torch.where(there, lengths.unsqueeze(1) + self.places, -1)
            torch.mul(table.block_table.gpu[:size], there, out=pages)  # page 0 is nobody's
            row_pages.copy_(pages.repeat_interleave(width, dim=0, output_size=rows))
            slots.copy_(chunk_slots(at, pages, table.block_size).flatten())
            positions.copy_(at.clamp(min=0).flatten())
            row_lens.copy_((at + 1).flatten())
            seq_lens.copy_(at[:, -1] + 1)
            ids.view(size, width).mul_(there)
            drafted.view(size, width - 1).copy_(ids.view(size, width)[:, 1:])
            runner.discard_request_mask.gpu[:size].zero_()
            return self.through(batch, ids, positions)

        return work
