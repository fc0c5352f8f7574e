"""Faults put into flash decoding and sequence parallelism one at a time, each with the executed case that sees it.

python split_mutations_worker.py CHECKPOINT OUTPUT [NAME...]

The cases are split_worker.py's; a fault is seen if its logits differ from the plain model's by more than 2e-5.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import environment
import torch
from harness import plain_model
from mutations_worker import Patch, edited
from split_worker import CASES

attention, modeling, kv_cache = (environment.contrib(name) for name in ("attention", "modeling_kimi_k2", "kv_cache"))
A, C = attention.KimiK2Attention, kv_cache.LatentKVCacheManager
GROUPS, LINES, PAIR, SEQUENCE = "flash TP4 in groups of 2", "flash part of the lines", "flash TP2", "sequence TP2xEP2"
MUTATIONS: dict[str, tuple[str, Callable[[], Patch]]] = {
    "ranks' sums not weighed": (PAIR, lambda: edited(
        attention, "combine", "(logsumexp - total).exp()", "1.0")),
    "weighed by the rank's own scores": (PAIR, lambda: edited(
        attention, "combine", "_gathered(logsumexp, 3).logsumexp(dim=3, keepdim=True)", "logsumexp")),
    "largest score for the log-sum-exp": (PAIR, lambda: edited(
        A, "forward", "both.logsumexp(dim=-1, keepdim=True)", "both.amax(dim=-1, keepdim=True)")),
    "every rank counts the step's own token": (PAIR, lambda: edited(
        A, "forward", "own = self._masked(own, active_mask)", "pass")),
    "prompt cut into pieces, not round the ranks": (PAIR, lambda: edited(
        kv_cache, "own_positions", "first + torch.remainder(rank, ranks).to(first.dtype)",
        "first // ranks + entries.shape[2] // ranks * torch.remainder(rank, ranks).to(first.dtype)")),
    "rank among all for the rank in its group": (GROUPS, lambda: edited(
        kv_cache, "own_positions", "torch.remainder(rank, ranks)", "rank")),
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


@torch.inference_mode()
def main() -> None:
    logging.disable(logging.WARNING)
    checkpoint, output, *names = sys.argv[1:]
    model = plain_model(Path(checkpoint))
    table = {}
    for case in sorted({case for case, _ in MUTATIONS.values()}) if not names else []:
        table[f"none: {case}"] = CASES[case](checkpoint, model)
    for name in names or MUTATIONS:
        case, make = MUTATIONS[name]
        owner, attribute, made = make()
        with mock.patch.object(owner, attribute, made):
            try:
                table[name] = CASES[case](checkpoint, model)
            except Exception as error:  # a fault that stops the run is seen, too
                print(f"{name}: {error!r}", flush=True)
                table[name] = float("inf")
        print(f"{name}: {table[name]:.1e}", flush=True)
        torch.save(table, output)


if __name__ == "__main__":
    main()
