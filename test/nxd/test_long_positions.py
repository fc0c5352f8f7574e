"""Positions far out: BF16 decode graphs with caches of 16k and 128k tokens, executed from their HLO.

transformers' own modules make the caches in BF16, for its BF16 model and for ours; of the last layer its entries alone,
which need no attention. Two ranks split the cache between them (flash decoding).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import schedule
import torch
from applications import answers
from cases import Case, Stored, job
from harness import SLOW, distances, launch, no_farther
from transformers import AttentionInterface, DynamicCache

from kimi_k2.parity.reference import load_transformers_model

STEPS = 4
RESERVED = 128  # slots that NxDI adds with flash decoding


class CachedError(Exception):
    """Ends a pass whose caches are whole."""


def causal(
    attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, *, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attention [B, T, h, v] without a matrix of T x T: torch's kernel, which wants keys and values of one width."""
    if attention.layer_idx + 1 == attention.config.num_hidden_layers:
        raise CachedError
    width = value.shape[-1]
    padded = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, padded, is_causal=True, scale=scaling)
    return out[..., :width].transpose(1, 2), None


@torch.inference_mode()
def cached(model: Any, tokens: torch.Tensor) -> tuple[DynamicCache, list[torch.Tensor]]:
    """transformers' cache of the tokens [1, T], and each layer's latents [1, T, rank]."""
    AttentionInterface.register("causal", causal)
    cache, latents, config = DynamicCache(), list[torch.Tensor](), model.config
    norms = [layer.self_attn.kv_a_layernorm for layer in model.model.layers]
    hooks = [norm.register_forward_hook(lambda *given: latents.append(given[-1])) for norm in norms]
    kept, config._attn_implementation = config._attn_implementation, "causal"
    with suppress(CachedError):
        model.model(tokens, past_key_values=cache)
    config._attn_implementation = kept
    for hook in hooks:
        hook.remove()
    return cache, latents


@torch.inference_mode()
def stepped(model: Any, cache: DynamicCache, forced: list[int]) -> torch.Tensor:
    """transformers' logits [steps, vocab] of the forced tokens behind those that are cached."""
    steps = [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1].float() for token in forced]
    return torch.stack(steps)


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
    cache, latents = cached(rounded, tokens)
    states: dict[str, list[torch.Tensor]] = {}
    for number, (layer, latent) in enumerate(zip(cache.layers, latents, strict=True)):
        rope = layer.keys[:, 0, :, rounded.config.qk_nope_head_dim :]
        interleaved = rope.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        states[f"kv_mgr.past_key_values.{2 * number}"] = parts(interleaved, length, ranks)
        states[f"kv_mgr.past_key_values.{2 * number + 1}"] = parts(latent, length, ranks)
    options = {
        "seq_len": length, "max_context_length": 128, "context_encoding_buckets": [128], "enable_bucketing": True,
        "token_generation_buckets": [length], "torch_dtype": "bfloat16", "flash_decoding_enabled": ranks > 1,
    }  # fmt: skip
    made = job(Case(f"TP{ranks}", options, batch=1), checkpoint)
    made["scripts"] = [schedule.Filled(states, start, forced)]
    (logits,) = launch(answers, {"": made}, ranks=ranks, way="executed")[""]["logits"]
    expected = stepped(exact, cached(exact, tokens)[0], forced)
    ours, theirs = (distances(one, expected) for one in (logits, stepped(rounded, cache, forced)))
    no_farther(f"positions {start}..{length - 1}, {layers} layers, {ranks} ranks", ours, theirs)
