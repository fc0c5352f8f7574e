"""The folder of a pull request to NxDI, copied elsewhere and without `kimi_k2`, on a job's cases; one rank.

WORLD_SIZE=2 RANK=0 NXD_CPU_MODE=1 ... python folder_worker.py job.json
python folder_worker.py pytest test/unit    (the folder's own tests)

The file names the copied folder, the output file and jobs of one number of ranks, each with a checkpoint, a neuron
config and cases: `prompts` and `forced`, or the steps of schedule.py.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import folder_cpu
import pytest
import schedule
import torch

from kimi_k2.neuron import cpu, standins

cpu.prepare()


def without_the_package() -> None:
    """`kimi_k2` can no longer be imported; what stands for the SDK's binary modules stays."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "kimi_k2"]:
        if not name.startswith(standins.__name__):
            del sys.modules[name]
    sys.modules["kimi_k2"] = None  # type: ignore[assignment]


def application(job: dict[str, Any]) -> Any:
    """The folder's application, not loaded."""
    src: Any = importlib.import_module("src")
    options = {"on_cpu": True, "torch_dtype": "float32", **job["neuron_config"]}
    config = src.KimiK2InferenceConfig(
        src.KimiK2NeuronConfig(**options), load_config=src.load_kimi_config(job["checkpoint"])
    )
    return src.NeuronKimiK2ForCausalLM(job["checkpoint"], config)


@torch.inference_mode()
def result(app: Any, case: dict[str, Any]) -> torch.Tensor:
    """Logits of a case: [steps, B, vocab], or [rows, vocab] of a script."""
    app.reset()
    if "steps" in case:
        return schedule.run(app, case["steps"])
    if "arrival" in case:  # each into its own cache line
        lines = schedule.Lines(app)
        rows = {row: lines.prefill(row, case["prompts"][row], 0)[0] for row in case["arrival"]}
        found = [torch.stack([rows[row] for row in sorted(rows)])]
    else:
        found = [schedule.prompts(app, case["prompts"])]
    for step in range(len(case["forced"][0])):
        places = [len(prompt) + step for prompt in case["prompts"]]
        out = schedule.decode(app, [[row[step]] for row in case["forced"]], places)
        found.append(out.logits[:, -1])
        sampling = app.neuron_config.on_device_sampling_config
        if sampling is not None and not sampling.do_sample:
            assert torch.equal(out.tokens.flatten(), found[-1].argmax(-1)), "tokens are not the likeliest"
    return torch.stack(found)


def answer(job: dict[str, Any]) -> Any:
    """Logits of a job's cases, or the field by whose name it is refused."""
    try:
        app = application(job)
    except ValueError as error:
        if not hasattr(error, "field"):
            raise
        return error.field
    folder_cpu.load(app)
    return [result(app, case) for case in job["cases"]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    without_the_package()
    if sys.argv[1] == "pytest":
        sys.exit(pytest.main(sys.argv[2:]))
    job = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, job["folder"])
    answers: list[Any] = []
    for one in job["jobs"]:
        try:
            answers.append(answer(one))
        except Exception:
            if "carry on" not in job:
                raise
            answers.append({"crash": traceback.format_exc()})
    if torch.distributed.get_rank() == 0:
        torch.save(answers, job["output"])
    torch.distributed.barrier()
