"""The ways of serving of cases.py, in NxD's CPU mode and executed from the lowered graphs, beside transformers' model.

CPU mode runs each rank's own Python. It cannot show what a single traced graph gets wrong for ranks other than 0, nor
what torch_xla makes of an operation: its release 2.9 has lost an all-reduce that was viewed after it had been written
in place. Cases of one number of ranks share their processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import applications
import folder_cpu
import pytest
import torch
from cases import BUCKETS, CASES, Case, Stored, compare, copied, job, model_of, script_of
from harness import SLOW, launch, ranks_of
from safetensors.torch import load_file, save_file
from schedule import DECODE_STEPS

LAYERS = [name for name in CASES if name.startswith(("layers", "operations"))]
SLOW_LAYERS = {"layers int4 TP2, 1", "layers int4 EP2, 4", "layers fp8 TP2, 4", "layers sequence TP2"}
FOLDER = [name for name in CASES if name.startswith("folder")]
# CPU mode and executed graphs share most; some of each are left to the other, which is quicker there or asks for more.
CPU_MODE = [
    name for name in CASES
    if name not in {*LAYERS, *FOLDER} and not name.startswith(("some lines", "drafts flash", "drafts sequence"))
]  # fmt: skip
LEFT_TO_CPU_MODE = ("arrival", "one line", "TP1", "TP2", "kimi", "blockwise", "per_channel")
EXECUTED = ["TP2xEP2"] + [
    name for name in CASES
    if name not in {*LAYERS, *FOLDER} and not name.startswith(LEFT_TO_CPU_MODE) and "four lines" not in name
]  # fmt: skip


def run(
    stored: Stored, cases: dict[str, Case], way: str = "CPU mode", *, copy: Path | None = None, sources: Any = None
) -> dict[str, Any]:
    """Answers of cases, whose logits are transformers'."""
    given = sources or {name: stored(**case.source) for name, case in cases.items()}
    jobs: dict[str, Any] = {name: job(case, given[name]) for name, case in cases.items()}
    for name, case in cases.items():
        if way == "CPU mode" and case.script != "prefixes":  # it masks whole lengths, whatever the bucket
            for option in BUCKETS:
                jobs[name]["neuron_config"].pop(option, None)
    ranks = max(ranks_of(case.layout) for case in cases.values())
    limits: dict[str, Any] = {"ranks": ranks, "way": way, "timeout": 300 + 200 * len(cases)}
    found: dict[str, Any] = (
        launch(folder_cpu.answers, str(copy), jobs, **limits) if copy else launch(applications.answers, jobs, **limits)
    )
    for name, case in cases.items():
        compare(f"{name}, {found[name]['kernels']}", found[name], jobs[name]["scripts"][0], model_of(case, given[name]))
    return found


def of(names: Iterable[str], ranks: int) -> dict[str, Case]:
    """Cases of a number of ranks."""
    return {name: CASES[name] for name in names if ranks_of(CASES[name].layout) == ranks}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cpu_mode(stored: Stored, ranks: int) -> None:
    run(stored, of(CPU_MODE, ranks))


def test_executed(stored: Stored) -> None:
    """Prefixes are read from the cache, or computed again where they fit into the bucket: NxDI chooses."""
    found = run(stored, {name: CASES[name] for name in EXECUTED}, "executed")
    for name in EXECUTED:
        calls = {(stage, at if isinstance(at, int) else tuple(at)) for stage, at in found[name]["calls"]}
        if name.startswith("prefixes"):
            prefills = {bucket for stage, bucket in calls if stage == "context_encoding_model"}
            assert prefills == {(24, 0), (8, 0), (8, 32), (24, 32)}, name
        if name.startswith("drafts"):
            assert {stage for stage, _ in calls} == {"context_encoding_model", "speculation_model"}, name
        if name.startswith(("some lines flash", "some lines sequence")):
            assert {bucket for stage, bucket in calls if stage.startswith("token")} == {32, 512}, name


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in SLOW_LAYERS else ()) for name in LAYERS])
def test_layers(stored: Stored, name: str) -> None:
    """Both MoE layers in one call of the kernel; or operations on its tiles, where it does not run."""
    found = run(stored, {name: CASES[name]})
    assert found[name]["kernels"] == ({} if "operations" in name else {"decode_layers": DECODE_STEPS})


@pytest.mark.parametrize("ranks", [2, 4])
def test_folder(stored: Stored, tmp_path: Path, ranks: int) -> None:
    """A copy of contrib/models' folder, without `kimi_k2`; its own tests run it on one rank (test_readme_steps.py)."""
    run(stored, of(FOLDER, ranks), copy=copied(tmp_path))


@pytest.mark.parametrize("layouts", [("TP2", "EP2"), ("TP2xEP2",)])
def test_prefill_of_512_tokens_to_the_same_8_experts_drops_none(stored: Stored, layouts: tuple[str, ...]) -> None:
    source = {"form": "bf16", "num_experts_per_tok": 8, "seed": 17}
    directory = stored(**source)
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor[:8] += 10.0
        save_file(tensors, path, {"format": "pt"})
    options = {"seq_len": 520, "blockwise_matmul_config": {"block_size": 128}}
    cases = {layout: Case(layout, options, "512 tokens", 1, source) for layout in layouts}
    model, chosen = model_of(cases[layouts[0]], directory), list[torch.Tensor]()
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *args: chosen.append(args[2][0]))
    script_of(cases[layouts[0]]).expected(model)
    assert set(chosen[0].unique().tolist()) == set(range(8))
    run(stored, cases)
