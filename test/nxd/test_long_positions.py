"""Single positions far out: BF16 decode graphs with caches of 16k and 128k tokens, executed from their HLO.

One layer, with experts: its cache depends on the tokens alone, so that no prefill of quadratic cost is needed.
transformers' own modules make the cache in BF16, for its BF16 model and for ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import execute, neuron_config

from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

STEPS = 4


def cached(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer 0's latents [1, T, rank], rotated keys [1, T, rope], and transformers' keys and values [1, h, T, .]."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as upstream

    layer, config = model.model.layers[0], model.config
    attention = layer.self_attn
    embedded = model.model.embed_tokens(tokens)
    cos, sin = model.model.rotary_emb(embedded, torch.arange(tokens.shape[1])[None])
    latent, rope = attention.kv_a_proj_with_mqa(layer.input_layernorm(embedded)).split(
        [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
    )
    latent = attention.kv_a_layernorm(latent)
    rope = rope[:, None]
    _, rotated = upstream.apply_rotary_pos_emb_interleave(rope, rope, cos, sin)
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    both = attention.kv_b_proj(latent).view(1, -1, heads, nope + config.v_head_dim).transpose(1, 2)
    keys, values = both.split([nope, config.v_head_dim], dim=-1)
    return latent, rotated[:, 0], torch.cat((keys, rotated.expand(-1, heads, -1, -1)), dim=-1), values


@torch.inference_mode()
def stepped(model: Any, tokens: torch.Tensor, forced: list[int]) -> torch.Tensor:
    """transformers' logits [steps, vocab] of the forced tokens behind `tokens`."""
    from transformers import DynamicCache

    cache = DynamicCache()
    _, _, keys, values = cached(model, tokens)
    cache.update(keys, values, 0)
    logits = []
    for step, token in enumerate(forced):
        at = torch.tensor([tokens.shape[1] + step])
        out = model(torch.tensor([[token]]), past_key_values=cache, cache_position=at, position_ids=at[None])
        logits.append(out.logits[0, -1].float())
    return torch.stack(logits)


@pytest.mark.parametrize("length", [16384, 131072])
def test_bf16_decode(tmp_path: Path, length: int) -> None:
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, max_position_embeddings=262144)
    checkpoint = tmp_path / "checkpoint"
    write_synthetic_checkpoint(checkpoint, with_format(config, "bf16"), seed=11)
    exact = load_transformers_model(checkpoint)
    rounded = load_transformers_model(checkpoint, torch.bfloat16)
    start = length - STEPS
    tokens = torch.randint(0, 512, (1, start), generator=torch.Generator().manual_seed(2))
    forced = [5, 17, 300, 41]
    with torch.inference_mode():
        latent, rope, _, _ = cached(rounded, tokens)
    half = rope.shape[-1] // 2
    interleaved = torch.stack((rope[..., :half], rope[..., half:]), dim=-1).flatten(-2)
    pad = (0, 0, 0, length - start)
    torch.save(
        {
            "kv_mgr.past_key_values.0": torch.nn.functional.pad(interleaved, pad)[:, None],
            "kv_mgr.past_key_values.1": torch.nn.functional.pad(latent, pad)[:, None],
        },
        tmp_path / "caches.pt",
    )
    options = neuron_config(1, 1, 1, seq_len=length, torch_dtype="bfloat16")
    options |= {"max_context_length": 128, "n_positions": length, "context_encoding_buckets": [128]}
    options |= {"enable_bucketing": True, "token_generation_buckets": [length]}
    case = {"caches": str(tmp_path / "caches.pt"), "start": start, "forced": [forced]}
    job = {"checkpoint": checkpoint, "neuron_config": options, "cases": [case]}
    (logits,) = execute(job, tmp_path / "run")["logits"]
    expected = stepped(exact, tokens, forced)

    def distance(found: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        return out

    ours, theirs = distance(logits[:, 0]), distance(stepped(rounded, tokens, forced))
    print(
        f"\npositions {start}..{length - 1}: relative L2 ours {[f'{float(x):.4f}' for x in ours]},"
        f" transformers in BF16 {[f'{float(x):.4f}' for x in theirs]}"
    )
    assert float(ours.median()) <= float(theirs.median())
