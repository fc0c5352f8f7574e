"""The names of torch_neuronx (and its neighbours) that NxD calls at import or in CPU mode, with what they must do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch


def fill(module: ModuleType) -> None:
    """Put the behaving names into a stand-in module."""
    for name, value in _NAMES.get(module.__name__, {}).items():
        setattr(module, name, value)


class BucketModelConfig:
    """Holds what it is given, as the real one does for the tracer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


@contextlib.contextmanager
def disable_nrt_load() -> Iterator[None]:
    """No runtime to keep from loading."""
    yield


def identity_decorator(*args: Any, **kwargs: Any) -> Any:
    """`@jit` and `@jit(options)` both leave the function as it is."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        result: Callable[..., Any] = args[0]
        return result
    return lambda function: function


class _Apply:
    """Operators that the SDK calls as `Op.apply(...)`, by their PyTorch meaning."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.apply = function


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, dim: int) -> torch.Tensor:
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)).to(hidden.dtype) * weight


def _marker(*tensors: torch.Tensor) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def _fill_prefix(cache: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    for dim, size in reversed(list(enumerate(update.shape))):
        rest = cache
        for outer in range(dim):
            rest = rest.narrow(outer, 0, update.shape[outer])
        if size < cache.shape[dim]:
            update = torch.cat((update, rest.narrow(dim, size, cache.shape[dim] - size)), dim=dim)
    return update


# Functions that NxD writes in the SDK's HLO builder ("scribe"), by their name there: what they compute, in PyTorch.
_HLO_BODIES: dict[str, Callable[..., Any]] = {
    "forward_impl": _marker,  # ModuleMarkerStart, ModuleMarkerEnd: hints to the compiler, the identity otherwise
    "xla_fill_prefix": _fill_prefix,
}


def xla_hlo_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function written in the HLO builder by its PyTorch meaning."""
    if function.__name__ in _HLO_BODIES:
        return _HLO_BODIES[function.__name__]

    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"no stand-in for the HLO function {function.__module__}.{function.__qualname__}")

    return unknown


@dataclasses.dataclass(frozen=True)
class AllCloseSummary:
    """What NxDI's logit_validation reads of a comparison."""

    allclose: bool
    max_rel_error: float


def neuron_allclose(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8
) -> AllCloseSummary:
    """Each value within atol + rtol * |expected|, as torch.allclose; the SDK's own is not published."""
    difference, size = (actual - expected).abs(), expected.abs()
    within = bool((difference <= atol + rtol * size).all())
    return AllCloseSummary(within, float((difference / size.clamp(min=1e-30)).max()))


class _TopKKernel:
    """`kernel[cores](tensor, k)`, which NxD 0.17 takes on trn2 whatever `top_k_kernel_enabled` says."""

    func_name = "topk"  # by which NxD tells it from others

    def __getitem__(self, _: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def top(tensor: torch.Tensor, k: int, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            values, indices = torch.topk(tensor, k, dim=-1)
            return values, indices

        return top


def _cumsum(tensor: torch.Tensor, out: torch.Tensor, axis: int) -> None:
    """The kernel that NxDI 0.8 samples with; it writes to `out`."""
    out.copy_(torch.cumsum(tensor, dim=axis))


_NAMES: dict[str, dict[str, Any]] = {
    "torch_neuronx": {"__version__": "2.9.0.2.11.14773", "BucketModelConfig": BucketModelConfig},
    "torch_neuronx.contexts": {"disable_nrt_load": disable_nrt_load},
    "torch_neuronx.utils": {"get_platform_target": lambda: "trn2"},
    "torch_neuronx.utils.utils": {"SUPPORTED_TYPES": ["inf2", "trn1", "trn2"]},
    "torch_neuronx.xla_impl.ops": {
        "nki_jit": identity_decorator,
        "xla_hlo_call": xla_hlo_call,
        "RmsNorm": _Apply(_rms_norm),
        "ConcatenateOp": _Apply(lambda *tensors, dim: torch.cat(tensors, dim=dim)),
        "Argmax": _Apply(lambda tensor, dim, keepdim=False: torch.argmax(tensor, dim=dim, keepdim=keepdim)),
        "TopK": _Apply(lambda tensor, k, dim: torch.topk(tensor, k, dim=dim)),
        "Softmax": _Apply(lambda tensor, dim: torch.softmax(tensor, dim=dim)),
    },
    "torch_neuronx.xla_impl.base": {"xla_call": identity_decorator, "xla_hlo_call": xla_hlo_call},
    "torch_neuronx.testing": {"neuron_allclose": neuron_allclose},
    "torch_neuronx.testing.validation": {"neuron_allclose": neuron_allclose, "AllCloseSummary": AllCloseSummary},
    "nki": {"jit": identity_decorator},
    "nkilib.core.cumsum.cumsum": {"cumsum": lambda tensor, axis: torch.cumsum(tensor, dim=axis)},
    "neuronxcc.nki": {"jit": identity_decorator},
    "neuronxcc.nki._private_kernels.cumsum": {"cumsum": _cumsum},
    "neuronxcc.nki._private_kernels.topk.topk": {"topk": _TopKKernel()},
}
