"""One rank of NeuronKimiK2ForCausalLM in NxD's CPU mode: prefill, then forced decode steps; logits go to a file.

    WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 python cpu_worker.py job.json

The job names the checkpoint, the neuron config, the sequences (prompts and the tokens to force) and the output file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import environment

environment.prepare()

import prefix  # noqa: E402
import torch  # noqa: E402
from steps import application, run, run_drafted  # noqa: E402


def build(job: dict[str, Any]) -> Any:
    """The application in CPU mode, weights loaded."""
    environment.leave_out(job.get("without", []))
    app = application(job, on_cpu=True, dtype="float32")
    app.to_cpu()
    return app


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    app = build(job)
    results = []
    for case in job["cases"]:
        app.reset()
        if "script" in case:
            results.append(torch.stack(prefix.run(app, case["script"])))
        elif "accepted" in case:
            width = app.neuron_config.speculation_length
            results.append(run_drafted(app, case["prompts"], case["forced"], width, case["accepted"]))
        else:
            results.append(run(app, case["prompts"], case["forced"], case.get("arrival"), case.get("adapters")))
    if torch.distributed.get_rank() == 0:
        torch.save(results, job["output"])
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
