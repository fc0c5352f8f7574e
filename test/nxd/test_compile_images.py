"""`kimi-k2 compile` of a preset with a vision tower: every graph as HLO, and NxDI's own compile, compiler mocked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from environment import contrib
from harness import SLOW
from hlo import count
from safetensors.torch import save_file
from test_readme_steps import PRESET, Machine

from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.plan.cost import decode_counts, prefill_counts
from kimi_k2.plan.deployment import CONTEXT_ENCODING
from kimi_k2.plan.roofline import GraphCounts
from kimi_k2.plan.target import load_target
from kimi_k2.plan.vision import tower_rank_bytes, tower_rank_flops
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import TINY_VISION, tiny_config, with_format

CLI = "from kimi_k2.cli import main; main()"
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
    words = ["compile", model, "--preset", preset, "--out", out, "--hlo-only"]
    command = [sys.executable, "-c", CLI, *map(str, words)]
    env = {name: value for name, value in os.environ.items() if name != "NXD_CPU_MODE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    artifacts = json.loads((out / "compile.json").read_text())["artifacts"]
    names = ["context_encoding_model_512", "token_generation_model_512", f"{TOWER}_256x1", f"{TOWER}_1024x4"]
    assert list(artifacts) == [f"{name}.hlo.txt" for name in names]
    assert [one.get("frames") for one in artifacts.values()] == [None, None, 1, 4]
    config = KimiK2Config.from_pretrained(model)
    target = load_target(str(preset), config)
    sharding = target.sharding(config)
    for name, graph in artifacts.items():
        counts = count((out / name).read_text())
        if graph["stage"] == TOWER:
            _check_tower(config, target.tower_ranks or 1, graph, counts)
            continue
        planned = (
            prefill_counts(config, replace(target, prompt=512), sharding)
            if graph["stage"] == CONTEXT_ENCODING
            else decode_counts(config, target, sharding, 512)
        )
        assert counts.collectives == planned.collectives
        assert counts.bytes_read() == pytest.approx(planned.bytes_read(), rel=1e-3)
        assert counts.flops == planned.flops


def _check_tower(config: KimiK2Config, ranks: int, graph: dict[str, Any], counts: GraphCounts) -> None:
    """Every weight and input is read once; each block and the projector end in all-reduces."""
    vision, patches = config.vision, graph["bucket"]
    assert vision is not None
    # Pixels in BF16; in four bytes a value positions, angles, the image's number and the frame's share.
    inputs = patches * (2 * 3 * vision.patch_size**2 + 4 * (vision.hidden_size + vision.head_dim + 2))
    assert counts.bytes_read() == pytest.approx(tower_rank_bytes(config, ranks, neuron=True) + inputs, rel=1e-3)
    assert counts.flops == pytest.approx(tower_rank_flops(config, patches, graph["frames"], ranks), rel=0.01)
    assert {(one.kind, one.ranks) for one in counts.collectives} == {("all-reduce", ranks)}
    assert sum(counts.collectives.values()) == 2 * vision.num_hidden_layers + 1


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
    for part in ("text_model", "vision_model"):
        assert (out / part / "weights" / "tp0_sharded_checkpoint.safetensors").is_file()
    assert "nothing to do" in machine("cli", *compile_it)


def test_the_tower_loads_files_of_its_own_ranks(tmp_path: Path) -> None:
    """Two ranks of the text model, one of the tower: NxDI's own would ask for a second file of it."""
    given: dict[str, list[Any]] = {}

    def traced(name: str) -> SimpleNamespace:
        def initialize(weights: list[dict[str, torch.Tensor]], first: torch.Tensor) -> None:
            given[name] = [[int(one["x"]) for one in weights], first.tolist()]

        return SimpleNamespace(nxd_model=SimpleNamespace(initialize=initialize))

    config = SimpleNamespace(_name_or_path="")
    app = SimpleNamespace(get_text_builder=None, get_vision_builder=None, config=config, model_path="")
    for name, ranks in (("text", 2), ("vision", 1)):
        (tmp_path / name / "weights").mkdir(parents=True)
        for rank in range(ranks):
            save_file(
                {"x": torch.tensor(rank)}, tmp_path / name / "weights" / f"tp{rank}_sharded_checkpoint.safetensors"
            )
        neuron = SimpleNamespace(start_rank_id=0, local_ranks_size=ranks, save_sharded_checkpoint=True)
        setattr(app, f"{name}_config", SimpleNamespace(neuron_config=neuron))
        setattr(app, f"{name}_traced_model", traced(name))
    load = contrib("image_to_text").NeuronKimiK25ForImageToText.load_weights
    load(app, str(tmp_path / "text"), str(tmp_path / "vision"))
    assert given == {"text": [[0, 1], [0]], "vision": [[0], [0]]}
