"""Ways of serving: layout, options and script of each, in float32, and what the plain model gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import schedule
import torch
from harness import LAYOUTS, expected_logits, neuron_config, plain_model, sequences

FLASH, SEQUENCE = {"flash_decoding_enabled": True}, {"sequence_parallel_enabled": True}
LINES: dict[str, Any] = {"is_continuous_batching": True, "ctx_batch_size": 1, "tkg_batch_size": 4, "max_batch_size": 4}
PAIRS = FLASH | {"num_cores_per_group": 2}
BUCKETS = {"enable_bucketing": True, "context_encoding_buckets": [16, 48], "token_generation_buckets": [32, 48]}
LONG: dict[str, Any] = {
    **LINES, **dict.fromkeys(("seq_len", "n_positions", "max_context_length"), 512),
    "enable_bucketing": True, "context_encoding_buckets": [32, 512], "token_generation_buckets": [32, 512],
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    **LINES, "is_prefix_caching": True, "is_block_kv_layout": True, "pa_block_size": 8, "pa_num_blocks": 30,
    "enable_bucketing": True, "max_context_length": 24, "context_encoding_buckets": [8, 24], "prefix_buckets": [32],
    "token_generation_buckets": [48],
}  # fmt: skip
GROUPS = {"prefill_rows_at_once": 64}  # four blocks of 16 tokens; the prompts fill many
COMMON = 16  # tokens of a shared prefix


class Case(NamedTuple):
    """One way of serving.

    Attributes:
        layout: key of harness.LAYOUTS.
        options: of KimiK2NeuronConfig.
        script: `steps` of all lines, each prompt into its own line where those are named; steps of `some lines`; with
            `drafts`, of which a part is refused; behind shared `prefixes`.
        batch: sequences.
    """

    layout: str
    options: Mapping[str, Any] = MappingProxyType({})
    script: str = "steps"
    batch: int = 4


CASES: dict[str, Case] = {
    **{layout: Case(layout) for layout in LAYOUTS},
    **{f"one line {layout}": Case(layout, batch=1) for layout in LAYOUTS},
    **{f"arrival {layout}": Case(layout, LINES) for layout in ("TP1", "EP2")},
    **{f"groups {layout}": Case(layout, GROUPS) for layout in ("TP1", "EP2")},
    "flash TP2": Case("TP2", FLASH),
    "flash TP4": Case("TP4", FLASH | BUCKETS),
    "flash TP4 in pairs": Case("TP4", PAIRS | LINES),
    "flash TP2xEP2": Case("TP2xEP2", FLASH | LINES | BUCKETS),
    "sequence TP2": Case("TP2", SEQUENCE),
    "sequence TP4": Case("TP4", SEQUENCE | LINES | BUCKETS),
    "sequence EP2": Case("EP2", SEQUENCE),
    "sequence TP2xEP2": Case("TP2xEP2", SEQUENCE | BUCKETS),
    "both TP2xEP2": Case("TP2xEP2", FLASH | SEQUENCE | LINES),
    "some lines TP2": Case("TP2", LINES, "some lines"),
    "some lines flash TP2": Case("TP2", FLASH | LONG, "some lines"),
    "some lines sequence TP2": Case("TP2", SEQUENCE | LONG, "some lines"),
    "drafts TP1": Case("TP1", {}, "drafts", batch=1),
    "drafts TP2": Case("TP2", {}, "drafts", batch=1),
    "drafts TP2xEP2": Case("TP2xEP2", {}, "drafts", batch=1),
    "drafts TP1, four lines": Case("TP1", {}, "drafts"),
    "drafts TP2xEP2, four lines": Case("TP2xEP2", {}, "drafts"),
    "drafts flash TP4": Case("TP4", FLASH, "drafts", batch=1),
    "drafts sequence TP2": Case("TP2", SEQUENCE, "drafts", batch=1),
    **{f"prefixes {layout}": Case(layout, BLOCKS, "prefixes") for layout in ("TP1", "TP2xEP2")},
    **{f"prefixes flash {layout}": Case(layout, BLOCKS | FLASH, "prefixes") for layout in ("TP2", "TP2xEP2")},
    "prefixes flash TP4 in pairs": Case("TP4", BLOCKS | PAIRS, "prefixes"),
}
WIDTH, ACCEPTED = 4, (4, 3, 1, 2, 4, 1)  # tokens of a step with drafts, and those of each that are kept


def drawn(count: int, length: int) -> list[list[int]]:
    """Random tokens."""
    return torch.randint(0, 512, (count, length), generator=torch.Generator().manual_seed(3)).tolist()


def job(name: str, checkpoint: Path) -> tuple[dict[str, Any], torch.Tensor]:
    """A case as a job of worker.py, and the plain model's logits for it."""
    case = CASES[name]
    tp, ep = LAYOUTS[case.layout]
    options = neuron_config(tp, ep, case.batch, torch_dtype="float32", **case.options)
    made = {"checkpoint": str(checkpoint), "neuron_config": options}
    model = plain_model(checkpoint)
    if case.script == "steps":
        one: dict[str, Any] = sequences(case.batch, 512)
        if "is_continuous_batching" in case.options:
            one["arrival"] = [2, 0, 3, 1]
        return {**made, "cases": [one]}, expected_logits(model, one)
    if case.script == "drafts":
        options["speculation_length"] = WIDTH
        script = schedule.whole_batch(drawn(4, 48)[: case.batch], [11, 7, 5, 13][: case.batch], ACCEPTED, WIDTH)
    elif case.script == "some lines":
        # A long line keeps its cache beside short ones in a small bucket.
        long = case.options.get("seq_len", 0) > 48
        script = schedule.some_lines(drawn(4, 340 if long else 40), [300, 9, 20, 13] if long else [17, 9, 20, 13])
    else:
        rows = drawn(4, 48)
        script = schedule.shared_prefixes([rows[0][:COMMON] + row[COMMON:] for row in rows], COMMON)
    return {**made, "cases": [{"steps": script.steps}]}, schedule.expected(model, script.of)
