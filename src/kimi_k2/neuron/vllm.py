"""Entry points that make `vllm serve` run Kimi-K2 through vllm-neuron with no change to either.

vllm-neuron has two lines: the older has NxDI inside, the newer is torch-native (`neuron.torch_native`). `register` is a
`vllm.general_plugins` entry: vLLM calls it in every process it starts. `cpu_platform` is a `vllm.platform_plugins`
entry: in NxD's CPU mode (`NXD_CPU_MODE=1`) it chooses the older line's platform, which chooses itself only where it
finds a Neuron device. Both do nothing where vllm-neuron or NxDI is not installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kimi_k2.neuron import contrib, cpu
from kimi_k2.neuron.torch_native import plugin

PLATFORM = "vllm_neuron.platform.NeuronPlatform"


def _neuron_devices() -> bool:
    return any(Path("/dev").glob("neuron*"))


def _installed() -> bool:
    return importlib.util.find_spec("vllm_neuron") is not None and not contrib.missing()


def register() -> None:
    """Register the model with the line that is installed; for NxDI see `registration` of the NxDI model."""
    if plugin.installed():
        plugin.register()
        return
    if not _installed() or not (cpu.enabled() or _neuron_devices()):
        return
    if cpu.enabled():
        cpu.prepare()
    contrib.load("registration").register()


def cpu_platform() -> str | None:
    """vllm-neuron's platform in CPU mode; None where there is a device, which it finds itself."""
    return PLATFORM if cpu.enabled() and not plugin.installed() and _installed() and not _neuron_devices() else None
