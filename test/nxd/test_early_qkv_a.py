"""Decode whose down projections are summed with the experts' output before them, in NxD's CPU mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import DECODE_STEPS, SLOW, choice_gaps, execute, expected_logits, neuron_config, plain_model, sequences
from test_early_router import BATCHING, EACH_OTHER_FEATURE
from test_nki_kernels import ALL, CONFIG, LAYOUTS, check, options, store

from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


def tiled(layout: str, kernels: list[str], fmt: str = "bf16", **more: Any) -> dict[str, Any]:
    """Options with early down projections; experts lie in tiles with and without kernels."""
    name = "tiles" if fmt == "fp8" else "bf16_tiles"
    held = expert_formats()[name].for_layout(CONFIG, Layout(*LAYOUTS[layout])).neuron_options()
    return options(layout, 2, kernels, fmt, **{**held, "early_qkv_a": True, **more})


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in BF16 and in FP8 blocks."""
    return store(tmp_path_factory.mktemp("qkv"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_and_16_steps(stored: dict[str, Path], tmp_path: Path, layout: str) -> None:
    check(stored["bf16"], tiled(layout, []), tmp_path, [])


@pytest.mark.parametrize(("layout", "fmt"), [("TP1", "bf16"), ("TP2", "bf16"), ("EP2", "bf16"), ("EP2", "fp8")])
def test_with_all_kernels_and_an_early_router(stored: dict[str, Path], tmp_path: Path, layout: str, fmt: str) -> None:
    names = {"router": "noaux_tc_choice"}
    check(stored[fmt], tiled(layout, ALL, fmt, early_router=True), tmp_path, ALL, names=names)


@pytest.mark.parametrize("layout", ["TP2", "EP2"])
def test_a_shared_expert_of_three_linears(stored: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """As INT4 checkpoints have it."""
    names = {"router": "noaux_tc_choice"}
    given = tiled(layout, ALL, early_router=True, shared_expert_tiles=0)
    check(stored["bf16"], given, tmp_path, ALL, names=names)


@EACH_OTHER_FEATURE
def test_together_with(stored: dict[str, Path], tmp_path: Path, layout: str, more: dict[str, Any]) -> None:
    case: dict[str, Any] = {"arrival": [2, 0, 3, 1]} if more is BATCHING else {}
    check(stored["bf16"], tiled(layout, [], **more), tmp_path, [], **case)


@pytest.mark.parametrize(("tp", "ep"), [pytest.param(2, 1, marks=SLOW), (1, 2)])
def test_bf16_graphs_are_no_farther_than_without(tmp_path: Path, tp: int, ep: int) -> None:
    """FP8 tiles and an early router, executed: logits against the plain float32 model, and what NxDI's cast leaves.

    Steps in which float32 scores of the last expert chosen and the next one are within 0.01 are left out: another
    choice there is another output.
    """
    config = tiny_config(moe_intermediate_size=64)
    write_synthetic_checkpoint(tmp_path / "source", with_format(config, "fp8"), seed=3)
    held = expert_formats()["tiles"].for_layout(config, Layout(tp, ep)).neuron_options()
    case = sequences(1, 512)
    model = plain_model(tmp_path / "source")
    plain = expected_logits(model, case)
    decided = choice_gaps(model, case)[:, 0] > 0.01
    decided[0] = False  # the prompt's, by prefill
    assert decided.sum() > DECODE_STEPS / 2
    errors = {}
    for early in (True, False):
        options = neuron_config(tp, ep, 1, torch_dtype="bfloat16", early_qkv_a=early, early_router=True, **held)
        job = {"checkpoint": tmp_path / "source", "neuron_config": options, "cases": [case]}
        done = execute(job, tmp_path / str(early))
        found, wanted = done["logits"][0][decided], plain[decided]
        errors[early] = float((found - wanted).norm() / wanted.norm())
        folded = {kind for name, kind in done["loaded"].items() if "early_qkv_a" in name}
        assert folded == ({"torch.bfloat16"} if early else set())
        decode = [graph for graph in done["graphs"] if graph["stage"].startswith("token")]
        columns = config.hidden_size + config.q_lora_rank + config.cache_dim
        assert all((f"f32[1,1,{columns}]" in graph["hlo"]) == early for graph in decode)
        assert decode
    print(f"\n{tmp_path.name}: relative L2 with early projections {errors[True]:.2e}, without {errors[False]:.2e}")
    assert errors[True] < 1.05 * errors[False]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("lora_config", {"lora_config": {"max_loras": 2}}),
        ("rpl_reduce_dtype", {"rpl_reduce_dtype": "bfloat16"}),
        ("speculation_length", {"speculation_length": 4}),
        ("expert_tiles", {"expert_tiles": False, "shared_expert_tiles": 0}),
    ],
)
def test_what_it_does_not_follow_is_refused(field: str, more: dict[str, Any]) -> None:
    config_module: Any = environment.contrib("config")
    with pytest.raises(ConfigError) as caught:
        config_module.KimiK2NeuronConfig(on_cpu=True, torch_dtype=torch.float32, **tiled("TP1", [], **more))
    assert caught.value.field == field
