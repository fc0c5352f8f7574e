"""The passes of vLLM's drafter behind a verification of ours, in one CUDA graph a size.

vLLM replays its head's pieces and prepares each pass on the host, which for few requests takes longer than the passes.
What is recorded is vLLM's own `propose`, with its head and its attention, over buffers that stay in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kimi_k2.engine.graphs import Recorded, Recorder
from kimi_k2.serving.vllm.adapter import CUDAGraphMode

# Attentions of a head on a GPU whose metadata takes nothing of the host but sizes.
ATTENTIONS = {"FLASH_ATTN", "FLASH_ATTN_MLA"}
# What of a drafter would have it do something else, by its attribute.
OTHERWISE = (
    "needs_extra_input_slots", "uses_mrope", "parallel_drafting", "use_heterogeneous_vocab", "constant_draft_positions",
    "_enable_probabilistic_draft_probs", "_share_mtp_indices",
)  # fmt: skip


class DraftPasses:
    """Those behind the steps of a `VerifySteps`.

    Args:
        steps: whose buffers are read, and whose runner gets its drafts from here where a step was one of them.
    """

    def __init__(self, steps: Any) -> None:
        self.steps, self.runner, self.drafter = steps, steps.runner, steps.runner.drafter
        most, device = steps.sizes[-1], steps.lengths.device
        self.next = torch.zeros(most, dtype=torch.int32, device=device)
        self.accepted = torch.full_like(self.next, steps.width)
        self._graphs: dict[int, Recorded] = {}
        self._behind: tuple[Any, int, Sequence[Tensor]] = (None, 0, ())
        self._stock = self.runner.propose_draft_token_ids
        self.runner.propose_draft_token_ids = self.propose

    def capture(self, size: int, aux: Sequence[Tensor], record: Recorder) -> Recorded:
        """The graph behind a step of `size` requests, which makes `aux`."""
        self.work(size, aux)  # builds kernels
        self._graphs[size] = record(lambda: (self.work(size, aux),))
        return self._graphs[size]

    def close(self) -> None:
        """Give vLLM its drafter back."""
        for graph in self._graphs.values():
            graph.reset()
        del self.runner.propose_draft_token_ids

    def follow(self, scheduled: Any, size: int, aux: Sequence[Tensor]) -> None:
        """A step of `size` requests was just launched."""
        self._behind = scheduled, size, aux

    def propose(self, scheduled: Any, sampled: Any, *args: Any) -> Any:
        """As vLLM's runner's `propose_draft_token_ids`."""
        runner, drafter, (behind, size, aux) = self.runner, self.drafter, self._behind
        self._behind = (None, 0, ())
        if scheduled is not behind:
            return self._stock(scheduled, sampled, *args)
        runner._draft_probs = runner._draft_prob_req_ids = None
        following, accepted = drafter.prepare_next_token_ids_padded(
            sampled, runner.requests, runner.input_batch, runner.discard_request_mask.gpu
        )
        runner._copy_valid_sampled_token_count(following, accepted)
        count = len(following)
        self.next[:count].copy_(following)
        self.accepted[:count].copy_(accepted)
        if size > count:
            self.accepted[count:size].fill_(self.steps.width)
        graph = self._graphs.get(size)
        if graph is None:
            return self.work(size, aux)[:count]
        graph.replay()
        return graph.made[0][:count].clone()  # while the host reads it, another step may have begun

    def work(self, size: int, aux: Sequence[Tensor]) -> Tensor:
        """Drafted tokens int64 [size, drafts], launch by launch."""
        runner, drafter, steps = self.runner, self.drafter, self.steps
        common = steps.common(size, drafter.max_model_len)
        common.seq_lens = common.seq_lens.clone()  # is counted on
        common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound.clone()
        common, last, rejected = drafter.prepare_inputs_padded(common, steps.metadata(size), self.accepted[:size])
        rows = size * steps.width
        with _launched(drafter):
            drafted: Tensor = drafter.propose(
                num_speculative_tokens=steps.width - 1, target_token_ids=runner.input_ids.gpu[:rows],
                target_positions=runner.positions[:rows], target_hidden_states=torch.cat(tuple(aux), dim=-1),
                next_token_ids=self.next[:size], token_indices_to_sample=last, common_attn_metadata=common,
                sampling_metadata=runner.input_batch.sampling_metadata, num_rejected_tokens_gpu=rejected,
            )  # fmt: skip
        return drafted


@contextmanager
def _launched(drafter: Any) -> Iterator[None]:
    """No graphs of vLLM's meanwhile, which another cannot hold."""
    drafter._determine_batch_execution_and_padding = lambda tokens, **_: (CUDAGraphMode.NONE, tokens, None)
    try:
        yield
    finally:
        del drafter._determine_batch_execution_and_padding


def against_draft_passes(runner: Any) -> str | None:
    """Why vLLM is to run its drafter; None if its passes can be recorded."""
    config, drafter = runner.speculative_config, getattr(runner, "drafter", None)
    groups = getattr(drafter, "draft_attn_groups", [])
    attentions = {group.backend.get_name() for group in groups}
    ranks = config.draft_parallel_config.tensor_parallel_size if drafter is not None and groups else 1
    for reason, holds in (
        (f"drafts by {config.method}", config.method != "eagle3" or not groups),
        ("a head without hidden states of layers", not getattr(runner, "use_aux_hidden_state_outputs", False)),
        ("drafts that are not padded", bool(config.disable_padded_drafter_batch)),
        ("a head of several ranks", ranks > 1),
        *((f"a drafter with {name}", bool(getattr(drafter, name, False))) for name in OTHERWISE),
        (f"a head's attention by {attentions}", runner.device.type == "cuda" and not attentions <= ATTENTIONS),
    ):
        if holds:
            return reason
    return None
