"""Our NKI kernels in the model, on the emulator: the same tokens, and the line's check decides."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import line
import ml_dtypes
import pytest
import torch
from torch import Tensor

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config
from nki_emulator import install

# What the kernels take: eight experts a token, 64 columns a rank, whole partitions.
SIZES: dict[str, Any] = {
    "num_experts_per_tok": 8, "kv_lora_rank": 128, "num_hidden_layers": 2, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiled")
    write_synthetic_checkpoint(directory, tiny_config("kimi-k2-instruct-0905", **SIZES), seed=4)
    return directory


def to_kernel(value: Any) -> Any:
    """Trainium's name for e4m3 below 256, and NumPy for the rest."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.float8_e4m3fn:
        return value.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)
    return value.contiguous()


@pytest.mark.parametrize("runs", [True, False])
def test_kernels_give_the_plain_models_tokens(tiled: Path, monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """TP2 x EP2 in FP8 tiles with the shared expert in them; a step of one line chooses few enough experts."""
    calls: list[str] = []

    def wrap_nki(kernel: Any) -> Any:
        class Launch:
            def __getitem__(self, cores: int) -> Any:
                def call(*arguments: Any, **named: Any) -> Any:
                    calls.append(kernel.__name__)
                    made = kernel[cores](*map(to_kernel, arguments), **{k: to_kernel(v) for k, v in named.items()})
                    parts = [torch.as_tensor(part) for part in (made if isinstance(made, tuple | list) else [made])]
                    return parts if len(parts) > 1 else parts[0]

                return call

        return Launch()

    install()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    modules = line.stand_ins()
    for name in ("vllm_neuron.utils.neuron_utils", "libtorch_neuronx_lite.nki.nki_hop"):  # as 0.24 has them
        for end in range(1, name.count(".") + 2):
            modules.setdefault(path := ".".join(name.split(".")[:end]), ModuleType(path))
    vars(modules["vllm_neuron.utils.neuron_utils"])["can_run_kernel"] = lambda tensor: runs
    vars(modules["libtorch_neuronx_lite.nki.nki_hop"])["wrap_nki"] = wrap_nki
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    drawn = [[token % 200 for token in prompt] for prompt in line.prompts(tiled)[:2]]
    monkeypatch.setattr(line, "prompts", lambda directory: drawn)
    wanted = line.plain_tokens(tiled)
    for rank in line.served(tiled, tp=2, ep=1, held="tiles", width=32):
        assert rank == wanted
    expected = {"noaux_tc_router", "selective_experts", "mla_decode_pages"} if runs else set()
    assert set(calls) == expected
