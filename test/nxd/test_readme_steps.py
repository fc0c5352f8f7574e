"""Steps 1 to 6 of docs/trainium.md on a tiny checkpoint, compiler and device mocked; step 7 is test_vllm.py's."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import Stored, copied
from harness import command, plain_model
from reference import greedy, reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        self.env: dict[str, Any] = {
            "PYTHONPATH": python,
            "PATH": path,
            "BASE_COMPILE_WORK_DIR": str(root / "work") + "/",
        }

    def __call__(self, *words: str | Path | int, **env: Any) -> str:
        """Standard output of a module or script, and its words."""
        return command(*words, program=[str(MOCKED)], **{**self.env, **env})


@torch.inference_mode()
def sure_reply(checkpoint: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of the plain model up to the first that BF16 could turn: its logit leads by less than 0.15."""
    model = plain_model(checkpoint)
    tokens = generate(model, [prompt], SamplingParams(STEPS, ignore_eos=True))[0]
    best = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].topk(2).values
    leads = (best[:, 0] - best[:, 1] >= 0.15).tolist()
    return tokens[: leads.index(False)] if False in leads else tokens


def test_from_a_checkpoint_to_text(fp8: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    source, ranks, model = fp8, tmp_path / "presharded", tmp_path / "model"
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


def test_the_folders_own_tests(stored: Stored, tmp_path: Path) -> None:
    """Of a copy, on what its examples/compile.py compiled; a model with random weights does not know the capitals.

    The weights are BF16's; in float32 the logits are transformers', by NxDI's tool.
    """
    machine, model, compiled = Machine(tmp_path), tmp_path / "model", tmp_path / "compiled"
    folder, golden = copied(tmp_path), tmp_path / "golden"
    shutil.copytree(stored(num_hidden_layers=2, vocab_size=1024), model)  # of which NxDI compares the first 1,000
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    text = Tokenizer(models.BPE(letters, []))
    text.pre_tokenizer, text.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=text, eos_token="!", chat_template=template).save_pretrained(model)
    sizes = ("--tp-degree", 1, "--moe-ep-degree", 1, "--experts", "bf16", "--seq-len", 150, "--max-context-length", 144)
    machine(folder / "examples" / "compile.py", model, compiled, *sizes, "--output-logits")
    saved = compiled / "neuron_config.json"
    saved.write_text(saved.read_text().replace('"torch.bfloat16"', '"torch.float32"').replace("bfloat16", "float32"))
    prompt = list(range(5, 25))
    torch.save({"prompt": prompt, "logits": greedy(reference(model), prompt, 8)[1][:, None]}, golden)
    tests = ("pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder)
    on_device = {"KIMI_K2_MODEL": model, "KIMI_K2_COMPILED": compiled, "KIMI_K2_GOLDEN": golden}
    integration = folder / "test" / "integration"
    assert "8 passed, 5 deselected" in machine(*tests, integration, "-k", "not coherence", **on_device)
    with pytest.raises(AssertionError, match="5 failed"):
        machine(*tests, integration / "test_coherence.py", **on_device)
    assert " passed" in machine(*tests, folder / "test" / "unit")
