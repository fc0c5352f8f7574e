"""Which devices a model runs on."""

from __future__ import annotations

import torch

from kimi_k2.errors import DeviceError
from kimi_k2.ops.registry import check_pins_on_cpu


def check_device(device: str) -> torch.device:
    """The device of a name, made current if it is a GPU, since our kernels launch on the current one.

    Args:
        device: cpu, cuda, cuda:1 ...

    Raises:
        DeviceError: another kind of device, or one that this machine lacks.
        KernelError: kernels are pinned for a CPU.
    """
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda") or (parsed.type == "cpu" and parsed.index not in (None, 0)):
        raise DeviceError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    if parsed.type == "cpu":
        check_pins_on_cpu()
    else:
        if not torch.cuda.is_available():
            raise DeviceError(f"device {device!r}: no CUDA device is available to torch")
        if parsed.index is not None:
            if parsed.index >= torch.cuda.device_count():
                raise DeviceError(f"device {device!r}: this machine has {torch.cuda.device_count()} GPUs")
            torch.cuda.set_device(parsed)
    return parsed
