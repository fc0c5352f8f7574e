"""What can be checked of the contrib model without NxD: its memory plan, presets and manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("kimi_k2", reason="needs the kimi_k2 package (pip install -e . of its repository)")

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, DoesNotFitError
from kimi_k2.neuron.compile import CompileError, Manifest, check_fit, check_sdk, compiler_args
from kimi_k2.plan.deployment import CONFIGS, STAGES, Deployment, preset_names

PRESETS = [name for name in preset_names() if name.startswith("trn2-tp")]


@pytest.fixture(scope="module")
def config() -> KimiK2Config:
    return KimiK2Config.from_preset("kimi-k2-instruct-0905")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_and_use_all_cores(config: KimiK2Config, name: str) -> None:
    preset = Deployment.load(name)
    assert preset.moe_tp_degree * preset.moe_ep_degree == preset.tp_degree == 64
    # Presets with a tower are for the members that have one; test_deployment.py sees them refused for the others.
    check_fit(config if preset.vision is None else KimiK2Config.from_preset("kimi-k2.5"), preset)
    for stage in STAGES:  # NxDI appends this option itself, once, with what FP8 weights need
        assert not any("hlo2tensorizer" in argument for argument in compiler_args(preset, stage))


def test_routed_experts_are_counted_from_the_published_sizes(config: KimiK2Config) -> None:
    """1014.7 billion parameters of routed experts, one byte each, on 64 cores; scales add little."""
    plan = check_fit(config, Deployment.load("trn2-tp32-ep2"))
    assert plan.parts["expert weights"] == pytest.approx(1014.7e9 / 64, rel=2e-3)


def test_a_context_that_does_not_fit_is_refused_before_compiling(config: KimiK2Config) -> None:
    """131,072 tokens with the whole latent cache on every core."""
    preset = Deployment.load("trn2-tp64-ep1-128k")
    options = preset.neuron_config.model_copy(update={"flash_decoding_enabled": False, "num_cores_per_group": None})
    preset = preset.model_copy(update={"neuron_config": options})
    with pytest.raises(DoesNotFitError, match=r"needs 30\.\d GiB a core with scratch, 23\.4 GiB.*a context of at most"):
        check_fit(config, preset)


def test_bf16_experts_do_not_fit(config: KimiK2Config) -> None:
    preset = Deployment.load("trn2-tp32-ep2").model_copy(update={"experts": "bf16"})
    with pytest.raises(DoesNotFitError, match=r"largest part: expert weights.*blockwise FP8"):
        check_fit(config, preset)


def test_a_machine_without_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompileError, match="neuronx-cc"):
        check_sdk()


def test_unknown_preset_and_field_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trn2-tp32-ep2"):
        Deployment.load("trn3")
    text = (CONFIGS / "trn2-tp32-ep2.yaml").read_text()
    broken = tmp_path / "broken.yaml"
    broken.write_text(text.replace("moe_ep_degree: 2", "moe_ep_degree: two"))
    with pytest.raises(ConfigError, match="moe_ep_degree"):
        Deployment.load(broken)


def test_manifest_keeps_whole_artifacts_and_refuses_others(config: KimiK2Config, tmp_path: Path) -> None:
    preset = Deployment.load("trn2-tp32-ep2")
    (tmp_path / "graph.hlo.txt").write_text("HloModule x")
    Manifest(tmp_path, preset, config).add("graph.hlo.txt", {"bucket": 512})
    again = Manifest(tmp_path, preset, config)
    assert again.has("graph.hlo.txt")
    (tmp_path / "graph.hlo.txt").write_text("HloModule y")
    assert not again.has("graph.hlo.txt")
    with pytest.raises(CompileError, match="another preset"):
        Manifest(tmp_path, Deployment.load("trn2-tp64-ep1"), config)
