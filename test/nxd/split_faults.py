"""Faults in flash decoding and sequence parallelism; the cases are those of test_splits, executed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import environment
from faults import Case, Fault, edited, too_far
from harness import plain_model
from split_worker import CASES

attention, flash_decoding, modeling, kv_cache = (
    environment.contrib(name) for name in ("attention", "flash_decoding", "modeling_kimi_k2", "kv_cache")
)
A, C = attention.KimiK2Attention, kv_cache.LatentKVCacheManager
GROUPS, LINES, PAIR, SEQUENCE = "flash TP4 in groups of 2", "flash part of the lines", "flash TP2", "sequence TP2xEP2"
FAULTS: dict[str, Fault] = {
    "ranks' sums not weighed": (PAIR, lambda: edited(
        attention, "combine", "(logsumexp - total).exp()", "1.0")),
    "weighed by the rank's own scores": (PAIR, lambda: edited(
        attention, "combine", "_gathered(logsumexp, 3).logsumexp(dim=3, keepdim=True)", "logsumexp")),
    "largest score for the log-sum-exp": (PAIR, lambda: edited(
        A, "forward", "both.logsumexp(dim=-1, keepdim=True)", "both.amax(dim=-1, keepdim=True)")),
    "every rank counts the step's own token": (PAIR, lambda: edited(
        A, "forward", "present = self._masked(present, active_mask)", "pass")),
    "prompt cut into pieces, not round the ranks": (PAIR, lambda: edited(
        flash_decoding, "every_nth", "first + torch.remainder(rank, ranks).to(first.dtype)",
        "first // ranks + count // ranks * torch.remainder(rank, ranks).to(first.dtype)")),
    "rank among all for the rank in its group": (GROUPS, lambda: edited(
        flash_decoding, "every_nth", "torch.remainder(rank, ranks)", "rank")),
    "slot of the whole cache": (PAIR, lambda: edited(
        kv_cache, "slots_to_write", "torch.div(position_ids, ranks, rounding_mode=\"floor\")", "position_ids")),
    "every rank writes the step's token": (PAIR, lambda: edited(
        kv_cache, "slots_to_write", "owned.to(torch.bool)", "torch.ones_like(owned, dtype=torch.bool)")),
    "lines that take no part are written": (LINES, lambda: edited(
        kv_cache, "slots_to_write", "(seq_ids >= 0).reshape(-1, 1)", "(seq_ids >= -1).reshape(-1, 1)")),
    "what is not written goes to the bucket's last slot": (LINES, lambda: edited(
        C, "update_kv_by_layer_id", "ranks, caches[0].shape[2]", "ranks, seq_len")),
    "heads returned to other ranks": (PAIR, lambda: edited(
        attention, "group_heads", "_gathered(heads, 1)", "_gathered(heads, 1).flip(1)")),
    "queries without their rotated part": (PAIR, lambda: edited(
        A, "forward", "torch.cat((q_latent, q_rope), dim=-1)", "torch.cat((q_latent, 0 * q_rope), dim=-1)")),
    "experts take parts of the sequence for tensor parallel": (SEQUENCE, lambda: edited(
        modeling, "make_moe", "sequence_parallel_enabled=neuron.sequence_parallel_enabled",
        "sequence_parallel_enabled=False")),
    "attention within a rank's part": (SEQUENCE, lambda: edited(
        A, "forward", "gather_from_sequence_parallel_region(hidden_states, 1)",
        "hidden_states.repeat(1, position_ids.shape[1] // hidden_states.shape[1], 1)")),
    "dense layer within a rank's part": (SEQUENCE, lambda: edited(
        modeling.KimiK2MLP, "forward", "gather_from_sequence_parallel_region(hidden_states, 1)",
        "hidden_states.repeat(1, 4, 1)")),
}  # fmt: skip


def cases(checkpoint: Path) -> dict[str, Case]:
    """test_splits' executed cases."""
    model = plain_model(checkpoint)

    def seen(name: str) -> list[str]:
        return too_far(name, CASES[name](str(checkpoint), model))

    return {name: partial(seen, name) for name in CASES}
