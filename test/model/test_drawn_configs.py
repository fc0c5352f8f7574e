"""Drawn config.json files against transformers: the same logits within 1e-5, or a refusal that names the field.

CI draws few; KIMI_K2_DRAWS=2000 draws more and prints what became of them.
"""

from __future__ import annotations

import copy
import logging
import os
import random
from collections import Counter
from typing import Any

import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.files import Json
from kimi_k2.model.decoder import KimiK2ForCausalLM

transformers = pytest.importorskip("transformers", minversion="5.0")
StrictDataclassError = pytest.importorskip("huggingface_hub.errors").StrictDataclassError

DRAWS = int(os.environ.get("KIMI_K2_DRAWS", "60"))
SEED = 20251130
TOLERANCE = 1e-5
# What may stand in a file beside the model's own fields: harmless ones, spelled wrongly or of other models.
EXTRA: dict[str, list[Any]] = {
    "rope_interleave": [True, True, True, False, None],
    "head_dim": [8, 8, 8, 16, 20, None],
    "qk_head_dim": [20, 20, 12],
    "partial_rotary_factor": [1.0, 1, 0.5],
    "original_max_position_embeddings": [64],
    "num_local_experts": [8, 4],
    "num_mtp_layers": [0, 1],
    "use_cache": [True, False],
    "attention_dropout": [0.0, 0.5],
    "aux_loss_alpha": [0.001],
    "seq_aux": [True],
    "ep_size": [1, 4],
    "pretraining_tp": [1, 2],
    "torch_dtype": ["bfloat16"],
    "output_router_logits": [True],
    "chunk_size_feed_forward": [0],
    "sliding_window": [None, 4],
    "layer_types": [None, ["full_attention"] * 2, ["sliding_attention"] * 2],
    "mlp_bias": [False, True],
    "swiglu_limit": [None, 1.0],
    "index_topk": [None, 4],
    "attention_bias": [False, True],
    "hidden_act": ["silu", "gelu", "relu"],
    "scoring_func": ["sigmoid", "softmax"],
    "topk_method": ["noaux_tc", "greedy"],
    "tie_word_embeddings": [False, True],
    "router_bias": [True],
    "attn_scale": [0.5],
    "logit_scale": [2.0],
    "n_shared_expert": [2],
    "rope_scaling_factor": [4.0],
}


def drawn_rope(random_: random.Random) -> Json:
    rope: Json = {"type": "yarn", "original_max_position_embeddings": random_.choice([16, 64, 4096])}
    rope["factor"] = random_.choice([1.0, 2.0, 32, 64.0, 0.5])
    choices: dict[str, list[Any]] = {
        "beta_fast": [1.0, 32.0, 0.3],
        "beta_slow": [1.0, 4.0],
        "mscale": [1.0, 0.707, 0.0],
        "mscale_all_dim": [1.0, 0.5, 0.0],
        "attention_factor": [1.2],
        "truncate": [True, False, False],
        "rope_theta": [10000.0],
        "low_freq_factor": [1.0],
        "partial_rotary_factor": [1.0, 0.5],
    }
    for name, values in choices.items():
        if random_.random() < (0.1 if name in ("low_freq_factor", "partial_rotary_factor", "rope_theta") else 0.45):
            rope[name] = random_.choice(values)
    if random_.random() < 0.3:
        rope["rope_type"] = rope.pop("type")
    elif random_.random() < 0.1:
        rope["rope_type"] = random_.choice(["default", "yarn"])
    if random_.random() < 0.05:
        del rope[random_.choice(["factor", "original_max_position_embeddings"])]
    return rope


def drawn(seed: int) -> Json:
    """A config.json of a model of two layers."""
    random_ = random.Random(seed)
    experts = random_.choice([4, 8])
    groups = random_.choice([1, 1, 2])
    raw: Json = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": experts,
        "n_shared_experts": random_.choice([1, 1, 2]), "num_experts_per_tok": random_.choice([1, 2]),
        "first_k_dense_replace": random_.choice([0, 1, 2]), "moe_layer_freq": 1, "n_group": groups,
        "topk_group": random_.randint(1, groups), "norm_topk_prob": random_.random() < 0.7,
        "routed_scaling_factor": random_.choice([1.0, 2.827, 16.0]), "q_lora_rank": 10, "kv_lora_rank": 8,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 6, "max_position_embeddings": 128,
        "rope_theta": random_.choice([50000.0, 10000.0, 500.0]), "rms_norm_eps": random_.choice([1e-6, 1e-5, 1e-3]),
    }  # fmt: skip
    kind = random_.random()
    if kind < 0.45:
        raw["rope_scaling"] = drawn_rope(random_)
    elif kind < 0.7:
        raw["rope_parameters"] = {**drawn_rope(random_), "rope_theta": raw.pop("rope_theta")}
    elif kind < 0.85:
        raw["rope_scaling"] = random_.choice([drawn_rope(random_), None, {}])
        raw["rope_parameters"] = random_.choice([drawn_rope(random_), None, {}, {"rope_type": "default"}])
    for name in random_.sample(sorted(EXTRA), random_.choice([0, 0, 1, 2, 3])):
        raw[name] = random_.choice(EXTRA[name])
    if random_.random() < 0.05:
        del raw[random_.choice(sorted(raw))]
    return raw


def reference(raw: Json, seed: int) -> Any:
    """transformers' model of random weights; None if it takes no such file."""
    torch.manual_seed(seed)
    try:
        config = transformers.DeepseekV3Config(**copy.deepcopy(raw))
        config._attn_implementation = config._experts_implementation = "eager"
        model = transformers.DeepseekV3ForCausalLM(config).eval()
    except (KeyError, ValueError, TypeError, ZeroDivisionError, RuntimeError, StrictDataclassError):
        return None
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # Attention and routing that choose: initializer_range would leave all logits alike.
            tensor.copy_(1 + 0.1 * torch.randn_like(tensor) if "norm" in name else torch.randn_like(tensor) * 0.25)
    return model


@torch.inference_mode()
def outcome(seed: int) -> tuple[str, str]:
    """What became of a draw, and what there is to say of it."""
    raw = drawn(seed)
    try:
        config = KimiK2Config.from_dict(raw)
    except ConfigError as error:
        assert error.field, error
        return "refused", error.field
    model = reference(raw, seed)
    if model is None:
        return "accepted, where transformers has no answer", str(raw)
    ours = KimiK2ForCausalLM(config)
    try:
        ours.load_state_dict(model.state_dict(), strict=True)
    except RuntimeError as error:
        return "silent difference", f"other weights: {error}"
    ids = torch.randint(0, 40, (1, 50), generator=torch.Generator().manual_seed(seed))
    difference = float((ours(ids) - model(ids).logits).abs().max())
    return ("equal", "") if difference <= TOLERANCE else ("silent difference", f"{difference:.2e}")


def test_logits_are_equal_or_the_field_is_named() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    wrong = []
    for seed in range(SEED, SEED + DRAWS):
        kind, detail = outcome(seed)
        found[kind] += 1
        if kind == "refused":
            fields[detail] += 1
        elif kind == "silent difference":
            wrong.append((seed, kind, detail))
    print(f"\n{DRAWS} drawn: {dict(found)}; refused by {dict(fields.most_common())}")
    assert wrong == []
    assert found["equal"] >= DRAWS // 3
