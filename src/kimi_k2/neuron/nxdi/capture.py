"""NxDI's tensor capture in CPU mode, where nothing is traced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neuronx_distributed.utils.tensor_capture import enable_tensor_capture
from neuronx_distributed.utils.tensor_capture.registry import TensorRegistry
from torch import nn


def capture_in_cpu_mode(models: Iterable[nn.Module], config: Any) -> None:
    """Capture in every pass what `config`, a TensorCaptureConfig, names.

    NxDI enables capture where it traces a graph (DecoderModelInstance.load_module), for that one trace: collecting the
    tensors (NeuronBaseModel._get_captured_tensors) clears the registry, with the modules that it listens to. Here a
    module runs many times, so they are named again before each pass.
    """
    options = (config.modules_to_capture, config.max_intermediate_tensors, config.capture_inputs)

    def name_them(*_: Any) -> None:
        TensorRegistry.get_instance().configure(True, *options)

    for model in models:
        enable_tensor_capture(model, *options)
        model.register_forward_pre_hook(name_them)
