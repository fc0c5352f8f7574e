"""Checkpoints that other tools wrote: the same logits as the source, or refused by the tool's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from kimi_k2.cli.app import app
from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig
from kimi_k2.errors import CheckpointError, ConfigError, KimiK2Warning
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.quantization.modules import names_module
from kimi_k2.spellings import plain_name, spelled, writer
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format
from kimi_k2.synthetic.draft import draft_fields

IDS = torch.arange(3, 20)[None]
FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("writers") / "k2.5"
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2.5", num_hidden_layers=2), "bf16"), seed=3)
    return directory


def tensors(directory: Path) -> dict[str, Tensor]:
    return {name: one for shard in directory.glob("*.safetensors") for name, one in load_file(shard).items()}


def renamed(source: Path, target: Path, name: Callable[[str], str], **fields: Any) -> Path:
    target.mkdir()
    save_file({name(key): tensor for key, tensor in tensors(source).items()}, target / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(raw))
    for file in FILES:
        (target / file).write_bytes((source / file).read_bytes())
    return target


def same_logits(source: Path, other: Path) -> bool:
    first, second = (KimiK2ForCausalLM.from_pretrained(one)(IDS) for one in (source, other))
    return torch.equal(first, second)


def inspected(directory: Path) -> str:
    done = CliRunner().invoke(app, ["inspect", str(directory), "--json"])
    assert done.exit_code == 0, done.output
    return str(json.loads(done.stdout)["names"])


def nvidia(name: str) -> str:
    """NVFP4 of K2.5: SGLang's pull request 18370, vLLM's 33346."""
    return name.replace("language_model.model.layers.", "language_model.layers.")


def in_memory(name: str) -> str:
    """What transformers 5 calls the same tensors once they are loaded."""
    for theirs, other in (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")):
        name = other + name.removeprefix(theirs) if name.startswith(theirs) else name
    return f"model.{name}" if name.startswith(("vision_tower.", "mm_projector.")) else name


@pytest.mark.parametrize(
    ("spelling", "whose"),
    [(str, "Moonshot's K2.5"), (nvidia, "NVIDIA's K2.5"), (in_memory, "transformers' K2.5 in memory"),
     (plain_name, "Moonshot's K2")],
)  # fmt: skip
def test_names_of_other_writers(k25: Path, tmp_path: Path, spelling: Callable[[str], str], whose: str) -> None:
    directory = renamed(k25, tmp_path / "other", spelling)
    assert same_logits(k25, directory)
    assert inspected(directory) == whose
    towers = [VisionModel.from_pretrained(one, dtype=torch.float32).state_dict() for one in (k25, directory)]
    assert all(torch.equal(towers[0][name], towers[1][name]) for name in towers[0])
    for target in ("cuda", "neuron"):
        command = ["convert", str(directory), str(tmp_path / target), "--tp", "1", "--target", target]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output


def test_lists_and_tensors_share_the_table(k25: Path) -> None:
    for stored in tensors(k25):
        name = plain_name(stored)
        assert plain_name(name) == name
        for other in spelled(name):
            assert plain_name(other) == name
            assert names_module((other.rpartition(".")[0],), "compressed", name.rpartition(".")[0])
    assert writer(["language_model.layers.0.x", "language_model.model.norm.weight"]) == "NVIDIA's K2.5"


def test_a_tensor_under_two_names_is_refused(k25: Path, tmp_path: Path) -> None:
    directory = renamed(k25, tmp_path / "two", str)
    held = load_file(directory / "model.safetensors")
    held["lm_head.weight"] = held["language_model.lm_head.weight"].clone()
    save_file(held, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="already in") as error:
        KimiK2ForCausalLM.from_pretrained(directory)
    assert error.value.tensor == "lm_head.weight"


def by_transformers(source: Path, target: Path, **options: Any) -> Path:
    """K2.5 loaded and saved by transformers' own class."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Kimi_K25ForConditionalGeneration"):
        pytest.skip("this transformers has no kimi_k25")
    transformers.Kimi_K25ForConditionalGeneration.from_pretrained(source).save_pretrained(target, **options)
    for file in FILES[:3]:
        (target / file).write_bytes((source / file).read_bytes())
    return target


