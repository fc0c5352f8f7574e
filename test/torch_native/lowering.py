"""What stands between the model's source and the device, played on captured graphs.

vllm-neuron lowers by one of two routes: AOTAutograd, whose functionalization is PyTorch's own; or FX passes that make
in-place operations new values, described in aws-neuron-sdk (`vllm-neuron/docs/design/compilation`); their versions
differ in who sees a write through a view, which is refused here. Behind both, FP8 values are taken as the device's
e4m3, and outputs overlay the inputs that they replace. All is written anew from the descriptions.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _force_skip_lazy_graph_module
from torch.utils._pytree import tree_map_only

KERNEL = "line.write_pages"  # a kernel that gives its operands back: in the graph as `view_as` of themselves


def name_of(node: Node) -> str:
    """`view` of a method or function, `space.name` of an operator that was registered."""
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(node.target).removesuffix(".default")
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def written_by(node: Node) -> list[Node]:
    """What an operation writes to."""
    name = name_of(node)
    if name == KERNEL:
        return list(node.args[:2])  # type: ignore[arg-type]
    in_place = node.op == "call_method" and name.endswith("_") and not name.startswith("__")
    return [node.args[0]] if in_place or node.target is operator.setitem else []  # type: ignore[list-item]


def results_of(write: Node, operand: Node) -> list[Node]:
    """What a kernel gave for an operand that it wrote."""
    whole = (user for user in operand.users if name_of(user) == "view_as" and user.args == (operand, operand))
    return [user for user in whole if write < user]


def functional(graph: GraphModule) -> tuple[GraphModule, list[int], int]:
    """A graph without writes: its inputs' new values follow its outputs.

    Args:
        graph: as captured; it is left alone.

    Returns:
        The graph, the numbers of the inputs that its last outputs replace, and how many outputs were there before.
        Who reads an input behind its write has what was before, so that the model must read what the write gives.

    Raises:
        NotImplementedError: a write is through a view, of which versions of the pass make different things, or by an
            operation that the model has no need of.
    """
    rewritten = GraphModule(graph, copy.deepcopy(graph.graph))
    inputs, values = rewritten.graph.find_nodes(op="placeholder"), {}
    for node in list(rewritten.graph.nodes):
        targets = written_by(node)
        if targets and name_of(node) == KERNEL:
            node.target = torch.ops.line.written_pages.default
            with rewritten.graph.inserting_after(node):
                for number, written in enumerate(targets):
                    values[inputs.index(written)] = value = rewritten.graph.call_function(
                        operator.getitem, (node, number)
                    )
                    for result in results_of(node, written):
                        result.replace_all_uses_with(value)
                        rewritten.graph.erase_node(result)
        elif targets:
            (written,) = targets
            if written not in inputs or node.op != "call_method":
                raise NotImplementedError(f"a write of {name_of(written)} by {name_of(node)}")
            node.target = node.target[:-1]
            values[inputs.index(written)] = node
    out: Any = rewritten.graph.output_node()
    count = len(out.args[0])
    out.args = ((*out.args[0], *values.values()),)
    rewritten.recompile()
    rewritten.graph.lint()
    return rewritten, list(values), count


def as_device_reads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 e4m3 as Trainium2 has it, from the bytes of e4m3fn: the largest exponent has no values, so none above 240."""
    beyond = (x.view(torch.uint8) & 0x78) == 0x78
    return x.to(dtype).masked_fill(beyond, float("nan"))


def with_device_casts(graph: GraphModule) -> GraphModule:
    """Every conversion of FP8 values, as the compiler's --experimental-unsafe-fp8e4m3fn-as-fp8e4m3 makes it."""
    for node in graph.graph.find_nodes(op="call_method", target="to"):
        if node.args[0].meta["example_value"].dtype == torch.float8_e4m3fn:
            node.op, node.target = "call_function", as_device_reads
    graph.recompile()
    return graph


class CapturedError(Exception):
    """Ends a call whose graph alone was wanted."""


