"""NeuronKimiK2ForCausalLM in NxD's CPU mode, one rank: logits and outputs under the plain model's names."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kimi_k2.neuron import contrib, standins
from kimi_k2.parity.trace import Inputs, ParityError, Trace

# Modules whose output has the plain model's meaning; the down projections are one here, the experts stand with shared.
_OUTPUTS = (
    "input_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "self_attn.q_b_proj",
    "self_attn.o_proj", "post_attention_layernorm", "mlp",
)  # fmt: skip


def _prepare() -> None:
    """CPU mode, one rank; stand-ins for Neuron's binary modules where the SDK's own are missing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    single = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({"NXD_CPU_MODE": "1", "PJRT_DEVICE": "CPU"} | single)
    standins.install()


def _application(checkpoint: str | Path, dtype: str, length: int) -> Any:
    config, modeling = contrib.load("config"), contrib.load("modeling_kimi_k2")
    neuron = config.KimiK2NeuronConfig(
        on_cpu=True,
        tp_degree=1,
        moe_tp_degree=1,
        moe_ep_degree=1,
        batch_size=1,
        seq_len=length,
        max_context_length=length,
        n_positions=length,
        torch_dtype=getattr(torch, dtype),
        blockwise_matmul_config={"block_size": 16, "use_torch_block_wise": True},
    )
    inference = config.KimiK2InferenceConfig(neuron, load_config=config.load_kimi_config(str(checkpoint)))
    application = modeling.NeuronKimiK2ForCausalLM(str(checkpoint), inference)
    application.to_cpu()
    return application


def _decoder(application: Any) -> nn.Module:
    """The traced model; CPU mode has one for both stages."""
    for wrapper in application.models:
        for module in (wrapper, *(m for m in vars(wrapper).values() if isinstance(m, nn.Module))):
            for inner in module.modules():
                if type(inner).__name__ == "NeuronKimiK2Model":
                    return inner
    raise ParityError("nxdi: the application holds no NeuronKimiK2Model")


@torch.inference_mode()
def run_nxdi(checkpoint: str | Path, inputs: Inputs, dtype: str) -> Trace:
    """Prefill and forced decode steps of the contrib model.

    Raises:
        NeuronUnavailableError: NxD, NxDI or torch_xla is not importable.
        ParityError: the dtype is not one that CPU mode takes.
    """
    if dtype != "float32":
        raise ParityError(f"nxdi: CPU mode runs in float32, got {dtype}")
    if absent := contrib.missing():
        raise contrib.NeuronUnavailableError(f"backend nxdi: not importable here: {', '.join(absent)}")
    _prepare()
    length = len(inputs.prompt) + len(inputs.forced) + 1
    application = _application(checkpoint, dtype, length)
    trace, phase, rows = Trace(inputs), "prefill", len(inputs.prompt)

    def emit(point: str, value: Tensor) -> None:
        # Right padding to the bucket comes after the prompt's rows.
        trace.add(phase, point, value.reshape(-1, value.shape[-1])[:rows])

    handles = []
    for number, layer in enumerate(_decoder(application).get_submodule("layers").children()):
        for name in (*_OUTPUTS, ""):
            point = f"layers.{number}.{name or 'output'}"
            module = layer.get_submodule(name)
            handles.append(
                module.register_forward_hook(
                    lambda _m, _i, out, p=point: emit(p, out[0] if isinstance(out, tuple) else out)
                )
            )
    try:
        prompt = torch.tensor([list(inputs.prompt)])
        positions = torch.arange(prompt.shape[1])[None]
        out = application(input_ids=prompt, attention_mask=torch.ones_like(prompt), position_ids=positions)
        emit_logits(trace, phase, out)
        phase, rows = "decode", 1
        for step, token in enumerate(inputs.forced):
            at = prompt.shape[1] + step
            out = application(
                input_ids=torch.tensor([[token]]),
                attention_mask=torch.ones(1, at, dtype=torch.int64),
                position_ids=torch.tensor([[at]]),
            )
            emit_logits(trace, phase, out)
    finally:
        for handle in handles:
            handle.remove()
    return trace


def emit_logits(trace: Trace, phase: str, out: Any) -> None:
    """The last position's logits."""
    trace.add(phase, "lm_head", out.logits[0, -1:])
