"""NxD's CPU mode: the same model code over PyTorch and gloo, where there is no Neuron device."""

from __future__ import annotations

import os
import socket

from kimi_k2.neuron import standins


def enabled() -> bool:
    """Whether this process is in NxD's CPU mode (its own variable, `NXD_CPU_MODE=1`)."""
    return os.environ.get("NXD_CPU_MODE") == "1"


def prepare() -> list[str]:
    """Put this process into CPU mode; call it before anything of NxD is imported.

    Stand-ins take the place of the Neuron SDK's binary modules where these are missing. Under torchrun each process is
    a rank; otherwise there is one.

    Returns:
        The names of the modules that stand-ins replace.
    """
    os.environ.update(NXD_CPU_MODE="1", PJRT_DEVICE="CPU")
    if "WORLD_SIZE" not in os.environ and "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            # NxDI opens a process group of one at this address.
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    return standins.install()
