"""One of two ranks, over gloo, whose experts vLLM's own balancer moves: layers against the whole plain model's.

Usage: balance_worker.py RANK MODEL MEETING REDUNDANT. vLLM's engine on a CPU has no balancer, and its function that
looks up and counts experts is a kernel for GPUs; that one alone is written again here, as vLLM describes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.distributed.eplb import eplb_state
from vllm.model_executor.layers.fused_moe.router import base_router

from kimi_k2.config import KimiK2Config
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.serving.paged.model import PagedModel
from kimi_k2.serving.vllm.model import KimiK2ForVllm
from kimi_k2.sharding.layout import STORED, Layout

TOKENS, WINDOW, RANKS = 40, 2, 2


def look_up_and_count(
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor,
    **_: Any,
) -> Tensor:
    """Which of an expert's copies serves a token goes by the token's place."""
    place = torch.arange(len(topk_ids))[:, None] * 2654435769 & 0xFFFFFFFF
    found = logical_to_physical_map[topk_ids, place % logical_replica_count[topk_ids]]
    if record_enabled:
        expert_load_view += torch.bincount(found.flatten(), minlength=len(expert_load_view)).int()
    return found


class Event:
    """Stands in for a GPU's."""

    def __init__(self, **_: Any) -> None:
        self.record = self.synchronize = lambda *_: None
        self.elapsed_time = lambda _: 0.0


def ours(directory: Path, rank: int, redundant: int) -> Any:
    """The model as vLLM's engine has it, without caches."""
    config, group = KimiK2Config.from_pretrained(directory), cast(Any, dist.GroupMember.WORLD)
    model: Any = object.__new__(KimiK2ForVllm)
    nn.Module.__init__(model)
    model.paged = PagedModel(
        config, Layout(1, RANKS, target="cuda", experts=STORED), rank, group, cast(Any, [None] * 9), TOKENS,
        torch.float32, torch.device("cpu"), redundant=redundant,
    )  # fmt: skip
    model._let_experts_be_moved()
    return model


def load(model: Any, directory: Path) -> None:
    for file in sorted(directory.glob("*.safetensors")):
        model.load_weights(load_file(file).items())


@torch.inference_mode()
def run(rank: int, directory: Path, meeting: str, redundant: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    group = dist.GroupMember.WORLD
    coordinator = SimpleNamespace(device_group=group, cpu_group=group, world_size=RANKS, rank_in_group=rank)
    for name in ("get_ep_group", "get_eplb_group"):
        vars(eplb_state)[name] = lambda: coordinator
    vars(eplb_state)["get_node_count"] = lambda: 1
    vars(base_router)["eplb_map_to_physical_and_record"] = look_up_and_count
    vars(torch)["Event"] = vars(torch.cuda)["Event"] = Event

    model, whole = ours(directory, rank, redundant), KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    load(model, directory)
    settings = SimpleNamespace(
        window_size=WINDOW, step_interval=4 * WINDOW, use_async=False, policy="default", communicator="torch_nccl",
        log_balancedness=False, enable_migration_batching=False,
    )  # fmt: skip
    parallel = SimpleNamespace(eplb_config=settings, enable_elastic_ep=False, num_ubatches=1)
    state = eplb_state.EplbState(cast(Any, parallel), torch.device("cpu"))
    state.add_model(model, cast(Any, SimpleNamespace(model="tiny", compute_hash=lambda: "tiny")))
    (held,) = state.model_states.values()

    def check() -> None:
        """As the whole model, by each layer; where each row is is known."""
        torch.manual_seed(3)
        for at, (number, place) in enumerate(model.paged.places.items()):
            x, step = torch.randn(TOKENS, whole.config.hidden_size), model.paged.steps[number]
            torch.testing.assert_close(step.reduce(step.feed_forward(x)), whole.model.layers[number].mlp(x))
            rows = held.physical_to_logical_map[at].view(RANKS, -1)[rank]
            assert list(place.held()) == rows.tolist()

    before = held.physical_to_logical_map.clone()
    assert before.shape == (len(model.paged.places), whole.config.n_routed_experts + redundant)
    check()
    counted = held.expert_load_pass.sum(1)
    assert counted.tolist() == [TOKENS * whole.config.num_experts_per_tok] * len(counted)
    for _ in range(WINDOW + 1):  # it begins at three quarters of the interval
        check()
        state.step()
    assert not torch.equal(held.physical_to_logical_map, before)
    check()
    load(model, directory)  # a checkpoint that comes after the move
    check()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
