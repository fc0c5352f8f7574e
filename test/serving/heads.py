"""Eagle3 heads that know what often follows a token: what the target's last layer makes tells them which it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kimi_k2.drafts.config import Form
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.draft import write_synthetic_head


def following(answers: Sequence[list[int]], words: int) -> list[int]:
    """A permutation of the vocabulary that puts what often follows a token in its place."""
    pairs = Counter(pair for tokens in answers for pair in pairwise(tokens))
    found: dict[int, int] = {}
    for (token, then), _ in pairs.most_common():
        if token not in found and then not in found.values():
            found[token] = then
    left = [token for token in range(words) if token not in found.values()]
    return [found[token] if token in found else left.pop() for token in range(words)]


def write_following_head(
    directory: Path, target: KimiK2ForCausalLM, answers: Sequence[list[int]], form: Form = "llama", **changes: Any
) -> list[int]:
    """A head of a target, and what it drafts behind each token: `following` of the target's answers.

    Embeddings are the target's.
    """
    config = target.config
    follows, hidden, layers = following(answers, config.vocab_size), config.hidden_size, config.num_hidden_layers
    rows = torch.empty(config.vocab_size, hidden)
    rows[follows] = target.lm_head.weight.detach().float().cpu()
    dtype: torch.dtype = changes.pop("dtype", torch.bfloat16)
    nothing, inner = torch.zeros(hidden, hidden), changes.get("intermediate_size", config.intermediate_size)
    values = config.num_attention_heads * int(changes.get("head_dim", config.v_head_dim))
    tensors = {
        "fc.weight": torch.cat((nothing, nothing, torch.eye(hidden)), dim=1),
        "lm_head.weight": rows,
        "norm.weight": target.model.norm.weight.detach().float().cpu(),
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, values),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, inner),
    }
    write_synthetic_head(
        directory, config, form, dtype=dtype, tensors={name: tensor.to(dtype) for name, tensor in tensors.items()},
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, layers]}, **changes,
    )  # fmt: skip
    return follows
