"""Decode whose router logits and down projections are summed with what comes before them, as executed BF16 graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import DECODE_STEPS, SLOW, choice_gaps, execute, expected_logits, neuron_config, plain_model, sequences

from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


@pytest.mark.parametrize(("tp", "ep"), [pytest.param(2, 1, marks=SLOW), (1, 2)])
def test_bf16_graphs_are_no_farther_than_without(tmp_path: Path, tp: int, ep: int) -> None:
    """FP8 tiles and an early router, executed: logits against the plain float32 model, and what NxDI's cast leaves.

    Steps in which float32 scores of the last expert chosen and the next one are within 0.01 are left out: another
    choice there is another output.
    """
    config = tiny_config(moe_intermediate_size=64, kv_lora_rank=128, num_experts_per_tok=8)
    write_synthetic_checkpoint(tmp_path / "source", with_format(config, "fp8"), seed=3)
    case = sequences(1, 512)
    model = plain_model(tmp_path / "source")
    plain = expected_logits(model, case)
    decided = choice_gaps(model, case)[:, 0] > 0.01
    decided[0] = False  # the prompt's, by prefill
    assert decided.sum() > DECODE_STEPS / 2
    errors = {}
    for early in (True, False):
        experts = expert_formats()["tiles" if early else "blockwise"]
        held = experts.for_layout(config, Layout(tp, ep, experts=experts.name)).neuron_options()
        decode = "kernels" if early else "xla"
        options = neuron_config(tp, ep, 1, torch_dtype="bfloat16", seq_len=256, decode=decode, **held)
        job = {"checkpoint": tmp_path / "source", "neuron_config": options, "cases": [case]}
        done = execute(job, tmp_path / str(early))
        found, wanted = done["logits"][0][decided], plain[decided]
        errors[early] = float((found - wanted).norm() / wanted.norm())
        folded = {kind for name, kind in done["loaded"].items() if "early_qkv_a" in name}
        assert folded == ({"torch.bfloat16"} if early else set())
        steps = [graph for graph in done["graphs"] if graph["stage"].startswith("token")]
        columns = config.hidden_size + config.q_lora_rank + config.cache_dim
        assert all((f"f32[1,1,{columns}]" in graph["hlo"]) == early for graph in steps)
        assert steps
    print(f"\n{tmp_path.name}: relative L2 with early projections {errors[True]:.2e}, without {errors[False]:.2e}")
    assert errors[True] < 1.05 * errors[False]