@dataclass(frozen=True)
class Captured:
    """A graph, where its inputs come from, and how it runs on each route."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    routes: tuple[Callable[..., Any], ...]

    @classmethod
    def of_call(cls, model: Any, named: dict[str, Any], routes: Sequence[str]) -> Captured:
        """What torch.compile(fullgraph=True) makes of one call; `model` is not run."""
        captured: list[Captured] = []

        def stop(*_: Any) -> Any:
            raise CapturedError

        def backend(graph: GraphModule, examples: list[Any]) -> Any:
            sources = (node.meta["grapharg"].source.name for node in graph.graph.find_nodes(op="placeholder"))
            inputs = tuple(compile(name, "input", "eval") for name in sources)
            captured.append(cls(graph, inputs, tuple(route(kind, graph, examples) for kind in routes)))
            return stop

        def call(model: Any, named: dict[str, Any]) -> Any:
            return type(model).forward.__wrapped__(model, **named)

        torch._dynamo.reset()
        # Ranks run a graph at the same time, so that its code is made here, not at its first call.
        with contextlib.suppress(CapturedError), torch.no_grad(), _force_skip_lazy_graph_module():
            torch.compile(call, fullgraph=True, dynamic=False, backend=backend)(model, named)
        return captured[0]

    def __call__(self, model: Any, named: dict[str, Any]) -> list[Any]:
        """Run it for a model of the same code, say another rank's: all routes, held to each other."""
        local = {"L": {"model": model, "named": named}}
        arguments = [eval(source, local) for source in self.inputs]
        written, results = sorted(_written_inputs(self.graph)), []
        for run in self.routes:
            mine = _copied(arguments, written)
            versions = [argument._version for argument in arguments if isinstance(argument, Tensor)]
            outputs = run(*mine)
            assert versions == [argument._version for argument in arguments if isinstance(argument, Tensor)]
            results.append([*outputs, *(mine[at] for at in written)])
        for other in results[1:]:
            for mine, theirs in zip(results[0], other, strict=True):
                torch.testing.assert_close(mine.float(), theirs.float(), rtol=1e-5, atol=1e-5, equal_nan=True)
        for at, value in zip(written, results[0][len(outputs) :], strict=True):
            arguments[at].copy_(value)
        return results[0][: len(outputs)]


def route(kind: str, graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """How a graph runs: by `aot`, or by the passes of `fx`."""
    if kind == "aot":
        compiled: Callable[..., Any] = aot_eager(GraphModule(graph, copy.deepcopy(graph.graph)), examples)
        return compiled
    rewritten, replaced, count = functional(graph)
    return _overlaid(with_device_casts(rewritten), replaced, count)


class Lowering:
    """Models as the routes make them. One graph a bucket is captured and serves all ranks.

    Args:
        routes: of `route`, the first of which gives the results.

    Attributes:
        graphs: by what tells the calls apart: shapes, and the values of what is no tensor.
    """

    def __init__(self, routes: Sequence[str] = ("fx", "aot")) -> None:
        self.routes, self.graphs, self.lock = routes, {}, threading.Lock()  # type: ignore[var-annotated]

    def __call__(self, model: Any) -> Callable[..., list[Any]]:
        """The model's call on all routes; its results in a list."""

        def call(**named: Any) -> list[Any]:
            key = repr((tree_map_only(Tensor, lambda tensor: (tensor.dtype, tensor.shape), named), model.aux_layers))
            with self.lock, torch.no_grad():
                if key not in self.graphs:
                    self.graphs[key] = Captured.of_call(model, named, self.routes)
            with torch.no_grad():
                return self.graphs[key](model, named)  # type: ignore[no-any-return]

        return call


def _written_inputs(graph: GraphModule) -> Iterator[int]:
    written = {operand for node in graph.graph.nodes for operand in written_by(node)}
    yield from (at for at, node in enumerate(graph.graph.find_nodes(op="placeholder")) if node in written)


def _copied(arguments: list[Any], written: list[int]) -> list[Any]:
    """Arguments with memory of their own for what is written; those that shared it share it still."""
    copies, memory = list(arguments), {}
    for at in written:
        argument = arguments[at]
        held = argument.untyped_storage()
        if held.data_ptr() not in memory:
            memory[held.data_ptr()] = held.clone()
        copies[at] = argument.new_empty(0).set_(
            memory[held.data_ptr()], argument.storage_offset(), argument.shape, argument.stride()
        )
    return copies


def _overlaid(graph: GraphModule, replaced: list[int], count: int) -> Callable[..., Any]:
    """The graph as the runtime calls it: the last outputs take the memory of inputs, which hold nothing meanwhile."""

    def run(*arguments: Any) -> Any:
        outputs = graph(*arguments)
        values = [value.clone() for value in outputs[count:]]
        for at in replaced:
            arguments[at].fill_(float("nan"))
        for at, value in zip(replaced, values, strict=True):
            arguments[at].copy_(value)
        return outputs[:count]

    return run
