"""Models that decode on whole layers refuses, and the first hour's commands of the docs; test_logits.py runs it.

Options that it refuses are in test_options.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from cases import WHOLE, config_of
from harness import command
from test_options import LAYERS, LAYERS_SPLIT

from kimi_k2.errors import ConfigError
from kimi_k2.sharding.early_router import HEADS, RESIDUAL


def test_folded_weights_keep_their_dtype() -> None:
    """A cast of the model would round what experts are chosen by."""
    kept = environment.contrib("modeling_kimi_k2").NeuronKimiK2Model.kept
    assert all(f"layers.1.{name}".endswith(kept) for name in (RESIDUAL, HEADS))


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("moe_intermediate_size", {"moe_intermediate_size": 256}),
        ("num_experts_per_tok", {"num_experts_per_tok": 4}),
        ("kv_lora_rank", {"kv_lora_rank": 640}),
        ("v_head_dim", {"v_head_dim": 64}),
        ("q_lora_rank", {"q_lora_rank": 96}),
        ("first_k_dense_replace", {"first_k_dense_replace": 0}),
        ("n_routed_experts", {"n_routed_experts": 64}),
        ("hidden_size", {"hidden_size": 512}),
        ("norm_topk_prob", {"norm_topk_prob": False}),
        ("experts", {"n_shared_experts": 3}),
        ("num_attention_heads", {"num_attention_heads": 4}),
    ],
)
def test_sizes_that_it_does_not_take_are_refused(field: str, sizes: dict[str, Any]) -> None:
    module, more = environment.contrib("config"), LAYERS_SPLIT if field == "num_attention_heads" else {}
    neuron = module.KimiK2NeuronConfig(on_cpu=True, torch_dtype=torch.float32, **{**LAYERS, **more})
    with pytest.raises(ConfigError) as caught:
        module.KimiK2InferenceConfig(neuron, load_config=module.load_kimi_config(config_of(**{**WHOLE, **sizes})))
    assert caught.value.field == field


def test_the_first_hours_commands_of_the_docs(shell_commands: Callable[[str], list[list[str]]], tmp_path: Path) -> None:
    """Those of docs/trainium.md that need no machine and no real checkpoint, as they stand there."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "trainium.md").read_text().replace("/tmp/", f"{tmp_path}/")
    section = text.split("## Decode on NKI kernels: the first hour\n")[1].split("\n## ")[0]
    real = re.compile("/models|/presharded")
    lines = [words for words in shell_commands(section) if not real.search(" ".join(words))]
    ((*edit, _, preset),) = [words for words in lines if words[0] == "sed"]
    Path(preset).write_text(subprocess.run(edit, check=True, cwd=root, stdout=subprocess.PIPE, text=True).stdout)
    here = [words[1:] for words in lines if words[0] == "kimi-k2"]
    assert len(here) == 5
    for words in here:
        print(f"\n$ {words}\n{command(*words, timeout=1500)[-1500:]}")
