"""The NxDI model under the plain model's names, by NxDI's own tensor capture: on a device, or in NxD's CPU mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.neuron.application import NeuronApplication, cpu_deployment
from kimi_k2.parity.trace import Inputs, ParityError, Trace
from kimi_k2.plan.deployment import Deployment, OnDeviceSampling

# Modules whose output has the plain model's meaning and is whole on every rank; a graph returns rank 0's. The down
# projections are one here, and routed experts stand with shared ones.
WHOLE = (
    "input_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "self_attn.o_proj",
    "post_attention_layernorm", "mlp", "",
)  # fmt: skip
# The same where there is one rank only.
ALONE = ("self_attn.q_b_proj",)
FLOAT = "trn2-tp64-ep1"  # whose layout holds the checkpoint's own values when nothing else is asked for


def capture_points(config: KimiK2Config, layers: Sequence[int] | None, ranks: int) -> dict[str, str]:
    """Captured modules of NeuronKimiK2Model to the points that they are; None is all layers."""
    names = (*WHOLE, *ALONE) if ranks == 1 else WHOLE
    chosen = range(config.num_hidden_layers) if layers is None else layers
    return {
        f"layers.{layer}.{name}".rstrip("."): f"layers.{layer}.{name or 'output'}" for layer in chosen for name in names
    }


def capture_options(config: KimiK2Config, layers: Sequence[int] | None, ranks: int) -> dict[str, Any]:
    """Arguments of KimiK2NeuronConfig for graphs that return logits and the captured modules' outputs.

    NxDI captures only beside on-device sampling; greedy is the cheapest.
    """
    return {
        "output_logits": True,
        "on_device_sampling_config": OnDeviceSampling().model_dump(),
        "tensor_capture_config": {"modules_to_capture": list(capture_points(config, layers, ranks))},
    }


def run_nxdi(
    checkpoint: str | Path,
    inputs: Inputs,
    dtype: str,
    preset: Deployment | None = None,
    compiled: Path | None = None,
) -> Trace:
    """Prefill and forced decode steps.

    Args:
        checkpoint: directory of the weights.
        inputs: tokens, and which points are kept.
        dtype: of CPU mode, float32 or bfloat16 (one rank); compiled graphs have their own.
        preset: its experts' format and expert parallelism; None holds the checkpoint's values in `dtype`.
        compiled: what `kimi-k2 compile --capture-layers` wrote for `preset` and the same layers; None is CPU mode.

    Raises:
        NeuronUnavailableError: NxD, NxDI or torch_xla is not importable.
        ParityError: a dtype that CPU mode does not take, or graphs that capture nothing.
    """
    if compiled is None and dtype == "float64":
        raise ParityError("neuron: CPU mode runs in float32 or bfloat16, got float64")
    config = KimiK2Config.from_pretrained(checkpoint)
    if compiled is None:
        chosen = preset or Deployment.load(FLOAT).model_copy(update={"experts": "bf16"})
        deployment = cpu_deployment(chosen, length=len(inputs.prompt) + len(inputs.forced) + 1, dtype=dtype)
    elif preset is None:
        raise ParityError("neuron: compiled graphs need their preset")
    else:
        deployment = preset
    options = capture_options(config, inputs.layers, deployment.tp_degree)
    points = list(capture_points(config, inputs.layers, deployment.tp_degree).values())
    if deployment.neuron_config.decode == "layers":  # modules inside its kernel cannot be captured: logits alone
        options["tensor_capture_config"], points = None, []
    application = NeuronApplication.load(checkpoint, deployment, compiled, **options)
    trace = Trace(inputs)

    for phase, tokens, start in inputs.calls():
        if phase == "prefill":
            output = application.prefill([tokens])
        else:
            output = application.decode(torch.tensor(tokens), torch.tensor([start]))
        if len(output.captured) != len(points):
            raise ParityError(f"neuron: expected {len(points)} captured tensors, got {len(output.captured)}")
        for point, value in zip(points, output.captured, strict=True):
            # Right padding to the bucket comes after the prompt's rows.
            trace.add(phase, point, value.reshape(-1, value.shape[-1])[: len(tokens)])
        assert output.logits is not None  # output_logits
        trace.add(phase, "lm_head", output.logits)
    return trace
