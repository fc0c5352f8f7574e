"""What NxDI's CPU mode lacks for the folder; nothing of it is needed on a device."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from kimi_k2.neuron import standins


def alone(folder: str) -> None:
    """`src` of the folder can be imported, `kimi_k2` no longer; what stands for the SDK's binary modules stays."""
    for name in [module for module in sys.modules if module.partition(".")[0] == "kimi_k2"]:
        if not name.startswith(standins.__name__):
            del sys.modules[name]
    sys.modules["kimi_k2"] = None  # type: ignore[assignment]
    sys.path.insert(0, folder)


def give_up_groups() -> None:
    """Where the process has had another application, its groups of ranks go."""
    from neuronx_distributed.modules.moe import moe_process_group
    from neuronx_distributed.parallel_layers import parallel_state

    if torch.distributed.is_initialized():
        os.environ.pop("WORLD_SIZE", None)  # of which NxDI would make the world again
        parallel_state.destroy_kv_group()
        parallel_state.destroy_model_parallel()
        moe_process_group.destroy_moe_model_parallel()


def load(app: Any) -> None:
    """Load an application in CPU mode, with a model for each stage: they differ, as they do on a device."""
    give_up_groups()
    neuron = app.config.neuron_config
    kept = neuron.is_continuous_batching
    neuron.is_continuous_batching = True
    try:
        app.to_cpu()
    finally:
        neuron.is_continuous_batching = kept
    for wrapper in app.models:
        wrapper.model.register_forward_pre_hook(_set_bucket)


def _set_bucket(model: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """Give the module the bucket of each pass, which a traced graph has from its bucket."""
    model.n_positions = inputs[1].shape[1]


def answers(folder: str, jobs: Any) -> Any:
    """`applications.answers` of a copy of the folder, where `kimi_k2` cannot be imported."""
    import applications

    alone(folder)
    return applications.answers(jobs)
