"""LoRA serving of NxDI on the projections that it can wrap, against the plain model with merged weights; float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import WAYS, check, neuron_config, plain_model, sequences
from safetensors.torch import save_file

from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

RANK, ALPHA = 4, 16
CHOSEN = [1, 0, 1, 1]  # adapter of each sequence
TARGETS = ("q_b_proj", "o_proj")


def write_adapter(directory: Path, model: KimiK2ForCausalLM, seed: int, targets: tuple[str, ...] = TARGETS) -> None:
    """A PEFT adapter with weights large enough to change every logit."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():
        path, _, module = name.removesuffix(".weight").rpartition(".")
        if module in targets and path.endswith("self_attn"):
            rows, columns = parameter.shape
            stem = f"base_model.model.{path}.{module}"
            tensors[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(RANK, columns, generator=draw)
            tensors[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=draw)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets)}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def merged(source: Path, adapter: Path) -> KimiK2ForCausalLM:
    """The plain model with W + alpha / r B A in place of each adapted W."""
    from safetensors.torch import load_file

    model, tensors = plain_model(source), load_file(adapter / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    for name, left in tensors.items():
        if ".lora_B." in name:
            right = tensors[name.replace(".lora_B.", ".lora_A.")]
            weight = parameters[name.removeprefix("base_model.model.").replace(".lora_B", "")]
            weight.data += ALPHA / RANK * left @ right
    return model


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("lora"))


def write_all(root: Path) -> dict[str, Path]:
    """Checkpoints and adapters by name."""
    root.mkdir(exist_ok=True)
    write_synthetic_checkpoint(root / "source", with_format(tiny_config(num_hidden_layers=2), "bf16"), seed=12)
    write_synthetic_checkpoint(root / "fp8", tiny_config(num_hidden_layers=2), seed=12)
    model = plain_model(root / "source")
    for seed, name in enumerate(("first", "second")):
        write_adapter(root / name, model, seed)
    write_adapter(root / "other", model, 2, targets=("kv_b_proj",))
    return {path.name: path for path in root.iterdir()}


def job(adapters: dict[str, Path], source: str, tp: int, ep: int) -> tuple[dict[str, Any], torch.Tensor]:
    case = sequences(4, 512, steps=6)
    paths = {name: str(adapters[name]) for name in ("first", "second")}
    lora = {"max_loras": 2, "max_lora_rank": RANK, "batch_size": 4, "target_modules": list(TARGETS)}
    neuron = neuron_config(tp, ep, 4, torch_dtype="float32", lora_config={**lora, "lora_ckpt_paths": paths})
    if source == "fp8":
        experts = expert_formats()["blockwise"].for_layout(tiny_config(), Layout(tp, ep))
        neuron |= experts.neuron_options()
    models = [merged(adapters[source], adapters[name]) for name in ("first", "second")]
    with torch.inference_mode():
        columns = [
            models[which](torch.tensor([prompt + forced]))[0, len(prompt) - 1 :]
            for which, prompt, forced in zip(CHOSEN, case["prompts"], case["forced"], strict=True)
        ]
    made = {"checkpoint": str(adapters[source]), "neuron_config": neuron, "cases": [{**case, "adapters": CHOSEN}]}
    return made, torch.stack(columns, dim=1)


@pytest.mark.parametrize(("way", "source", "tp", "ep", "decode"), [
    ("CPU mode", "source", 2, 1, "layers"), ("CPU mode", "fp8", 1, 2, "layers"), ("executed", "source", 1, 2, "xla"),
])  # fmt: skip
def test_each_sequence_has_its_adapter(
    adapters: dict[str, Path], tmp_path: Path, way: str, source: str, tp: int, ep: int, decode: str
) -> None:
    """FP8 experts stay as they are; the adapted projections are never quantized. Decode falls to XLA's form."""
    made, plain = job(adapters, source, tp, ep)
    made["neuron_config"]["decode"] = decode
    (logits,) = WAYS[way](made, tmp_path)["logits"]
    check(f"{way}, {source}, TP{tp} x EP{ep}", logits, plain)


def test_decode_falls_to_xla_for_adapters_alone(adapters: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    lora = {"batch_size": 4, "target_modules": list(TARGETS), "lora_ckpt_paths": {"one": str(adapters["first"])}}
    tiles = expert_formats()["tiles"].for_layout(tiny_config(moe_intermediate_size=64), Layout(1, experts="tiles"))
    given = neuron_config(1, 1, 4, decode="layers", decode_layers_per_kernel=2, seq_len=256, **tiles.neuron_options())
    neuron = environment.contrib("config").KimiK2NeuronConfig
    assert neuron(**given).decode == "layers"
    made = neuron(**given, lora_config=lora)
    assert (made.decode, made.decode_layers_per_kernel, made.quantization_block_size) == ("xla", None, None)
    assert "decode runs in XLA form" in caplog.text
    served = environment.contrib("serving").ServedNeuronConfig
    batch = {"tp_degree": 64, "batch_size": 1, "save_sharded_checkpoint": False}
    one = served(preset="trn2-tp64-ep1-nki-layers", lora_config={**lora, "batch_size": 1}, **batch)
    assert (one.decode, one.experts) == ("xla", "blockwise")


@pytest.mark.parametrize(("given", "field"), [
    ({"lora_ckpt_paths": "other"}, "target_modules.*absorbed"),
    ({"dynamic_multi_lora": True}, "dynamic_multi_lora"),
    ({"batch_size": 2}, "lora_config.batch_size"),
])  # fmt: skip
def test_what_cannot_be_adapted_is_refused(adapters: dict[str, Path], given: dict[str, Any], field: str) -> None:
    options: dict[str, Any] = {"max_loras": 1, "batch_size": 4, "target_modules": list(TARGETS), **given}
    options["lora_ckpt_paths"] = {"one": str(adapters[options.get("lora_ckpt_paths", "first")])}
    with pytest.raises(ConfigError, match=field):
        environment.contrib("config").KimiK2NeuronConfig(**neuron_config(1, 1, 4, lora_config=options))


def test_presharded_files_hold_no_adapters(adapters: dict[str, Path]) -> None:
    lora = {"batch_size": 4, "target_modules": list(TARGETS), "lora_ckpt_paths": {"one": str(adapters["first"])}}
    options = neuron_config(1, 1, 4, lora_config=lora, save_sharded_checkpoint=True)
    with pytest.raises(ConfigError, match="save_sharded_checkpoint"):
        environment.contrib("config").KimiK2NeuronConfig(**options)
