"""Work beside other work where there is no second stream."""

from __future__ import annotations

import torch

from kimi_k2.ops.streams import beside


def test_one_after_the_other_without_a_gpu() -> None:
    done: list[str] = []

    def aside() -> torch.Tensor:
        done.append("aside")
        return torch.ones(2)

    result, other = beside(aside, lambda: done.append("here"), torch.device("cpu"))
    assert (result.tolist(), other, done) == ([1, 1], None, ["aside", "here"])
