"""HLO of the prefill and decode graphs at real shapes, without Neuron hardware, compiler or weights.

NxD's `mock_distributed` stands for the other ranks, as in its own ModelBuilder, so that one process gives the graph of
rank 0 with the real replica groups. Modules are made on the meta device and their parameters replaced by torch_xla's
placeholders, which have a shape and no buffer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STAGES = ("context_encoding_model", "token_generation_model")  # without a draft
Type = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class LoweredGraph:
    """One graph.

    Attributes:
        stage: NxDI's tag of the submodel.
        bucket: its bucket (sequence length).
        hlo: the module as HLO text.
        parameters: name of the weight behind each entry parameter (by its number); inputs are named `input.N`.
        constants: the other entry parameters: values that the trace made, which the compiler gets as constants.
        aliases: number of the output that a state (a cache) is updated with, by the state's name.
        proto: the module as a serialized HloModuleProto.
        inputs: dtype and shape of each input, by its name; those of no element are left out.
        states: dtype and shape of each state.
    """

    stage: str
    bucket: int
    hlo: str
    parameters: dict[int, str]
    constants: dict[int, torch.Tensor]
    aliases: dict[str, int]
    proto: bytes
    inputs: dict[str, Type]
    states: dict[str, Type]


@contextlib.contextmanager
def mocked_ranks(neuron_config: Any) -> Iterator[None]:
    """NxD's parallel state for all ranks of `neuron_config`, in this process."""
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trace.mock_torchdist import mock_distributed

    if os.environ.get("NXD_CPU_MODE") == "1":
        raise RuntimeError("NXD_CPU_MODE=1 is set: NxD would call gloo instead of lowering its collectives")
    with mock_distributed(world_size=neuron_config.world_size):
        torch.distributed.init_process_group(backend="xla", rank=0, world_size=neuron_config.world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=neuron_config.tp_degree,
            pipeline_model_parallel_size=neuron_config.pp_degree,
            expert_model_parallel_size=neuron_config.ep_degree,
            skip_collective_init=True,
            lnc_size=neuron_config.logical_nc_config,
        )
        parallel_state.set_aot_mode(True)
        if neuron_config.flash_decoding_enabled:  # as ModelBuilder does
            parallel_state.initialize_kv_group(neuron_config.num_cores_per_group, sequential_ranks_in_group=True)
        _forget_collectives()
        try:
            yield
        finally:
            parallel_state.set_aot_mode(False)
            parallel_state.destroy_kv_group()
            parallel_state._SPECULATIVE_DRAFT_GROUP = None
            parallel_state.destroy_model_parallel()


def _forget_collectives() -> None:
    """torch_xla chains collectives by a token that outlives a graph and would drag the one before into the next."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    _, context = xm._get_all_reduce_token()
    torch_xla._XLAC._set_all_reduce_token(context.device, None)


def wrappers(app: Any) -> dict[str, Any]:
    """Wrappers of the submodels by their tags, the tower's last."""
    return {wrapper.tag: wrapper for wrapper in (*app.models, *getattr(app, "vision_models", ()))}


def lower(app: Any, stage: str, number: int = -1) -> LoweredGraph:
    """Lower one bucket of one submodel of an application (default: its last, the largest).

    Args:
        app: NeuronKimiK2ForCausalLM, not loaded.
        stage: tag of one of its submodels.
        number: of the bucket.
    """
    from neuronx_distributed_inference.models.application_base import init_custom_process_group_fn

    wrapper = wrappers(app)[stage]
    examples = wrapper.input_generator()  # first: it also tells LoRA's modules which stage they are made for
    with mocked_ranks(wrapper.neuron_config):
        init_custom_process_group_fn(wrapper.config)  # as ModelBuilder does: a draft's ranks
        instance = wrapper.get_model_instance()
        with torch.device("meta"):
            instance.load_module()
        module, aliased = instance.get(number)
        outputs_of = {id(state): number for state, number in aliased.items()}
        aliases = {name: outputs_of[id(p)] for name, p in module.named_parameters() if id(p) in outputs_of}
        placed = _place(module)
        inputs = []
        for index, example in enumerate(examples[number]):
            if example.numel():
                example = placed[f"input.{index}"] = _placeholder(example)
            inputs.append(example)
        with torch.no_grad():
            outputs = module(*inputs)
        bucket = wrapper.neuron_config.buckets[number]
        return _graph(stage, bucket, outputs if isinstance(outputs, list) else [outputs], placed, aliases)


def _placeholder(like: torch.Tensor) -> torch.Tensor:
    from torch_xla.core import xla_builder

    # torch_xla knows the type but has no name for it in its table.
    xla_builder._PT_XLA_TYPE_MAP.setdefault(torch.float8_e4m3fn, "f8e4m3fn")
    out: torch.Tensor = xla_builder.create_placeholder_tensor(tuple(like.shape), like.dtype)
    return out


def _place(module: nn.Module) -> dict[str, torch.Tensor]:
    """Give every parameter a placeholder; small computed buffers go to the XLA device as they are."""
    import torch_xla

    placed: dict[str, torch.Tensor] = {}
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                placeholder = _placeholder(parameter)
                child._parameters[name] = placeholder
                placed[f"{path}.{name}".lstrip(".")] = placeholder
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(torch_xla.device())
    return placed


def _graph(
    stage: str,
    bucket: int,
    outputs: list[Any],
    placed: dict[str, torch.Tensor],
    aliases: dict[str, int],
) -> LoweredGraph:
    import torch_xla
    from torch_xla.core import xla_builder

    context = torch_xla._XLAC.lowering.LoweringContext("kimi_k2")
    context.build([out for out in outputs if isinstance(out, torch.Tensor)])
    proto = context.hlo()
    hlo = xla_builder.get_computation_hlo(xla_builder.computation_from_module_proto("kimi_k2", proto))
    numbers = {context.tensor_parameter_id(tensor): name for name, tensor in placed.items()}
    named = {number: name for number, name in numbers.items() if number >= 0}
    # Placeholders have no buffer to read; what the trace itself put on the device has one.
    constants = {n: t.cpu() for n, t in context.device_parameter_id_tensor_mapping().items() if n not in named}
    types = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in placed.items()}
    inputs = {name: kind for name, kind in types.items() if name.startswith("input.")}
    states = {name: types[name] for name in aliases}
    return LoweredGraph(stage, bucket, hlo, named, constants, aliases, proto, inputs, states)
