"""The NKI kernel of a decode step's layer on a device against the emulator, at the sizes of one rank.

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

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from kimi_k2.checkpoint.writer import write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError
from kimi_k2.files import read_data, replace_file
from kimi_k2.neuron.layer_arguments import emulated_fp8, numbers, torch_tensor
from kimi_k2.nki.kernels import MODULES
from kimi_k2.nki.step_sizes import BF16, F32, RANKS, drawn, layer
from kimi_k2.parity.trace import ParityError
from nki_emulator import install

CASES, TENSORS = "kernels.json", "kernels.safetensors"
EXPERTS = 16  # tables of a rank, of which the chosen ones are read
RUN = 8  # slots of the cache after each other
# Of results in BF16: two roundings of 2^-9 each, with room for another order of sums.
TOLERANCE = 1e-2
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A call of `decode_layer`: its tensors and its other arguments, by name."""

    name: str
    tensors: dict[str, Tensor]
    arguments: Arguments


def cases(config: KimiK2Config) -> Iterator[Case]:
    """The kernel of one layer at one rank's sizes of TP64 and TP32 x EP2, one token, 4,096 slots; alone in its sums."""
    draw = torch.Generator().manual_seed(16)
    count, slots = config.n_routed_experts, 4096
    for name, width, local in (("layer, TP64", 32, count), ("layer, TP32 x EP2", 64, count // 2)):
        sizes = layer(config, width, EXPERTS, slots)
        pages = (slots // 32, 1, 32, config.cache_dim // 2), BF16
        inputs = {"hidden": ((1, config.hidden_size), F32), "projected": ((1, config.qkv_a_dim), F32)}
        tensors = {
            **drawn({**sizes, "latents": pages, "keys": pages, **inputs}, draw),
            "rotation": torch.ones(2, config.qk_rope_head_dim, 1) * 0.5**0.5,
            "lengths": torch.tensor([[3000]], dtype=torch.int32),
            "runs": torch.randperm(slots // RUN, generator=draw).to(torch.int32)[None],
            "first_expert": torch.zeros(1, 1, dtype=torch.int32),
        }
        tensors["bias"][:, :EXPERTS] += 2.0  # those that the recording has
        if local < count:
            tensors["bias"][:, -EXPERTS:] += 2.0
        arguments = {**numbers(config), "each": RUN, "ranks": RANKS, "groups": [[0]]}
        arguments["num_experts"] = EXPERTS if local == count else count
        yield Case(name, tensors, arguments)


def record(directory: Path, config: KimiK2Config, cores: int) -> None:
    """Run all cases on the emulator; inputs and results go to `directory`."""
    tensors: dict[str, Tensor] = {}
    listed = []
    for number, case in enumerate(cases(config)):
        results = _call(case, cores, emulated=True)
        tensors |= {f"{number}.input.{name}": tensor.contiguous() for name, tensor in case.tensors.items()}
        tensors |= {f"{number}.result.{index}": tensor for index, tensor in enumerate(results)}
        counts = {"inputs": list(case.tensors), "results": len(results)}
        listed.append({"name": case.name, "arguments": case.arguments} | counts)
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / TENSORS, save(tensors))
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


def compare_kernels(directory: Path) -> Iterator[tuple[str, float]]:
    """Run the recorded cases with the `nki` that is importable here: name and relative L2 difference to the emulator.

    The difference is of the result that differs most; NaN is not within TOLERANCE.

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
        tensors = {name: stored[f"{number}.input.{name}"] for name in call["inputs"]}
        case = Case(call["name"], tensors, call["arguments"])
        results = _call(case, cores, emulated)
        wanted = [stored[f"{number}.result.{index}"] for index in range(call["results"])]
        yield call["name"], max(map(_difference, results, wanted))


def _difference(actual: Tensor, wanted: Tensor) -> float:
    """Relative L2; of integers 0 if equal, else 1."""
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(actual.to(wanted.dtype), wanted) else 1.0
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def _call(case: Case, cores: int, emulated: bool) -> list[Tensor]:
    kernel = import_module(f"kimi_k2.nki.kernels.{MODULES['decode_layer']}").decode_layer[cores]
    if emulated:
        inputs: Arguments = {name: emulated_fp8(tensor) for name, tensor in case.tensors.items()}
    else:
        import torch_xla

        inputs = {name: tensor.to(torch_xla.device()) for name, tensor in case.tensors.items()}
    groups = tuple(map(tuple, case.arguments["groups"]))
    return [torch_tensor(result).cpu() for result in kernel(**inputs, **{**case.arguments, "groups": groups})]


if __name__ == "__main__":
    install(force=True)
    record(Path(sys.argv[1]), KimiK2Config.load(sys.argv[2]), int(sys.argv[3]))
