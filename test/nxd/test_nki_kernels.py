"""Decode with NKI kernels in NxD's CPU mode, on the emulator: the same logits as the plain model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import LINES
from harness import (
    DECODE_STEPS,
    LAYOUTS,
    check,
    expected_logits,
    launch,
    neuron_config,
    plain_model,
    refused_field,
    sequences,
)

from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

# By what they run in; a step's router takes logits that an all-reduce has summed.
KERNELS = {"router": "noaux_tc_choice", "attention": "mla_decode", "experts": "selective_experts"}
ALL = list(KERNELS)
SLOTS = 256  # the least that the attention kernel takes at LNC=2
# Sizes that the kernels take: 64 columns of an expert on one rank, 32 on each of two; so many experts that four tokens
# choose fewer than a rank of EP2 holds.
SIZES: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 72,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 128,
}
CONFIG = tiny_config(**SIZES, qk_rope_head_dim=32)


def store(root: Path) -> dict[str, Path]:
    """Checkpoints of CONFIG by format, written under `root`."""
    for fmt in ("bf16", "fp8"):
        write_synthetic_checkpoint(root / fmt, with_format(CONFIG, fmt), seed=5)
    return {fmt: root / fmt for fmt in ("bf16", "fp8")}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in BF16 and in FP8 blocks."""
    return store(tmp_path_factory.mktemp("kernels"))


def options(layout: str, cores: int, fmt: str = "bf16", **more: Any) -> dict[str, Any]:
    """Of decode on kernels, with experts in tiles."""
    tp, ep = LAYOUTS[layout]
    name = "tiles" if fmt == "fp8" else "bf16_tiles"
    held = expert_formats()[name].for_layout(CONFIG, Layout(tp, ep, experts=name)).neuron_options()
    given = {"seq_len": SLOTS, "decode": "kernels", "logical_nc_config": cores, **held, **more}
    return neuron_config(tp, ep, 4, **given)


def check_kernels(
    checkpoint: Path,
    neuron: dict[str, Any],
    directory: Path,
    kernels: list[str],
    *,
    names: dict[str, str] | None = None,
    without: tuple[str, ...] = (),
    **case: Any,
) -> None:
    """Every step's logits and choice; each kernel (of KERNELS, or `names`) ran once a layer that has it, every step.

    Those of KERNELS that are not in `kernels` ran never.
    """
    drawn: dict[str, Any] = {**sequences(4, 512), **case}
    job = {"checkpoint": checkpoint, "neuron_config": neuron, "cases": [drawn], "without": without}
    result = launch(job, directory, timeout=1500)
    (logits,) = result["logits"]
    plain = expected_logits(plain_model(checkpoint), drawn)
    # Beside FP8 tiles too: the kernel multiplies float32 as two BF16 parts.
    check(f"{directory.name}, kernels {result['kernels']}", logits, plain)
    moe = sum(CONFIG.is_moe_layer(layer) for layer in range(CONFIG.num_hidden_layers))
    layers = {"router": moe, "attention": CONFIG.num_hidden_layers, "experts": moe}
    called = {**KERNELS, **(names or {})}
    for name in KERNELS:
        assert result["kernels"].get(called[name], 0) == (DECODE_STEPS * layers[name] if name in kernels else 0)


@pytest.mark.parametrize(
    ("layout", "cores", "fmt"),
    [
        ("TP1", 1, "bf16"),
        ("TP1", 2, "fp8"),
        ("TP2", 2, "bf16"),
        ("TP2", 2, "fp8"),
        ("EP2", 2, "bf16"),
        ("EP2", 2, "fp8"),
    ],
)
def test_prefill_and_16_steps(stored: dict[str, Path], tmp_path: Path, layout: str, cores: int, fmt: str) -> None:
    check_kernels(stored[fmt], options(layout, cores, fmt), tmp_path, ALL)


FEATURES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "continuous batching": ("EP2", LINES, ALL),
    "sequence parallelism": ("TP2", {"sequence_parallel_enabled": True}, ALL),
    "flash decoding": ("TP2", {"flash_decoding_enabled": True, "seq_len": 2 * SLOTS}, ALL),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("without", [(), ("NkiKernel",)], ids=["kernels", "their PyTorch forms"])
