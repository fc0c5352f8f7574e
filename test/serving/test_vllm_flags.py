"""Arguments of vLLM's where our model serves: obeyed, left to vLLM's model with the reason, or without effect."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.serving.vllm import flags

GROUPS = [flags.OBEYED, flags.WITHOUT_EFFECT, flags.OF_OTHERS, flags.NOT_COMPILED, flags.DECIDED_LATER, flags.VLLMS]


@dataclass
class Compilation:
    mode: int | None = None
    cudagraph_mode: str | None = None


@dataclass
class Arguments:
    """Some of vLLM's, and one of a version to come."""

    model: str = "m"
    max_num_seqs: int | None = None
    attention_backend: str | None = None
    cpu_offload_gb: float = 0
    load_format: str = "auto"
    quantization: str | None = None
    tomorrows: int = 3
    compilation_config: Compilation = field(default_factory=Compilation)
    weight_transfer_config: Any = None
    kv_transfer_config: Any = None


@pytest.mark.parametrize(
    ("changed", "vllms", "unused"),
    [
        ({}, [], []),
        ({"model": "other", "max_num_seqs": 4, "load_format": "dummy"}, [], []),
        ({"attention_backend": "TRITON_MLA"}, ["--attention-backend TRITON_MLA"], []),
        ({"cpu_offload_gb": 4}, ["--cpu-offload-gb 4"], []),
        ({"load_format": "sharded_state"}, ["--load-format sharded_state"], []),
        ({"tomorrows": 4}, ["--tomorrows 4, which this version of the plugin does not know"], []),
        ({"tomorrows": 3}, [], []),
        ({"compilation_config": Compilation(cudagraph_mode="FULL")}, [], []),
        ({"compilation_config": Compilation(mode=3)}, [], ["--compilation-config.mode 3"]),
        ({"compilation_config": {"mode": 3}}, [], ["--compilation-config.mode 3"]),
        ({"weight_transfer_config": {"backend": "nccl"}}, [], []),
        ({"weight_transfer_config": {"backend": "m2n"}}, ["--weight-transfer-config.backend m2n"], []),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, [], []),
        ({"kv_transfer_config": {"kv_connector": "Other"}}, ["--kv-transfer-config.kv_connector Other"], []),
        ({"weight_transfer_config": {"other": 1}}, ["--weight-transfer-config.other 1"], []),
    ],
)
def test_judged(changed: dict[str, Any], vllms: list[str], unused: list[str]) -> None:
    assert flags.judged(Arguments(**changed)) == {"vllm": vllms, "unused": unused, "quantization": []}


def test_every_argument_is_in_one_group() -> None:
    names = [name for group in GROUPS for name in group]
    assert sorted(names) == sorted(set(names))


def test_an_engine_version_is_one_file() -> None:
    """A version with one more argument: a word in flags.py."""
    path = Path(flags.__file__)
    source = path.read_text(encoding="utf-8").replace('OBEYED = _names("""', 'OBEYED = _names("""tomorrows', 1)
    toy: dict[str, Any] = {"__name__": "toy_flags"}
    exec(compile(source, "toy_flags.py", "exec"), toy)
    assert toy["judged"](Arguments(tomorrows=4))["vllm"] == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (docs/engines.md)")
def test_every_argument_of_the_installed_version() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = [one.name for one in dataclasses.fields(AsyncEngineArgs)]
    assert [name for name in names if not flags.known(name)] == []
    assert len(names) > 200
    assert flags.judged(AsyncEngineArgs(model="m")) == {"vllm": [], "unused": [], "quantization": []}
    asked = AsyncEngineArgs(model="m", cpu_offload_gb=1, kv_offloading_size=2, attention_backend="TRITON_MLA")
    found = flags.judged(asked)["vllm"]
    assert [text.split()[0] for text in found] == ["--cpu-offload-gb", "--attention-backend", "--kv-offloading-size"]
