"""For `worker_extension_cls` of vLLM: of two ranks, the second cannot capture the third size of steps with prompts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.parallel_state import get_tp_group

from kimi_k2.engine.graphs import GraphRecorder

REFUSED = 10  # of the pieces in their order: the second of the third size, of three layers

record, counted = GraphRecorder.__call__, Counter[str]()


def refusing(self: GraphRecorder, work: Any) -> Any:
    """The first rank has by then captured sums that the second has not."""
    counted["pieces"] += 1

    def broken() -> Any:
        work()
        raise RuntimeError("refused by the second rank")

    refuses = counted["pieces"] == REFUSED and get_tp_group().rank_in_group == 1
    return record(self, broken if refuses else work)


GraphRecorder.__call__ = refusing  # type: ignore[method-assign]


class Extension:
    """Adds nothing to vLLM's worker, which imports this module for it."""
