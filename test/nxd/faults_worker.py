"""Put the faults of a table into the class one at a time, and write down which checks see each.

python faults_worker.py TABLE CHECKPOINT OUTPUT [NAME...]     (TABLE: a key of test_mutations.TABLES)
python faults_worker.py TABLE...                              (only makes each fault: is what it replaces still there?)
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from unittest import mock

import executed_worker  # noqa: F401  (prepares NxD; before anything that imports it)
import torch
from faults import Case


def seen_by(case: Case) -> list[str]:
    """The failing checks; what stops the run is seen too."""
    try:
        return case()
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:80]}"]


@torch.inference_mode()
def main() -> None:
    logging.disable(logging.WARNING)
    if all(word.endswith("_faults") for word in sys.argv[1:]):
        for word in sys.argv[1:]:
            for _, make in importlib.import_module(word).FAULTS.values():
                make()
        return
    name, checkpoint, output, *chosen = sys.argv[1:]
    module = importlib.import_module(name)
    cases = module.cases(Path(checkpoint))
    faults = {fault: module.FAULTS[fault] for fault in chosen or module.FAULTS}
    table = {f"none: {case}": seen_by(cases[case]) for case in sorted({case for case, _ in faults.values()})}
    for fault, (case, make) in faults.items():
        owner, attribute, made = make()
        with mock.patch.object(owner, attribute, made):
            table[fault] = seen_by(cases[case])
        print(f"{fault}: {table[fault]}", flush=True)
        torch.save(table, output)


if __name__ == "__main__":
    main()
