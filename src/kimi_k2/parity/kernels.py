"""NKI kernels of a decode step on a device against the emulator, one by one, at the sizes of one rank.

`record` runs in a process of its own, as `python -m kimi_k2.parity.kernels DIRECTORY`: it puts the emulator in the
place of the vendor's `nki`, which the comparing process needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_k2.checkpoint.writer import write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError
from kimi_k2.files import read_data
from kimi_k2.parity.trace import ParityError
from nki_emulator import install

CASES, TENSORS = "kernels.json", "kernels.safetensors"
EXPERTS = 16  # tables of a rank, of which the 8 chosen ones are read
# Of results in BF16: two roundings of 2^-9 each, with room for another order of sums.
TOLERANCE = 1e-2
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A call: kernel and its module, LNC, tensors in the kernel's order, the other arguments."""

    name: str
    module: str
    kernel: str
    tensors: list[Tensor]
    arguments: Arguments


@dataclass(frozen=True)
class Compared:
    """A case's relative L2 difference to the emulator, of the result that differs most."""

    name: str
    difference: float

    @property
    def passed(self) -> bool:
        """Within TOLERANCE; NaN is not."""
        return self.difference <= TOLERANCE


def cases(config: KimiK2Config) -> Iterator[Case]:
    """The kernels at one rank's sizes of TP64 and TP32 x EP2, one token, 4,096 slots."""
    draw = torch.Generator().manual_seed(16)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(torch.bfloat16)

    hidden, count, top_k = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
    blocks, rank, rope = hidden // 128, config.kv_lora_rank, config.qk_rope_head_dim
    bias = torch.randn(1, count, generator=draw) * 0.1
    routing = {
        "routed_scaling_factor": config.routed_scaling_factor, "norm_topk_prob": config.norm_topk_prob, "top_k": top_k,
    }  # fmt: skip
    router = [normal(1, hidden), normal(hidden, count, scale=0.02), bias]
    yield Case("router", "router", "noaux_tc_router", router, routing)
    query, pages = normal(1, 1, rank + rope), [normal(4096, (rank + rope) // 2) for _ in range(2)]
    rows, length = torch.randperm(4096, generator=draw).to(torch.int32)[None], torch.tensor([[3000]], dtype=torch.int32)
    cache = [query, *pages, rows, normal(1, rank), normal(1, rope), length]
    yield Case("attention", "mla_decode", "mla_decode_pages", cache, {"softmax_scale": config.softmax_scale})
    for name, width, local_choices in (("experts, TP64", 32, top_k), ("experts, TP32 x EP2", 64, top_k // 2)):
        gate_up = (torch.randn(EXPERTS, 128, blocks, 2 * width, generator=draw) * 40).clamp(-224, 224)
        down = (torch.randn(EXPERTS, width, hidden, generator=draw) * 40).clamp(-224, 224)
        scales = [torch.rand(EXPERTS, *shape, generator=draw) * 1e-3 + 1e-4 for shape in ((2, blocks), (blocks,))]
        fp8 = [gate_up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn)]
        index = torch.arange(top_k, dtype=torch.int32)[None] + EXPERTS - local_choices
        tensors = [normal(1, hidden), fp8[0], scales[0], fp8[1], scales[1], index, torch.rand(1, top_k, generator=draw)]
        arguments = {"first_expert": 0, "num_experts": EXPERTS if local_choices == top_k else 2 * EXPERTS}
        yield Case(name, "experts", "selective_experts", tensors, arguments)


def record(directory: Path, config: KimiK2Config, cores: int) -> None:
    """Run all cases on the emulator; inputs and results go to `directory`."""
    tensors: dict[str, Tensor] = {}
    listed = []
    for number, case in enumerate(cases(config)):
        results = _call(case, cores, emulated=True)
        tensors |= {f"{number}.input.{index}": tensor.contiguous() for index, tensor in enumerate(case.tensors)}
        tensors |= {f"{number}.result.{index}": tensor for index, tensor in enumerate(results)}
        counts = {"inputs": len(case.tensors), "results": len(results)}
        listed.append(
            {"name": case.name, "module": case.module, "kernel": case.kernel, "arguments": case.arguments} | counts
        )
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / TENSORS)
    write_json(directory / CASES, {"cores": cores, "cases": listed})


def recorded(directory: Path, model: str, cores: int) -> None:
    """`record` in a process of its own, unless the directory holds a recording.

    Raises:
        ParityError: it failed.
    """
    if (directory / CASES).is_file():
        return
    command = [sys.executable, "-m", "kimi_k2.parity.kernels", str(directory), model, str(cores)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ParityError(f"the emulator failed: {done.stderr.strip().splitlines()[-1]}")


def compare_kernels(directory: Path) -> Iterator[Compared]:
    """Run the recorded cases with the `nki` that is importable here, and compare.

    Raises:
        CheckpointError: the recording is missing or damaged.
    """
    emulated = install()
    try:
        recording = read_data(directory / CASES)
        stored = load_file(directory / TENSORS)
        cores, listed = recording["cores"], recording["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"no recording of the emulator: {error}", file=directory / CASES) from None
    for number, call in enumerate(listed):
        tensors = [stored[f"{number}.input.{index}"] for index in range(call["inputs"])]
        case = Case(call["name"], call["module"], call["kernel"], tensors, call["arguments"])
        results = _call(case, cores, emulated)
        wanted = [stored[f"{number}.result.{index}"] for index in range(call["results"])]
        yield Compared(call["name"], max(map(_difference, results, wanted)))


def _difference(actual: Tensor, wanted: Tensor) -> float:
    """Relative L2; of integers 0 if equal, else 1."""
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(actual.to(wanted.dtype), wanted) else 1.0
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def _call(case: Case, cores: int, emulated: bool) -> list[Tensor]:
    kernel = getattr(import_module(f"kimi_k2.nki.kernels.{case.module}"), case.kernel)[cores]
    inputs: list[Any] = case.tensors
    if emulated:
        inputs = [_emulated(tensor) for tensor in inputs]
    else:
        import torch_xla

        inputs = [tensor.to(torch_xla.device()) for tensor in inputs]
    results = kernel(*inputs, **case.arguments)
    return [_on_host(result) for result in (results if isinstance(results, list | tuple) else [results])]


def _emulated(tensor: Tensor) -> Any:
    """e4m3fn under the emulator's name for the same bits; no value is above 224."""
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    import ml_dtypes

    return tensor.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)


def _on_host(result: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(result)) if isinstance(result, np.ndarray) else result.cpu()


if __name__ == "__main__":
    install(force=True)
    record(Path(sys.argv[1]), KimiK2Config.load(sys.argv[2]), int(sys.argv[3]))
