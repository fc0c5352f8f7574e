"""What all tests share: the folder on the path, and a reason to skip without NxDI."""

import importlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "unit")]


def why_not() -> str | None:
    """Why NxDI cannot be imported here."""
    try:
        importlib.import_module("neuronx_distributed_inference.models.model_base")
    except ImportError as error:
        return f"needs NxD Inference and the Neuron SDK: {error}"
    return None


def pytest_collection_modifyitems(items):
    own = [item for item in items if item.path.is_relative_to(ROOT)]
    if own and (reason := why_not()):
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def one_rank():
    """NxD's CPU mode with one rank, for modules that are made alone."""
    import torch
    from neuronx_distributed.parallel_layers import parallel_state

    os.environ["NXD_CPU_MODE"] = "1"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, skip_collective_init=True)