def test_the_round_trip_of_transformers(k25: Path, tmp_path: Path) -> None:
    saved = by_transformers(k25, tmp_path / "saved")
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    assert same_logits(k25, saved)
    assert inspected(saved).startswith("transformers'")
    towers = [VisionModel.from_pretrained(one, dtype=torch.float32).state_dict() for one in (k25, saved)]
    assert all(torch.equal(towers[0][name], towers[1][name]) for name in towers[0])
    done = CliRunner().invoke(app, ["generate", str(saved), "-p", "Hello", "--max-new-tokens", "3"])
    assert done.exit_code == 0, done.output


def test_transformers_form_in_memory_is_refused_by_its_name(k25: Path, tmp_path: Path) -> None:
    saved = by_transformers(k25, tmp_path / "memory", save_original_format=False)
    with pytest.raises(CheckpointError, match="transformers' form in memory"):
        KimiK2ForCausalLM.from_pretrained(saved)


def test_the_round_trip_of_transformers_k2(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = checkpoints["bf16"]
    raw = json.loads((source / "config.json").read_text())
    config = transformers.DeepseekV3Config(**{key: value for key, value in raw.items() if key != "model_type"})
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(source, config=config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    assert same_logits(source, tmp_path / "saved")


@pytest.mark.parametrize("field", ["quantization", "quantization_config"])
def test_mlx_is_refused_by_its_name(k25: Path, tmp_path: Path, field: str) -> None:
    directory = renamed(k25, tmp_path / "mlx", str, **{field: {"group_size": 64, "bits": 4, "mode": "affine"}})
    with pytest.raises(ConfigError, match=rf"field '{field}': MLX's stored form"):
        KimiK2Config.from_pretrained(directory)


def test_an_adapter_beside_the_weights_is_refused(k25: Path, tmp_path: Path) -> None:
    directory = renamed(k25, tmp_path / "adapted", str)
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    for command in (["inspect"], ["generate", "-p", "x"], ["convert", str(tmp_path / "out"), "--tp", "1"]):
        refused = CliRunner().invoke(app, [command[0], str(directory), *command[1:]]).exception
        assert isinstance(refused, ConfigError) and refused.file == str(directory / "adapter_config.json")


def test_a_derivatives_note_is_a_warning(k25: Path, tmp_path: Path) -> None:
    note = {"source_model": "m", "experts_per_layer": 16}
    directory = renamed(k25, tmp_path / "derived", str, k2_mini_info=note)
    with pytest.warns(KimiK2Warning, match="'k2_mini_info' is taken for a note"):
        assert same_logits(k25, directory)
    # What could be the model's own numbers is none.
    for name, value in (("k2_mini_info", {"n_routed_experts": 16}), ("k2_mini_info", 16), ("k2_mini", note)):
        raw = json.loads((k25 / "config.json").read_text()) | {name: value}
        with pytest.raises(ConfigError, match=f"field '{name}': not known"):
            KimiK2Config.from_dict(raw)


# As Model-Optimizer's exporter writes a head's card (export/plugins/hf_spec_configs.py).
MODELOPT = {
    "eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "layers", "told"),
    [([1, 29, 57], (2, 30, 58), True), ([2, 30, 58], (2, 30, 58), False), ([0, 1, 3], (0, 1, 3), False),
     ([1, 29, 61], (1, 29, 61), False), ([1, 29, 60], (2, 30, 61), True)],
)  # fmt: skip
def test_layer_ids_of_a_head_by_the_convention_that_they_tell(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, ids: list[int], layers: tuple[int, ...], told: bool
) -> None:
    target = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    fields = draft_fields(target, "mla", eagle_config={**MODELOPT, "eagle_aux_hidden_state_layer_ids": ids})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = DraftConfig.from_pretrained(tmp_path)
    config.fit(target)
    assert config.layers(target) == layers
    assert [str(one.message) for one in recwarn if "taken for outputs" in str(one.message)] == [
        str(one.message) for one in recwarn if told
    ]
    assert len(recwarn) == int(told)
    for reading, shift in (("inputs", 0), ("outputs", 1)):
        config = DraftConfig.from_pretrained(tmp_path, reading)  # type: ignore[arg-type]
        assert config.layers(target) == tuple(one + shift for one in ids)
    assert len(recwarn) == int(told)


@pytest.mark.parametrize(
    ("field", "value"), [("parallel_draft_step", 2), ("next_layer_regular", False), ("use_mtp_layernorm", True)]
)
def test_heads_of_other_kinds_are_refused(field: str, value: Any) -> None:
    target = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    with pytest.raises(ConfigError, match=f"eagle_config.{field}"):
        DraftConfig.from_dict(draft_fields(target, "mla", eagle_config={**MODELOPT, field: value}))
