"""Runs the neuron backend's steps on the NxDI model in CPU mode; the job is that of test/nxd/cpu_worker.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "nxd"))
import cpu_worker
import torch

from kimi_k2.bench.backend import neuron_steps


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    app = cpu_worker.build(job)
    torch.save([torch.stack(list(neuron_steps(app, job["prompts"], job["new_tokens"])), dim=1)], job["output"])


if __name__ == "__main__":
    main()
