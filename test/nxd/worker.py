"""A test's job in a process of its own, where NxD is prepared for it: `harness.launch` starts one a rank.

python worker.py JOB    (a file of `launch`: the job's function by module and name, its arguments, the way, the output)
"""

from __future__ import annotations

import importlib
import logging
import sys

import environment
import torch


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    job = torch.load(sys.argv[1], weights_only=False)
    environment.prepare(cpu=job["way"] == "CPU mode")
    found = getattr(importlib.import_module(job["module"]), job["name"])(*job["given"], **job["named"])
    ranks = torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_rank() == 0:
        torch.save(found, job["output"])
    if ranks:
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
