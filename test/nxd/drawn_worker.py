"""Configurations drawn at random, each lowered and executed on its own number of ranks; logits beside transformers'.

python drawn_worker.py FIRST COUNT OUTPUT
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import worker
from harness import expected_logits, neuron_config
from steps import run

from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any], int, int, int]:
    """Fields of the configuration, options, and tensor parallelism, expert parallelism and batch."""
    draw = random.Random(seed)
    tp, ep = draw.choice([(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)])
    ranks = tp * ep
    experts, top_k = draw.choice([(8, 2), (12, 3), (24, 8), (40, 5)])
    rope, rank = draw.choice([8, 16, 24]), draw.choice([24, 40, 64])
    fields = {
        "num_attention_heads": ranks * draw.choice([1, 2, 3]),
        "hidden_size": ranks * draw.choice([24, 40, 64]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "first_k_dense_replace": draw.choice([0, 1]),
        "intermediate_size": ranks * draw.choice([16, 56]),
        "moe_intermediate_size": ranks * draw.choice([16, 24]),
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "q_lora_rank": ranks * draw.choice([8, 20]),
        "kv_lora_rank": rank - (rank + rope) % ranks,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": draw.choice([16, 24]),
        "v_head_dim": draw.choice([16, 40]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "routed_scaling_factor": draw.choice([1.0, 2.827]),
        "norm_topk_prob": draw.choice([True, False]),
        "vocab_size": 512,
    }
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    # The two down projections lie in one matrix that is cut into equal rows.
    fields["q_lora_rank"] += -(fields["q_lora_rank"] + fields["kv_lora_rank"] + rope) % ranks
    blockwise = {"block_size": draw.choice([8, 16, 128])}
    return fields, blockwise, tp, ep, draw.choice([1, 4])


@torch.inference_mode()
def difference(seed: int) -> tuple[str, float]:
    """Largest difference of the logits, prefill and 6 steps, relative to 1."""
    fields, blockwise, tp, ep, batch = drawn(seed)
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(512) for _ in range(count)]

    case = {"prompts": [tokens(draw.randint(2, 40)) for _ in range(batch)], "forced": [tokens(6) for _ in range(batch)]}
    with tempfile.TemporaryDirectory() as directory:
        write_synthetic_checkpoint(Path(directory), with_format(tiny_config(**fields), "bf16"), seed=seed)
        options = neuron_config(tp, ep, batch, torch_dtype="float32")
        options["blockwise_matmul_config"] |= blockwise
        app = worker.build({"checkpoint": directory, "neuron_config": options})
        logits = run(app, case["prompts"], case["forced"])
        expected = expected_logits(load_transformers_model(directory), case)
    return f"TP{tp}xEP{ep} batch {batch} {fields} {blockwise}", float((logits - expected).abs().max())


def main() -> None:
    first, count, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.save([difference(seed) for seed in range(first, first + count)], output)


if __name__ == "__main__":
    main()
