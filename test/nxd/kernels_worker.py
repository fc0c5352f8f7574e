"""cpu_worker.py that also counts the NKI kernels that ran: a file with `logits` of the cases, `kernels` with runs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cpu_worker
import torch
from steps import run

from nki_emulator.launch import Kernel


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    app = cpu_worker.build(job)
    ran: Counter[str] = Counter()
    inner = Kernel.run

    def counted(self: Kernel, *args: Any) -> Any:
        ran[self.__name__] += 1
        return inner(self, *args)

    Kernel.run = counted  # type: ignore[assignment, method-assign]
    logits = []
    for case in job["cases"]:
        app.reset()
        logits.append(run(app, case["prompts"], case["forced"], case.get("arrival"), case.get("adapters")))
    if torch.distributed.get_rank() == 0:
        torch.save({"logits": logits, "kernels": dict(ran)}, job["output"])
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
