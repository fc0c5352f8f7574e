"""Every fault of the tables is seen by the case that it is listed with, and the class as it is passes all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import test_lora
import torch
from applications import Answer, answers
from cases import CASES, Case, Stored, far, job, model_of
from faults import FAULTS, patch
from harness import SLOW, TOLERANCE, launch, ranks_of

# Of the models: executed ones are small, and of whole layers the norms' epsilons differ.
SIZES: dict[str, dict[str, Any]] = {
    "class": {"num_hidden_layers": 1, "first_k_dense_replace": 0}, "modes": {"num_hidden_layers": 2},
    "whole layers": {"rms_norm_eps": 1e-3},
}  # fmt: skip


def test_each_fault_still_applies() -> None:
    """A fault replaces a piece of the source, which must be there."""
    for rows in FAULTS.values():
        for faults in rows.values():
            for _, *replaced in faults:
                patch(*replaced)


def seen(answer: Answer, expected: torch.Tensor) -> str:
    """What is wrong with an answer: an error, logits, or the dtypes of modules and of the router's product."""
    if "logits" not in answer:
        return str(answer.get("error", answer)).strip().splitlines()[-1][:200]
    kept = [
        (kind == "torch.float32") == name.endswith("bias") and "inv_freq" not in name
        for name, kind in answer.get("loaded", {}).items()
    ]
    decode = answer["graphs"][-1]["hlo"] if kept else "= f32[1,16] dot("
    if not all(kept) or len(re.findall(r"= f32\[1,16\]\S* dot\(", decode)) != 1:
        return "dtypes"
    return "" if far(answer, expected) <= TOLERANCE else f"logits ({far(answer, expected):.1e})"


@SLOW
@pytest.mark.parametrize(("table", "names"), [
    ("class", [*FAULTS["class"]]), ("modes", [*FAULTS["modes"]]),
    *(("whole layers", [name]) for name in FAULTS["whole layers"]),
])  # fmt: skip
def test_each_fault_is_seen(stored: Stored, tmp_path: Path, table: str, names: list[str]) -> None:
    """In the order of the table; of the class the dtypes too, as it is deployed in BF16."""
    jobs, expected = dict[str, Any](), dict[str, torch.Tensor]()
    for name in names:
        if name == "adapters":
            source = stored(**test_lora.SIZES)
            jobs[name], expected[name] = test_lora.served(
                test_lora.write_all(tmp_path, source), source, Case("EP2", {"decode": "xla"})
            )
            continue
        case = CASES[name]._replace(source={**CASES[name].source, **SIZES[table], "seed": 4})
        source = stored(**case.source)
        jobs[name] = {**job(case, source), "dtypes": table == "class"}
        expected[name] = jobs[name]["scripts"][0].expected(model_of(case, source))
    way, ranks = (
        "CPU mode" if table == "whole layers" else "executed",
        max(ranks_of(CASES[name].layout) for name in names if name in CASES),
    )
    found = launch(answers, jobs, table, ranks=ranks, way=way, timeout=3000)
    wrong = {name: seen(found.pop(name), expected[name]) for name in names}
    assert not any(wrong.values()), wrong
    of = {fault: name for name in names for fault, *_ in FAULTS[table][name]}
    said = {fault: seen(answer, expected[of[fault]]) for fault, answer in found.items()}
    print("\n" + "\n".join(f"{fault}: {what or 'not seen'}" for fault, what in said.items()))
    assert said.keys() == of.keys()
    assert [fault for fault, what in said.items() if not what] == []
