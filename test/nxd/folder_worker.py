"""The folder of a pull request to NxDI, copied elsewhere and without `kimi_k2`, on a job's cases; one rank.

WORLD_SIZE=2 RANK=0 NXD_CPU_MODE=1 ... python folder_worker.py job.json

The job names the copied folder, the checkpoint, the neuron config, the cases (`prompts` and `forced`, or the steps of
schedule.py) and the output file.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import folder_cpu
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
    found = [schedule.prompts(app, case["prompts"])]
    for step in range(len(case["forced"][0])):
        places = [len(prompt) + step for prompt in case["prompts"]]
        found.append(schedule.decode(app, [[row[step]] for row in case["forced"]], places).logits[:, -1])
    return torch.stack(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    job = json.loads(Path(sys.argv[1]).read_text())
    without_the_package()
    sys.path.insert(0, job["folder"])
    app = application(job)
    folder_cpu.load(app)
    answer = [result(app, case) for case in job["cases"]]
    if torch.distributed.get_rank() == 0:
        torch.save(answer, job["output"])
    torch.distributed.barrier()
