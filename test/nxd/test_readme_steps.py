"""Steps 1 to 6 of docs/trainium.md on a tiny checkpoint, compiler and device mocked; step 7 is test_vllm.py's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from harness import plain_model

from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.neuron import sdk
from kimi_k2.tokenization.tokenizer import KimiTokenizer

MOCKED = Path(__file__).with_name("mocked_neuron.py")
PRESET = {
    "instance": "trn2.48xlarge", "experts": "blockwise", "tp_degree": 1, "moe_tp_degree": 1, "moe_ep_degree": 1,
    "torch_dtype": "bfloat16", "batch_size": 1, "seq_len": 96, "max_context_length": 96,
    "neuron_config": {
        "enable_bucketing": False,
        "blockwise_matmul_config": {
            "block_size": 16,
        },
    },
}  # fmt: skip
PROMPT, STEPS = "The capital of France is", 12


class Machine:
    """Runs commands as on a machine with a Neuron SDK."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tools = root / "bin"
        tools.mkdir()
        compiler = tools / "neuronx-cc"
        compiler.write_text("#!/bin/sh\nexit 1\n")  # never run: ModelBuilder is mocked
        compiler.chmod(0o755)
        # What check_sdk asks importlib.metadata for; NxD's source carries no metadata of its own.
        for pin in sdk.releases()[0].python:
            name, version = pin.name, str(pin.specifier)[2:]
            if name != "transformers":
                info = root / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
                info.mkdir(parents=True)
                (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        python = os.pathsep.join([str(root / "site"), *(path for path in sys.path if path)])
        env = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "MASTER_PORT")}
        paths = {"PYTHONPATH": python, "PATH": f"{tools}{os.pathsep}{env['PATH']}"}
        self.env = {**env, **paths, "OMP_NUM_THREADS": "1", "BASE_COMPILE_WORK_DIR": str(root / "work") + "/"}

    def __call__(self, kind: str, /, *words: str | Path | int, **env: str | Path) -> str:
        """Standard output of `kimi-k2 WORDS` or `pytest WORDS`."""
        command = [sys.executable, str(MOCKED), kind, *(str(word) for word in words)]
        settings = {**self.env, **{name: str(value) for name, value in env.items()}}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@torch.inference_mode()
def sure_reply(checkpoint: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of the plain model up to the first that BF16 could turn: its logit leads by less than 0.15."""
    model = plain_model(checkpoint)
    tokens = generate(model, [prompt], SamplingParams(STEPS, ignore_eos=True)).token_ids[0]
    best = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].topk(2).values
    leads = (best[:, 0] - best[:, 1] >= 0.15).tolist()
    return tokens[: leads.index(False)] if False in leads else tokens


def test_from_a_checkpoint_to_text(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    source, ranks, model = checkpoints["fp8"], tmp_path / "presharded", tmp_path / "model"
    preset = tmp_path / "tiny.yaml"
    preset.write_text(yaml.safe_dump(PRESET))

    # 1. Plan.
    assert "GiB" in machine("cli", "plan", source, "--preset", preset)
    # 2. Convert and verify.
    machine("cli", "convert", source, ranks, "--tp", "1", "--experts", "blockwise")
    machine("cli", "verify", ranks)
    # 3. Copy: no weights of the checkpoint are needed from here on.
    model.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, model)
    # 4. Compile, and once more: nothing is left to do.
    compile_it = ("compile", model, "--preset", preset, "--out", ranks)
    machine("cli", *compile_it)
    assert json.loads((ranks / "compile.json").read_text())["complete"]
    graphs = json.loads((tmp_path / "work" / "graphs.json").read_text())
    assert set(graphs) == {"context_encoding_model", "token_generation_model"}
    assert "nothing to do" in machine("cli", *compile_it)
    # Without weights a compilation of an hour would end in an error: it is refused before, and takes converted ones.
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(AssertionError, match="no weights"):
        machine("cli", *compile_it[:-1], elsewhere)
    machine("cli", *compile_it[:-1], elsewhere, "--weights", ranks)
    # Graphs that return logits, for NxDI's tolerances in float32; here compile shards the weights itself.
    exact, with_logits = tmp_path / "exact.yaml", tmp_path / "with-logits"
    exact.write_text(yaml.safe_dump({**PRESET, "torch_dtype": "float32"}))
    capture_it = ("compile", source, "--preset", exact, "--out", with_logits)
    machine("cli", *capture_it, "--capture-layers", "0,1")
    # 5. Load and test, with the golden artifacts of one command.
    golden = tmp_path / "golden"
    capture = ("parity", "capture", source, golden, "--greedy", "--prompt-length", "16", "--steps", "8")
    machine("cli", *capture, "--layers", "0,1")
    tokenizer = KimiTokenizer.from_pretrained(source)
    tokens = sure_reply(source, tokenizer.encode(PROMPT))
    assert len(tokens) >= 2
    reply = tokenizer.decode(tokens)
    compare = ("parity", "compare", golden, source, "--backend", "neuron", "--preset", exact, "--compiled", with_logits)
    machine("cli", *compare)  # its exit status is 0 only if no point diverges
    # 6. Generate and measure.
    asked = ("generate", model, "--raw", "--prompt", PROMPT, "--max-new-tokens", STEPS)
    compiled = ("--backend", "neuron", "--preset", preset, "--compiled", ranks)
    assert machine("cli", *asked, *compiled).startswith(reply)
    lengths = ("--output-lengths", "4,8", "--prompt-lengths", "16", "--runs", "1", "--out", tmp_path / "bench")
    machine("cli", "bench", model, *compiled, *lengths)
    cells = json.loads((tmp_path / "bench" / "sweep.json").read_text())["cells"]
    assert [cell["status"] for cell in cells] == ["ok", "ok"]


def test_a_machine_without_the_compiler_is_told_so(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "bin" / "neuronx-cc").unlink()
    with pytest.raises(AssertionError, match="no Neuron compiler"):
        machine("cli", "compile", "kimi-k2-instruct-0905", "--preset", "trn2-tp64-ep1-1k", "--out", tmp_path)
