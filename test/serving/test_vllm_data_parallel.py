"""Two data-parallel ranks that share routed experts, on a CPU: the plain model's tokens, whoever has requests."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from plain_tokens import expected
from torch import Tensor
from vllm_engine import OURS, requests, serve

from kimi_k2.ops.experts import route

needs.engine("vllm")

LAYERS, MOE_LAYERS, RANKS, STEPS = 3, 2, 2, 200


class OnGpu(torch.Tensor):
    """Says that it is there."""

    is_cuda = property(lambda self: True)


class Nccl:
    """vLLM's group of two ranks with the same rows; as NCCL does, it reads the values that follow a tensor's first."""

    rank_in_group = 1

    def all_gatherv(self, tensors: list[Tensor], dim: int, sizes: list[int]) -> list[Tensor]:
        rows = [one.as_strided(one.shape, (one.shape[1], 1), one.storage_offset()) for one in tensors]
        return [torch.cat((one, one), dim) for one in rows]


def test_rows_as_nccl_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain router's experts are a view of all experts' order."""
    from kimi_k2.serving.vllm import ranks

    monkeypatch.setattr(ranks, "get_dp_group", Nccl)
    monkeypatch.setattr(ranks.Exchange, "_sizes", staticmethod(lambda: [5, 5]))
    x = torch.randn(5, 32)
    indices, weights = route(x, torch.randn(16, 32), torch.zeros(16), 8)
    assert not indices.is_contiguous()
    given: list[Tensor] = [one.as_subclass(OnGpu) for one in (x, indices, weights)]
    for found, wanted in zip(ranks.Exchange().gather(given), (x, indices, weights), strict=True):
        assert torch.equal(found, torch.cat((wanted, wanted)))


@pytest.mark.parametrize("experts", [True, False], ids=["shared out", "cut"])
def test_two_ranks(experts: bool, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The second rank's requests come when the first has few left: in between each runs steps for the other's."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    jobs = [requests(seed=31 + rank, count=4) for rank in range(RANKS)]
    for one in jobs[0] + jobs[1]:
        one["new_tokens"] = 32
    for one in jobs[1]:
        one["arrival"] += 45

    def rank(number: int) -> tuple[dict[str, Any], str]:
        environment = {"RANK": number, "RANK_LOCAL": number, "SIZE": RANKS, "MASTER_PORT": port}
        named = {f"VLLM_DP_{name}": str(value) for name, value in environment.items()}
        named["VLLM_DP_MASTER_IP"] = "127.0.0.1"
        out = tmp_path / str(number)
        out.mkdir()
        return serve(
            checkpoints["thinking"], "float32", jobs[number], out, environment=named, steps=STEPS,
            enable_expert_parallel=experts, distributed_executor_backend="uni",
        )  # fmt: skip

    with ThreadPoolExecutor(RANKS) as pool:
        served = list(pool.map(rank, range(RANKS)))
    for job, (answer, log) in zip(jobs, served, strict=True):
        assert OURS in log
        assert answer["tokens"] == expected(checkpoints["thinking"], "float32", job)
        calls = {name: sum(entries.values()) for name, entries in answer["calls"].items()}
        forwards = calls["add_project"] // LAYERS
        assert calls["routed_experts"] == MOE_LAYERS * forwards > 64 * MOE_LAYERS
        assert calls["routed_experts_with_shared"] == calls["next_step"] == 0
    assert served[0][0]["calls"]["routed_experts"] == served[1][0]["calls"]["routed_experts"]
