"""Positions far out: BF16 decode graphs with caches of 16k and 128k tokens, executed from their HLO.

transformers' own modules make the caches in BF16, for its BF16 model and for ours; of the last layer its entries alone,
which need no attention. Two ranks split the cache between them (flash decoding).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import schedule
import torch
from applications import answers
from cases import Case, Stored, job
from harness import SLOW, distances, launch, no_farther

from kimi_k2.parity.reference import load_transformers_model

STEPS = 4
RESERVED = 128  # slots that NxDI adds with flash decoding


class Entries(NamedTuple):
    """One layer's cache: latents [1, T, rank], rotated keys [1, T, rope]; transformers' keys, values [1, h, T, .]."""

    latent: torch.Tensor
    rope: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def entries_of(layer: Any, config: Any, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> Entries:
    """What a layer caches of the hidden states that it is given."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as upstream

    attention = layer.self_attn
    latent, rope = attention.kv_a_proj_with_mqa(layer.input_layernorm(hidden)).split(
        [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
    )
    latent, rope = attention.kv_a_layernorm(latent), rope[:, None]
    _, rotated = upstream.apply_rotary_pos_emb_interleave(rope, rope, *rotation)
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    both = attention.kv_b_proj(latent).view(1, -1, heads, nope + config.v_head_dim).transpose(1, 2)
    keys, values = both.split([nope, config.v_head_dim], dim=-1)
    return Entries(latent, rotated[:, 0], torch.cat((keys, rotated.expand(-1, heads, -1, -1)), dim=-1), values)


def causal(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, __: Any, *, scaling: float, **___: Any
) -> tuple[torch.Tensor, None]:
    """Attention [B, T, h, v] without a matrix of T x T: torch's kernel, which wants keys and values of one width."""
    width = value.shape[-1]
    padded = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, padded, is_causal=True, scale=scaling)
    return out[..., :width].transpose(1, 2), None


@torch.inference_mode()
def cached(model: Any, tokens: torch.Tensor) -> list[Entries]:
    """Every layer's cache of the tokens [1, T]."""
    from transformers import AttentionInterface

    AttentionInterface.register("causal", causal)
    hidden, config = model.model.embed_tokens(tokens), model.config
    kept, config._attn_implementation = config._attn_implementation, "causal"
    positions = torch.arange(tokens.shape[1])[None]
    rotation = model.model.rotary_emb(hidden, positions)
    found: list[Entries] = []
    for number, layer in enumerate(model.model.layers, start=1):
        found.append(entries_of(layer, config, hidden, rotation))
        if number < config.num_hidden_layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotation)
    config._attn_implementation = kept
    return found


@torch.inference_mode()
def stepped(model: Any, caches: list[Entries], forced: list[int]) -> torch.Tensor:
    """transformers' logits [steps, vocab] of the forced tokens behind those that are cached."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, entries in enumerate(caches):
        cache.update(entries.keys, entries.values, number)
    logits = []
    for step, token in enumerate(forced):
        at = torch.tensor([caches[0].latent.shape[1] + step])
        out = model(torch.tensor([[token]]), past_key_values=cache, cache_position=at, position_ids=at[None])
        logits.append(out.logits[0, -1].float())
    return torch.stack(logits)


def parts(tensor: torch.Tensor, length: int, ranks: int) -> list[torch.Tensor]:
    """[1, T, x] as each rank holds it, [1, 1, slots, x]: rank r of several has every position r + n x ranks."""
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, length - tensor.shape[1]))[:, None]
    if ranks == 1:
        return [padded]
    return [torch.nn.functional.pad(padded[:, :, rank::ranks], (0, 0, 0, RESERVED)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("length", "layers", "ranks"),
    [
        (16384, 1, 1),
        (131072, 1, 1),
        (131072, 1, 2),
        pytest.param(16384, 3, 2, marks=SLOW),
        pytest.param(131072, 2, 2, marks=SLOW),
    ],
)
def test_bf16_decode(stored: Stored, length: int, layers: int, ranks: int) -> None:
    sizes = {"num_hidden_layers": layers, "first_k_dense_replace": 0, "max_position_embeddings": 262144}
    checkpoint = stored(**sizes, seed=11)
    exact, rounded = (load_transformers_model(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    start, forced = length - STEPS, [5, 17, 300, 41]
    tokens = torch.randint(0, 512, (1, start), generator=torch.Generator().manual_seed(2))
    theirs_cached = cached(rounded, tokens)
    states: dict[str, list[torch.Tensor]] = {}
    for layer, entries in enumerate(theirs_cached):
        first, second = entries.rope.chunk(2, dim=-1)
        interleaved = torch.stack((first, second), dim=-1).flatten(-2)
        states[f"kv_mgr.past_key_values.{2 * layer}"] = parts(interleaved, length, ranks)
        states[f"kv_mgr.past_key_values.{2 * layer + 1}"] = parts(entries.latent, length, ranks)
    options = {
        "seq_len": length, "max_context_length": 128, "context_encoding_buckets": [128], "enable_bucketing": True,
        "token_generation_buckets": [length], "torch_dtype": "bfloat16", "flash_decoding_enabled": ranks > 1,
    }  # fmt: skip
    made = job(Case(f"TP{ranks}", options, batch=1), checkpoint)
    made["scripts"] = [schedule.Filled(states, start, forced)]
    (logits,) = launch(answers, {"": made}, ranks=ranks, way="executed")[""]["logits"]
    expected = stepped(exact, cached(exact, tokens), forced)
    ours, theirs = (distances(one, expected) for one in (logits, stepped(rounded, theirs_cached, forced)))
    no_farther(f"positions {start}..{length - 1}, {layers} layers, {ranks} ranks", ours, theirs)
