"""Jobs of worker.py beside the logits that are expected, as they are or with the faults of a table put in one by one.

python cases_worker.py job.json    (as worker.py)

The job names `jobs`, a file with what is `expected` of each, and `faults`, a table of faults.FAULTS with the job that
must see each fault. The answer has, of each job or fault, the checks that fail or the error that stops the run.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any
from unittest import mock

import environment
import torch
import worker
from faults import FAULTS, patch
from harness import TOLERANCE


def class_types(job: dict[str, Any]) -> bool:
    """test_deployed_fp8's contract of dtypes: the module in BF16, and the router's product in its graph."""
    app = worker.unloaded(job)
    lowering = environment.contrib("lowering")
    graph = lowering.lower(app, lowering.STAGES[1])
    kept = [
        (kind == "torch.float32") == name.endswith("bias") and "inv_freq" not in name
        for name, kind in worker.loaded_types(app).items()
    ]
    return all(kept) and len(re.findall(r"= f32\[1,16\]\S* dot\(", graph.hlo)) == 1


def outcome(job: dict[str, Any], expected: torch.Tensor, table: str | None) -> dict[str, Any]:
    """Failing checks of a job, its logits' largest difference, and the graphs that were called."""
    failing: list[str] = []
    far, calls = float("nan"), []
    try:
        bfloat16 = {"neuron_config": copy.deepcopy(job["neuron_config"]) | {"torch_dtype": "bfloat16"}}
        if table == "class" and not class_types(copy.deepcopy(job) | bfloat16):
            failing.append("dtypes")
        app = worker.build(copy.deepcopy(job))
        (logits,) = worker.results(app, job["cases"])
        far = float((logits - expected).abs().max())
        if worker.EXECUTED:
            calls = app.traced_model.nxd_model.calls
        if not far <= TOLERANCE:
            failing.append(f"logits ({far:.1e})")
    except Exception as error:
        failing.append(f"{type(error).__name__}: {str(error)[:200]}")
    return {"far": far, "calls": calls, "failing": failing}


@torch.inference_mode()
def answer(given: dict[str, Any]) -> dict[str, Any]:
    """Outcomes by job, and of faults by name."""
    expected, table = torch.load(given["expected"]), given.get("faults")
    found = {name: outcome(job, expected[name], table) for name, job in given["jobs"].items()}
    for name, faults in FAULTS[table].items() if table else ():
        for fault, *replaced in faults if name in given["jobs"] else ():
            with mock.patch.object(*patch(*replaced)):
                found[fault] = outcome(given["jobs"][name], expected[name], table)
            print(f"{fault}: {found[fault]}", flush=True)
    return found


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    environment.serve(answer)
