"""`kimi-k2 compile` of a preset with a vision tower: every graph as HLO, and NxDI's own compile, compiler mocked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from harness import SLOW, command
from test_readme_steps import PRESET, Machine

from kimi_k2.config import raw_preset
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import TINY_VISION, tiny_config, with_format

TOWER = "vision_encoder_model"


@pytest.mark.parametrize("name", ["trn2-tp64-ep1-images", pytest.param("trn2-tp32-ep2-images", marks=SLOW)])
def test_hlo_of_every_graph(tmp_path: Path, name: str) -> None:
    """The published shapes with two layers each, the preset with fewer buckets."""
    content = raw_preset("kimi-k2.5")
    content["text_config"]["num_hidden_layers"] = content["vision_config"]["vt_num_hidden_layers"] = 2
    model, out, preset = tmp_path / "model", tmp_path / "out", tmp_path / "images.yaml"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(content))
    fields = {"like": name, "seq_len": 512, "max_context_length": 512, "vision": {"buckets": [[256, 1], [1024, 4]]}}
    buckets = {"context_encoding_buckets": [512], "token_generation_buckets": [512]}
    preset.write_text(yaml.safe_dump({**fields, "neuron_config": buckets}))
    command("compile", model, "--preset", preset, "--out", out, "--hlo-only")
    # test_lowering.py and test_vision.py hold what is in such graphs to the plan.
    artifacts = json.loads((out / "compile.json").read_text())["artifacts"]
    names = ["context_encoding_model_512", "token_generation_model_512", f"{TOWER}_256x1", f"{TOWER}_1024x4"]
    assert list(artifacts) == [f"{name}.hlo.txt" for name in names]
    assert [artifact.get("frames") for artifact in artifacts.values()] == [None, None, 1, 4]


def test_nxdi_compiles_both_models(tmp_path: Path) -> None:
    """Graphs, weights of both, the manifest; once more there is nothing to do."""
    model, out, preset = tmp_path / "model", tmp_path / "out", tmp_path / "images.yaml"
    sizes = {**TINY_VISION, "vt_num_attention_heads": 4}
    write_synthetic_checkpoint(model, with_format(tiny_config("kimi-k2.5", vision=sizes), "fp8"), seed=8)
    preset.write_text(yaml.safe_dump({**PRESET, "vision": {"tp_degree": 1, "buckets": [[16, 1], [64, 4]]}}))
    machine = Machine(tmp_path)
    compile_it = ("compile", model, "--preset", preset, "--out", out)
    machine("cli", *compile_it)
    manifest = json.loads((out / "compile.json").read_text())
    assert manifest["complete"]
    assert {"neuron_config.json", "text_model/model.pt", "vision_model/model.pt"} <= set(manifest["artifacts"])
    for name in ("text_model", "vision_model"):
        assert (out / name / "weights" / "tp0_sharded_checkpoint.safetensors").is_file()
    assert "nothing to do" in machine("cli", *compile_it)
