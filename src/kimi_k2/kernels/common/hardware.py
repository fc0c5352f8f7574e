"""What a kernel may count on here: a Hopper GPU, nvcc, Triton."""

from __future__ import annotations

import functools
import importlib.util

import torch

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc


def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0."""
    return device.type == "cuda" and capability(device.index) == (9, 0)


def runs_cuda(device: torch.device) -> bool:
    """Whether kernels in CUDA C++ can be compiled for it: a Hopper GPU, nvcc."""
    return is_hopper(device) and find_nvcc() is not None


@functools.cache
def capability(index: int | None) -> tuple[int, int]:
    """Compute capability of GPU `index`, None for the current one; asked for at every call of an operation."""
    return torch.cuda.get_device_capability(index)


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def hopper(index: int, operation: str) -> tuple[str, int]:
    """Name and number of SMs of GPU `index`; KernelError in `operation`'s name if it is no Hopper."""
    properties = torch.cuda.get_device_properties(index)
    if (properties.major, properties.minor) != (9, 0):
        raise KernelError(f"{operation} needs compute capability 9.0, {properties.name} has {properties.major}.x")
    return properties.name, properties.multi_processor_count