def test_together_with(stored: dict[str, Path], tmp_path: Path, feature: str, without: tuple[str, ...]) -> None:
    """Sequences arrive in any order; the cache is longer than the slots that a step reads.

    What stands for a kernel that does not take a call computes the same.
    """
    layout, more, kernels = FEATURES[feature]
    case: dict[str, Any] = {"arrival": [2, 0, 3, 1]} if more is LINES else {}
    given = options(layout, 2, **more)
    check_kernels(stored["bf16"], given, tmp_path, [] if without else kernels, without=without, **case)


@pytest.mark.parametrize("layout", ["TP1", "TP2", "EP2"])
def test_the_forms_in_pytorch(stored: dict[str, Path], tmp_path: Path, layout: str) -> None:
    check_kernels(stored["fp8"], options(layout, 2, "fp8"), tmp_path, [], without=("NkiKernel",))


@pytest.mark.parametrize("layout", ["TP2", "EP2"])
def test_a_shared_expert_of_three_linears(tmp_path: Path, layout: str) -> None:
    """As INT4 checkpoints have it; here its width is none that the kernel takes."""
    config = CONFIG.model_copy(update={"n_shared_experts": 3})
    write_synthetic_checkpoint(tmp_path / "source", with_format(config, "bf16"), seed=5)
    check_kernels(tmp_path / "source", options(layout, 2), tmp_path, ALL)


TORCH = {"block_size": 16, "use_torch_block_wise": False}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("decode", {"decode": "fast"}),
    ("rpl_reduce_dtype", {"rpl_reduce_dtype": "bfloat16"}),
    ("seq_len", {"seq_len": 128 * 3}),
    ("token_generation_buckets", {"token_generation_buckets": [128, 256]}),
    ("seq_len", {"flash_decoding_enabled": True, "tp_degree": 2, "moe_tp_degree": 2}),
    ("quantization_type", {"quantized": True, "quantization_type": "expert_wise_per_channel_symmetric"}),
    ("blockwise_matmul_config.use_torch_block_wise", {"blockwise_matmul_config": TORCH}),
]


@pytest.mark.parametrize(("field", "more"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_kernels_do_not_follow_is_refused(field: str, more: dict[str, Any]) -> None:
    assert refused_field(options("TP1", 2, **more)) == field


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("moe_intermediate_size", {"moe_intermediate_size": 128}),
        ("num_experts_per_tok", {"num_experts_per_tok": 4}),
        ("kv_lora_rank", {"kv_lora_rank": 64}),
        ("hidden_size", {"hidden_size": 384}),
    ],
)
def test_sizes_that_kernels_do_not_take_are_refused(field: str, sizes: dict[str, int]) -> None:
    assert refused_field(options("TP1", 2), tiny_config(**{**SIZES, **sizes})) == field


def test_the_first_hours_commands_of_the_docs(tmp_path: Path) -> None:
    """Those of docs/trainium.md that need no machine and no real checkpoint, as they stand there."""
    text = (Path(__file__).parents[2] / "docs" / "trainium.md").read_text()
    section = text.split("## Decode on NKI kernels: the first hour\n")[1].split("\n## ")[0]
    lines = [
        line.strip() for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()
    ]
    real = ("/models", "/presharded")
    here = [line for line in lines if line.startswith("kimi-k2 ") and not any(path in line for path in real)]
    assert len(here) == 5
    (edit,) = [line for line in lines if line.startswith("sed ")]
    subprocess.run(edit.replace("/tmp/", f"{tmp_path}/"), shell=True, check=True, cwd=Path(__file__).parents[2])
    run = [sys.executable, "-c", "from kimi_k2.cli import main; main()"]
    env = {name: value for name, value in os.environ.items() if name != "NXD_CPU_MODE"}
    for line in here:
        words = shlex.split(line.replace("/tmp/", f"{tmp_path}/"))[1:]
        done = subprocess.run([*run, *words], capture_output=True, text=True, timeout=1500, env=env)
        print(f"\n$ {line}\n{done.stdout[-1500:]}")
        # Without a Neuron SDK the doctor's status says what is missing.
        assert done.returncode == 0 or words == ["doctor"], done.stderr[-3000:]
