"""A stand-in for the Neuron device: the HLO that the compiler would get, executed on XLA's CPU.

`load(app)` gives a NeuronKimiK2ForCausalLM the place of NxD's traced model, so that everything above it (padding,
buckets, sequence ids, asynchronous steps, sampling parameters) is NxDI's own code. Each rank is one of XLA's CPU
devices: the graph is one program for all ranks, and its collectives are executed with their real replica groups.

The process must have been started with XLA_FLAGS=--xla_force_host_platform_device_count=<ranks>.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import environment
import jax
import ml_dtypes
import numpy as np
import torch
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_enable_x64", True)  # the graphs have int64 and float64 values

# Types that NumPy lacks: their carrier for the bits, and ml_dtypes' name.
CARRIED = {
    torch.bfloat16: (torch.uint16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}
PLAIN = {wide: (carrier, torch_type) for torch_type, (carrier, wide) in CARRIED.items()}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same bits as a NumPy array."""
    if tensor.dtype in CARRIED:
        carrier, wide = CARRIED[tensor.dtype]
        return tensor.contiguous().view(carrier).numpy().view(wide)
    return tensor.contiguous().numpy()


def to_torch(array: Any) -> torch.Tensor:
    """The same bits as a tensor."""
    held = np.array(array)
    for wide, (carrier, torch_type) in PLAIN.items():
        if held.dtype == wide:
            return torch.from_numpy(held.view(np.uint16 if carrier == torch.uint16 else np.uint8)).view(torch_type)
    return torch.from_numpy(held)


class Program:
    """One lowered graph, compiled for XLA's CPU with as many replicas as there are ranks."""

    def __init__(self, graph: Any, ranks: int) -> None:
        self.graph, self.ranks = graph, ranks
        module = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(graph.proto))
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = ranks, 1
        devices = jax.devices()[:ranks]
        self.mesh = Mesh(np.array(devices), ("rank",))
        self.executable = devices[0].client.compile_and_load(module, xla_client.DeviceList(tuple(devices)), options)

    def __call__(self, parts: dict[str, list[Any]]) -> list[list[Any]]:
        """Run; `parts` holds each named parameter's array on each rank. Returns each output's array on each rank."""
        count = len(self.graph.parameters) + len(self.graph.constants)
        arguments = []
        for number in range(count):
            if number in self.graph.parameters:
                arrays = parts[self.graph.parameters[number]]
            else:
                arrays = put([self.graph.constants[number]] * self.ranks)
            arguments.append(self._joined(arrays))
        result: list[list[Any]] = self.executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return result

    def _joined(self, arrays: list[Any]) -> Any:
        shape = arrays[0].shape
        spec = PartitionSpec("rank") if shape else PartitionSpec()
        whole = (shape[0] * self.ranks, *shape[1:]) if shape else shape
        return jax.make_array_from_single_device_arrays(whole, NamedSharding(self.mesh, spec), arrays)


def put(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """One tensor a rank, on the ranks' devices."""
    return [jax.device_put(to_numpy(tensor), device) for tensor, device in zip(tensors, jax.devices(), strict=False)]


class NxdModel:
    """What NxDI holds as `traced_model`, and its `nxd_model`: programs by their inputs' shapes, weights and caches."""

    def __init__(self, app: Any) -> None:
        lowering, self.nxd_model = environment.contrib("lowering"), self
        self.ranks = app.neuron_config.tp_degree
        self.programs: dict[tuple[torch.Size, ...], tuple[Program, str]] = {}
        self.graphs = []
        for wrapper in app.models:
            examples = wrapper.input_generator()
            for number, example in enumerate(examples):
                graph = lowering.lower(app, wrapper.tag, number)
                self.graphs.append(graph)
                self.programs[tuple(t.shape for t in example)] = (Program(graph, self.ranks), wrapper.tag)
        self.parts: dict[str, list[Any]] = {}
        self.calls: list[tuple[str, int]] = []

    def initialize(self, weights: list[dict[str, torch.Tensor]], start_rank: torch.Tensor | None = None) -> None:
        """Put each rank's weights on its device and clear the caches."""
        held = {name for graph in self.graphs for name in graph.parameters.values()}
        for name in weights[0]:
            if name in held:
                self.parts[name] = put([rank[name] for rank in weights])
        self.clear()

    def clear(self) -> None:
        """Zero the caches."""
        for graph in self.graphs:
            for name, (dtype, shape) in graph.states.items():
                self.parts[name] = put([torch.zeros(shape, dtype=dtype)] * self.ranks)

    def fill(self, states: dict[str, list[torch.Tensor]]) -> None:
        """Give the ranks these states, by name: one tensor a rank, or one for all."""
        for name, tensors in states.items():
            self.parts[name] = put(tensors if len(tensors) > 1 else tensors * self.ranks)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """One step; the outputs of rank 0 without the caches, a single one bare, as NxD's packer gives it."""
        outputs = self.forward_async([list(inputs)] * self.ranks)[0]
        return outputs[0] if len(outputs) == 1 else outputs

    def forward_async(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """One step from each rank's own inputs; every rank's outputs. Nothing is asynchronous here."""
        shapes = tuple(t.shape for t in inputs[0])
        if shapes not in self.programs:
            raise ValueError(f"no graph takes inputs of {shapes}")
        program, stage = self.programs[shapes]
        graph = program.graph
        self.calls.append((stage, graph.bucket))
        own = {
            f"input.{n}": put([rank[n].to(graph.inputs[f"input.{n}"][0]) for rank in inputs])
            for n in range(len(inputs[0]))
            if f"input.{n}" in graph.inputs
        }
        outputs = program({**self.parts, **own})
        for name, number in graph.aliases.items():
            self.parts[name] = outputs[number]
        kept = [out for number, out in enumerate(outputs) if number not in graph.aliases.values()]
        return [[to_torch(out[rank]) for out in kept] for rank in range(self.ranks)]


def parameter_types(graph: Any) -> dict[str, str]:
    """HLO element type of each entry parameter by the name of its weight, `constant.N` for what the trace made."""
    entry = graph.hlo[graph.hlo.index("ENTRY ") :]
    found = re.findall(r"= (\w+)\[[^\n]*? parameter\((\d+)\)", entry)
    return {graph.parameters.get(int(number), f"constant.{number}"): kind for kind, number in found}


def load(app: Any) -> None:
    """Load `app` as `app.load` would, with NxD's own sharding of the weights and the executed graphs as the device."""
    app.traced_model = traced = NxdModel(app)
    traced.initialize(app.get_builder().shard_checkpoint())
    from neuronx_distributed_inference.models import model_wrapper
    from neuronx_distributed_inference.modules import async_execution

    for wrapper in app.models:
        wrapper.__dict__["model"] = traced
        wrapper.is_neuron = lambda: True
    app.is_loaded_to_neuron = True
    for module in (async_execution, model_wrapper):
        module.is_ranked_io = is_ranked


def is_ranked(value: Any) -> bool:
    """NxDI's is_ranked_io, which knows the ranks' outputs by their device; here they lie on the CPU."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)
