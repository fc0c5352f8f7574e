"""LoRA serving of NxDI on the projections that it can wrap, against the plain model with merged weights; float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import schedule
import torch
from adapters import merge, write_adapter
from applications import answers
from cases import Case, Stored, job
from harness import check, launch, neuron_config, plain_model

from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.config import tiny_config

RANK = 4
CHOSEN = [1, 0, 1, 1]  # adapter of each sequence
TARGETS = ("q_b_proj", "o_proj")
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "seed": 12}


def merged(source: Path, adapter: Path) -> KimiK2ForCausalLM:
    """The plain model with an adapter in its weights."""
    model = plain_model(source)
    merge(model, adapter)
    return model


@pytest.fixture(scope="module")
def adapters(stored: Stored, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("lora"), stored(**SIZES))


def write_all(root: Path, source: Path) -> dict[str, Path]:
    """Adapters by name."""
    model = plain_model(source)
    for seed, name in enumerate(("first", "second")):
        write_adapter(
            model, root / name, RANK, seed, experts=False, only=tuple(f"self_attn.{target}" for target in TARGETS)
        )
    write_adapter(model, root / "other", RANK, 2, experts=False, only=("self_attn.kv_b_proj",))
    about = (
        write_adapter(model, root / "patterned", RANK, 3, experts=False, only=("self_attn.o_proj",))
        / "adapter_config.json"
    )
    about.write_text(about.read_text().replace('"bias"', '"alpha_pattern": {"o_proj": 64}, "bias"'))
    return {path.name: path for path in root.iterdir()}


def served(adapters: dict[str, Path], source: Path, case: Case) -> tuple[dict[str, Any], torch.Tensor]:
    """A job whose lines have adapters, and the logits of the plain models with them."""
    paths = {name: str(adapters[name]) for name in ("first", "second")}
    lora = {"max_loras": 2, "max_lora_rank": RANK, "batch_size": 4, "target_modules": list(TARGETS)}
    options = {"lora_config": {**lora, "lora_ckpt_paths": paths}}
    made = job(case._replace(options=options, more={"more": {"adapter_ids": torch.tensor(CHOSEN)}}), source)
    made["neuron_config"] |= case.options
    (script,) = made["scripts"] = [schedule.sequences(4, 6)]
    both = [script.expected(merged(source, adapters[name])) for name in ("first", "second")]
    return made, torch.stack([both[CHOSEN[row % 4]][row] for row in range(len(both[0]))])


@pytest.mark.parametrize(("way", "layout", "form", "options"), [
    ("CPU mode", "TP2", "bf16", {"decode": "layers"}), ("CPU mode", "EP2", "fp8", {"decode": "layers"}),
    ("executed", "EP2", "bf16", {"decode": "xla"}),
])  # fmt: skip
def test_each_sequence_has_its_adapter(
    stored: Stored, adapters: dict[str, Path], way: str, layout: str, form: str, options: dict[str, Any]
) -> None:
    """FP8 experts stay as they are; the adapted projections are never quantized. Decode falls to XLA's form."""
    case = Case(layout, options, experts="blockwise" if form == "fp8" else "")
    made, plain = served(adapters, stored(form=form, **SIZES), case)
    found = launch(answers, {"adapters": made}, ranks=2, way=way)["adapters"]
    check(f"{way}, {form}, {layout}", found["logits"][0], plain)


def test_decode_falls_to_xla_for_adapters_alone(adapters: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    lora = {"batch_size": 4, "target_modules": list(TARGETS), "lora_ckpt_paths": {"one": str(adapters["first"])}}
    tiles = Layout(1, experts="tiles").expert_format(tiny_config(moe_intermediate_size=64))
    given = neuron_config(1, 1, 4, decode="layers", decode_layers_per_kernel=2, seq_len=256, **tiles.neuron_options())
    neuron = environment.contrib("config").KimiK2NeuronConfig
    assert neuron(**given).decode == "layers"
    made = neuron(**given, lora_config=lora)
    assert (made.decode, made.decode_layers_per_kernel, made.quantization_block_size) == ("xla", None, None)
    assert "decode runs in XLA form" in caplog.text
    served_config = environment.contrib("serving").ServedNeuronConfig
    batch = {"tp_degree": 64, "batch_size": 1, "save_sharded_checkpoint": False}
    one = served_config(preset="trn2-tp64-ep1-nki-layers", lora_config={**lora, "batch_size": 1}, **batch)
    assert (one.decode, one.experts) == ("xla", "blockwise")


@pytest.mark.parametrize(("given", "field"), [
    ({"lora_ckpt_paths": "other"}, "target_modules.*absorbed"),
    ({"lora_ckpt_paths": "patterned"}, r"adapter_config\.json: field 'alpha_pattern'"),  # which NxDI passes over
    ({"dynamic_multi_lora": True}, "dynamic_multi_lora"),
    ({"batch_size": 2}, "lora_config.batch_size"),
    ({"beside": {"save_sharded_checkpoint": True}}, "save_sharded_checkpoint"),  # files of the ranks hold no adapters
])  # fmt: skip
def test_what_cannot_be_adapted_is_refused(adapters: dict[str, Path], given: dict[str, Any], field: str) -> None:
    options: dict[str, Any] = {"max_loras": 1, "batch_size": 4, "target_modules": list(TARGETS), **given}
    options["lora_ckpt_paths"] = {"one": str(adapters[options.get("lora_ckpt_paths", "first")])}
    beside = options.pop("beside", {})
    with pytest.raises(ConfigError, match=field):
        environment.contrib("config").KimiK2NeuronConfig(**neuron_config(1, 1, 4, lora_config=options, **beside))
