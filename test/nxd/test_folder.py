"""The folder of a pull request to NxDI, copied elsewhere, real NxD, no `kimi_k2`; beside transformers' model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import schedule
import torch
from safetensors.torch import load_file, save_file

from kimi_k2.config import KimiK2Config
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

SOURCE = Path(__file__).parents[2] / "contrib" / "models" / "Kimi-K2-Instruct-0905"
LAYOUTS = {**harness.LAYOUTS, "EP4": (1, 4)}
WORKER = Path(__file__).with_name("folder_worker.py")
EXECUTED = Path(__file__).with_name("folder_executed_worker.py")
BLOCKS: dict[str, Any] = {"quantized": True, "quantization_type": "blockwise_symmetric"}
# More experts than a step has choices, so that they are loaded selectively; odd heads, and blocks that end part empty.
ODD: dict[str, Any] = {
    "n_routed_experts": 24, "hidden_size": 320, "moe_intermediate_size": 192, "num_attention_heads": 12,
    "num_key_value_heads": 12, "v_head_dim": 24,
}  # fmt: skip


def options_of(layout: str, batch: int, **options: Any) -> dict[str, Any]:
    """Options of NxDI for a layout; blocks of 16 tokens take prefill through them."""
    blockwise = {"blockwise_matmul_config": {"block_size": 16}}
    return {**harness.neuron_config(*LAYOUTS[layout], batch), **blockwise, **options}


def copied(directory: Path) -> Path:
    """contrib/models/NAME of a checkout that has nothing else."""
    path = directory / "neuronx-distributed-inference" / "contrib" / "models" / SOURCE.name
    shutil.copytree(SOURCE, path, ignore=shutil.ignore_patterns("__pycache__"))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("copied"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a checkpoint in a stored form."""
    made: dict[str, Path] = {}

    def get(form: str, config: KimiK2Config) -> Path:
        if form not in made:
            made[form] = tmp_path_factory.mktemp(form)
            write_synthetic_checkpoint(made[form], with_format(config, form), seed=3)
        return made[form]

    return get


def plain(checkpoint: Path, directory: Path) -> Path:
    """The checkpoint dequantized to float32, by arithmetic that is written out here, for transformers to load."""
    directory.mkdir()
    stored: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        stored |= load_file(file)
    found = {}
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            rows, columns = stored[f"{module}.weight_shape"].tolist()
            nibbles = torch.stack([(tensor >> shift) & 15 for shift in range(0, 32, 4)], dim=-1)
            values = nibbles.reshape(rows, -1)[:, :columns].float() - 8
            found[f"{module}.weight"] = values * stored[f"{module}.weight_scale"].float().repeat_interleave(32, 1)
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = stored.get(f"{module}.weight_scale_inv", stored.get(f"{module}.weight_scale"))
            assert scale is not None
            if scale.shape[1] > 1 or len(scale) < len(tensor):
                scale = scale.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
            found[name] = tensor.float() * scale.float()
        elif not suffix.startswith("weight_"):
            found[name] = tensor.float()
    save_file(found, directory / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("form", "layout", "batch", "options"),
    [
        ("bf16", "TP1", 4, {}),
        ("bf16", "TP2", 1, {}),
        ("fp8", "EP2", 1, BLOCKS),
        ("fp8", "TP2xEP2", 4, BLOCKS),
        ("fp8-channel", "TP4", 1, {}),
        ("int4", "EP2", 4, {}),
    ],
)
def test_logits(
    form: str, layout: str, batch: int, options: dict[str, Any], folder: Path, stored: Any, tmp_path: Path
) -> None:
    checkpoint = stored(form, tiny_config(**ODD))
    reference = load_transformers_model(plain(checkpoint, tmp_path / "plain"))
    case = harness.sequences(batch, 512, steps=6)
    neuron = options_of(layout, batch, **options)
    job = {"checkpoint": str(checkpoint), "neuron_config": neuron, "cases": [case]}
    head = {"folder": str(folder), "checkpoint": "", "neuron_config": neuron}
    ((found,),) = harness.launch({**head, "jobs": [job]}, tmp_path, WORKER)
    harness.check(f"{form} {layout}", found, harness.expected_logits(reference, case))
    assert torch.isfinite(found).all()


def test_lines_in_any_order(folder: Path, stored: Any, tmp_path: Path) -> None:
    """Prompts arrive one by one, one of a single token; steps take some cache lines, or all, in any order."""
    checkpoint = stored("fp8", tiny_config(**ODD))
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 512, (40,), generator=generator).tolist() for _ in range(4)]
    script = schedule.some_lines(rows, [11, 1, 7, 19])
    neuron = options_of("EP2", 4, **BLOCKS, is_continuous_batching=True)
    job = {"checkpoint": str(checkpoint), "neuron_config": neuron, "cases": [{"steps": script.steps}]}
    head = {"folder": str(folder), "checkpoint": "", "neuron_config": neuron}
    ((found,),) = harness.launch({**head, "jobs": [job]}, tmp_path, WORKER)
    reference = load_transformers_model(plain(checkpoint, tmp_path / "plain"))
    expected = schedule.expected(lambda ids: reference(ids).logits, script.of)
    harness.check("lines in any order", found, expected)


@pytest.mark.parametrize(
    ("form", "layout", "batch", "options"),
    [("bf16", "TP1", 1, {}), ("fp8", "TP2xEP2", 1, BLOCKS)],
)
def test_bf16_graphs(form: str, layout: str, batch: int, options: dict[str, Any], stored: Any, tmp_path: Path) -> None:
    """As the compiler gets them, executed: no farther from float32 than transformers' own BF16 is.

    In the median: where a choice of experts is nearly a tie, rounding makes another, and a step is off by a third.
    """
    checkpoint = stored(form, tiny_config(**ODD))
    directory = plain(checkpoint, tmp_path / "plain")
    case: dict[str, Any] = harness.sequences(batch, 512, steps=12)
    expected = harness.expected_logits(load_transformers_model(directory), case)
    theirs = harness.expected_logits(load_transformers_model(directory, torch.bfloat16), case)
    if batch > 1:
        case["arrival"] = [2, 0, 3, 1]
    neuron = options_of(layout, batch, torch_dtype="bfloat16", **options)
    job = {"checkpoint": str(checkpoint), "neuron_config": neuron, "cases": [case]}
    (found,) = harness.execute(job, tmp_path / "run", EXECUTED)
    own, other = (harness.distances(one, expected).median() for one in (found, theirs))
    print(f"\n{form} {layout}: relative distance to float32 {own:.4f}, transformers' BF16 {other:.4f}")
    assert own <= other


def test_its_own_tests(folder: Path) -> None:
    """Unit tests run here; those of a device are skipped with the reason."""
    command = [sys.executable, str(WORKER), "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", ".", "test"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"4\d passed, 13 skipped", done.stdout), done.stdout[-500:]
    assert "needs a trn2.48xlarge, KIMI_K2_MODEL and KIMI_K2_COMPILED" in done.stdout
