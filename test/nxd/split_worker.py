"""Flash decoding and sequence parallelism on executed float32 graphs, case by case; distances to the plain model.

python split_worker.py CHECKPOINT OUTPUT [CASE...]
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import executed_worker
import torch
from harness import expected_logits, plain_model, sequences
from modes_worker import decode, prefill
from splits import LAYOUTS, LINES, arguments, case_of
from steps import run


def build(checkpoint: str, name: str, batch: int = 4, **options: Any) -> Any:
    """An application on executed graphs."""
    app = executed_worker.build({"checkpoint": checkpoint, "neuron_config": arguments(name, batch, **options)})
    executed_worker.load(app)
    return app


def layout(checkpoint: str, model: Any, name: str) -> float:
    """Prompts of four lengths and 16 steps; largest difference of the logits."""
    case = case_of(name, sequences(4, 512))
    logits = run(build(checkpoint, name), case["prompts"], case["forced"], case.get("arrival"))
    return float((logits - expected_logits(model, case)).abs().max())


def part_of_the_lines(checkpoint: str, model: Any, name: str) -> float:
    """Steps of short lines in a small bucket beside a long one that must keep its cache, then of all."""
    lengths: dict[str, Any] = dict.fromkeys(("seq_len", "n_positions", "max_context_length"), 512)
    lengths |= {"context_encoding_buckets": [32, 512], "token_generation_buckets": [32, 512]}
    app = build(checkpoint, name, **LINES, enable_bucketing=True, **lengths)
    rows = torch.randint(0, 512, (4, 340), generator=torch.Generator().manual_seed(3)).tolist()
    at, worst = [300, 9, 20, 13], 0.0
    for line in (2, 0, 3, 1):
        prefill(app, rows[line][: at[line]], line)
    for lines in ([1], [1, 2], [3, 1], [0, 1, 2, 3], [0], [2, 0, 3], [0, 1, 2, 3]):
        out = decode(app, [[rows[n][at[n]]] for n in lines], [at[n] for n in lines], lines).logits[:, -1]
        for found, n in zip(out, lines, strict=True):
            at[n] += 1
            worst = max(worst, float((found - model(torch.tensor([rows[n][: at[n]]]))[0, -1]).abs().max()))
    steps = {bucket for stage, bucket in app.traced_model.nxd_model.calls if stage.startswith("token")}
    assert steps == {32, 512}, steps
    return worst


def several_tokens(checkpoint: str, model: Any, name: str) -> float:
    """Four tokens at once, also over the positions of refused drafts."""
    app = build(checkpoint, name, 1, enable_bucketing=False, speculation_length=4)
    (row, drafts), worst = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(3)).tolist(), 0.0
    at = 11
    prefill(app, row[:11])
    for keep in (4, 1, 2, 4):
        step = row[at : at + keep] + drafts[keep:4]
        out = decode(app, [step], [at], [0]).logits[0]
        worst = max(worst, float((out - model(torch.tensor([row[:at] + step]))[0, at : at + 4]).abs().max()))
        at += keep
    return worst


CASES: dict[str, Callable[[str, Any], float]] = {
    **{name: partial(layout, name=name) for name in LAYOUTS},
    "flash part of the lines": partial(part_of_the_lines, name="flash TP2"),
    "sequence part of the lines": partial(part_of_the_lines, name="sequence TP2"),
    "flash several tokens": partial(several_tokens, name="flash TP4"),
    "sequence several tokens": partial(several_tokens, name="sequence TP2"),
}


@torch.inference_mode()
def main() -> None:
    logging.disable(logging.WARNING)
    checkpoint, output, *chosen = sys.argv[1:]
    model = plain_model(Path(checkpoint))
    found = {}
    for name in chosen or CASES:
        found[name] = CASES[name](checkpoint, model)
        print(f"{name}: {found[name]:.1e}", flush=True)
        torch.save(found, output)


if __name__ == "__main__":
    main()
