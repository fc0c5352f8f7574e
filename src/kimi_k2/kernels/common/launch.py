"""How Python calls a kernel library: its arguments, the launch and its error."""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import load_library

# `host::Error` of csrc/errors.cuh.
ERRORS = {
    1000: "no instance of the kernel for these sizes",
    1001: "the driver has no encoder of tensor maps",
    1002: "the driver refuses the tensor map",
    1003: "more requests in flight than the kernel has stages",
    1004: "the first stage is split for many tokens an expert",
}


@functools.cache
def triton_kernels(module: str) -> Any:
    """Those of kernels/{module}_triton.py: Triton is imported when one is launched."""
    return importlib.import_module(f"kimi_k2.kernels.{module.replace('/', '.')}_triton")


Argument = Tensor | ctypes.Structure | float | None


def _passed(argument: Argument) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def launch(library: str, function: str, operation: str, device: torch.device, *arguments: Argument) -> None:
    """Call a library's C function, whose last argument is the device's current stream.

    Args:
        library: as `load_library` takes it.
        operation: named in the error.
        arguments: tensors and None become pointers, structures are passed by reference, floats as 32-bit ones.

    Raises:
        KernelError: the library cannot be built, or the launch failed.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    if status := getattr(load_library(library), function)(*map(_passed, arguments), stream):
        raise KernelError(f"{operation} could not be launched: {ERRORS.get(status) or f'CUDA error {status}'}")
