"""Whole layers in one kernel, collectives inside, on all ranks: a converted checkpoint beside the plain model."""

from __future__ import annotations

import inspect
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from e4m3 import to_kernel
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.model.decoder import HiddenStates, KimiK2ForCausalLM
from kimi_k2.nki.kernels import latent_attention
from kimi_k2.nki.kernels.layer_attention import FIELDS as ORDER
from kimi_k2.nki.kernels.layers import decode_layer, decode_layers, layer_of
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format
from nki_emulator.ranks import run_on_ranks

from .relative_error import relative

RANKS, SLOTS, LAYERS = 4, 1024, 2
BEHIND = 128  # slots of a cache that a step does not read
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS, "first_k_dense_replace": 0, "hidden_size": 512, "num_attention_heads": RANKS,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 32 * RANKS, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
Q_RANKS = {"bf16": 128, "fp8": 256}  # of the first a core has no whole block of the next layer's down projections

# The kernel's fields and the tensors of a rank's file.
TILES = {name: f"self_attn.tiles.{name}" for name in ("q_b", "w_uk", "w_uv", "group_q_b", "group_w_uk")} | {
    "o": "self_attn.tiles.o",
    "gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj",
    "shared_gate_up": "mlp.shared_experts.gate_up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}  # fmt: skip
FIELDS = {
    "q_norm": "self_attn.q_a_layernorm.weight", "kv_norm": "self_attn.kv_a_layernorm.weight",
    "norm": "post_attention_layernorm.weight", "bias": "mlp.router.e_score_correction_bias",
    "early_residual": "early_router.residual_weight", "early_heads": "early_router.heads_weight",
    "next_residual": "early_qkv_a.residual_weight", "next_experts": "mlp.experts.early_qkv_a.weight",
    "next_shared": "mlp.shared_experts.early_qkv_a.weight", "o_proj": "self_attn.tiles.o.weight",
    **{name: f"{tile}.weight" for name, tile in TILES.items() if name != "o"},
    **{f"{name}_scales": f"{tile}.scale" for name, tile in TILES.items()},
}  # fmt: skip


class Case(NamedTuple):
    """A step of `batch` sequences of some tokens each, on so many cores; groups of ranks share a cache.

    `apart`: a call for each layer, over a cache in pages.
    """

    batch: int
    tokens: int = 1
    cores: int = 2
    group: int = 1
    stored: str = "bf16"
    apart: bool = False


@cache
def checkpoint(stored: str) -> Path:
    directory = Path(tempfile.mkdtemp()) / stored
    config = with_format(tiny_config(q_lora_rank=Q_RANKS[stored], **SIZES), stored)
    write_synthetic_checkpoint(directory, config, seed=1)
    return directory


@cache
def plain(stored: str, dtype: torch.dtype) -> KimiK2ForCausalLM:
    return KimiK2ForCausalLM.from_pretrained(checkpoint(stored), dtype=dtype)


@cache
def converted(stored: str, dtype: torch.dtype, group: int) -> list[dict[str, Tensor]]:
    """What each rank's file holds; attention in FP8 where the checkpoint has it so and ranks share a cache."""
    made = Path(tempfile.mkdtemp())
    experts = "tiles" if stored == "fp8" else "bf16_tiles"
    Presharder(
        checkpoint(stored), made, Layout(RANKS, experts=experts, dtype=dtype, decode="layers", query_group=group)
    ).run()
    return [load_file(file) for file in sorted((made / "weights").iterdir())]


class Step:
    """New tokens, what is cached before them, and what the plain model makes of both."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        draw = torch.Generator().manual_seed(case.batch)
        model = plain(case.stored, torch.float64)
        self.config = config = model.config
        self.ids = torch.randint(0, config.vocab_size, (case.batch, case.tokens), generator=draw)
        self.lengths = torch.randint(1, SLOTS, (case.batch, 1), generator=draw)
        self.lengths[-1] = SLOTS - 3  # slots of both cores, or of all ranks
        self.positions = self.lengths + torch.arange(case.tokens)
        shape = LAYERS, case.batch, SLOTS + case.tokens, config.cache_dim
        self.cached = torch.randn(shape, generator=draw).to(dtype)

    def of_plain(self, dtype: torch.dtype) -> list[Tensor]:
        """The residual before and behind the layers [B * S, H], new latents and new keys [layers, B * S, n]."""
        model, states = plain(self.case.stored, dtype), HiddenStates((0, LAYERS))
        held = model.new_cache(self.case.batch, self.cached.shape[2], dtype)
        held.data.copy_(self.cached)
        model(self.ids, self.positions, held, states=states)
        new = held.data[:, torch.arange(self.case.batch)[:, None], self.positions].flatten(1, 2)
        latents, keys = new.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return [*(one.flatten(0, 1).double() for one in states.apart()), latents.double(), keys.double()]

    def arguments(self, rank: int) -> list[Any]:
        """Of `decode_layers` on one rank."""
        case, config, model = self.case, self.config, plain(self.case.stored, torch.float64).model
        first: Any = model.layers[0]
        downs = torch.cat(
            [one.dequantized(torch.float64) for one in (first.self_attn.q_a_proj, first.self_attn.kv_a_proj_with_mqa)]
        )
        hidden = model.embed_tokens(self.ids).flatten(0, 1)
        cos, sin = (part.flatten(0, 1).repeat_interleave(2, -1) for part in model.rotary(self.positions, torch.float64))
        rotation = torch.stack((cos, sin * torch.tensor([-1.0, 1.0]).repeat(sin.shape[1] // 2))).transpose(1, 2)
        place, each = rank % case.group, SLOTS // case.group
        more: list[Any] = [None, None]
        if case.group > 1:
            own = torch.full((case.batch * case.tokens, 1), int(place == 1), dtype=torch.int32)
            more = [tuple(tuple(range(n, n + case.group)) for n in range(0, RANKS, case.group)), own]
        slots = slice(place * each, (place + 1) * each)
        layers = tuple(self.layer(number, rank, slots) for number in range(LAYERS))
        return [
            hidden.float(), (hidden @ (downs * first.input_layernorm.weight).T).float(), layers,
            rotation.float().contiguous(), (self.lengths - place * each).clamp(0, each).int(), RANKS,
            (tuple(range(RANKS)),), torch.zeros(1, 1, dtype=torch.int32), config.n_routed_experts,
            config.softmax_scale, config.routed_scaling_factor, config.rms_norm_eps, *more,
            config.latent_norm_eps, each,
        ]  # fmt: skip

    def layer(self, number: int, rank: int, slots: slice) -> Any:
        group = {"bf16": 4, "fp8": 2}[self.case.stored] if self.case.group == 1 else self.case.group
        file = converted(self.case.stored, self.dtype, group)[rank]
        names = {field: f"layers.{number}.{name}" for field, name in FIELDS.items()}
        found = {field: file[name] for field, name in names.items() if name in file}
        grouped = {field.removeprefix("group_"): found.pop(field) for field in list(found) if "group_" in field}
        if self.case.group > 1:
            found |= grouped
        found["bias"] = found["bias"].unsqueeze(0)
        found |= {field: one.squeeze(0) for field, one in found.items() if field in ("next_shared", *SHARED)}
        blocks = found["gate_up"].shape[2]
        count = len(found["gate_up"])
        if self.case.stored == "fp8":
            found["shared_down_scales"] = found["shared_down_scales"].squeeze(0)
        else:  # routed experts have scales always
            found["gate_up_scales"], found["down_scales"] = torch.ones(count, 2, blocks), torch.ones(count, blocks)
        found["down_scales"] = found["down_scales"].view(count, blocks)
        cached = torch.nn.functional.pad(self.cached[number, :, slots], (0, 0, 0, BEHIND), value=1e4)
        found["latents"], found["keys"] = cached.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return layer_of({field: to_kernel(one) for field, one in found.items()})


SHARED = ("shared_gate_up", "shared_down", "shared_gate_up_scales", "shared_down_scales")


def in_pages(arguments: list[Any], number: int, batch: int) -> dict[str, Any]:
    """Of `decode_layer`, a layer of those of `decode_layers`, its cache in pages of 32 slots in no order."""
    (
        hidden,
        projected,
        layers,
        rotation,
        lengths,
        ranks,
        groups,
        first,
        experts,
        scale,
        factor,
        eps,
        *_,
        own_eps,
        slots,
    ) = arguments
    tensors = {
        name: one
        for name, one in zip(ORDER, layers[number], strict=True)
        if not name.endswith(("q_b_scales", "w_uk_scales", "w_uv_scales", "o_scales"))
    }
    halves = zip(*(tensors[name][:, :slots].chunk(2, dim=-1) for name in ("latents", "keys")), strict=True)
    entries = torch.stack([torch.cat(half, dim=-1) for half in halves])
    order = torch.randperm(batch * slots // 32, generator=torch.Generator().manual_seed(7))
    pages = torch.empty(2, len(order), 1, 32, entries.shape[-1], dtype=entries.dtype)
    pages[:, order] = entries.reshape(pages.shape)
    runs = (order.view(batch, -1, 1) * 16 + torch.arange(16)).flatten(1).int()
    return tensors | {
        "latents": pages[0], "keys": pages[1],
        "hidden": hidden, "projected": projected, "rotation": rotation, "lengths": lengths, "runs": runs, "each": 2,
        "first_expert": first, "ranks": ranks, "groups": groups, "num_experts": experts, "softmax_scale": scale,
        "routed_scaling_factor": factor, "eps": eps, "latent_eps": own_eps,
    }  # fmt: skip


def layer_by_layer(arguments: list[list[Any]], case: Case) -> list[list[Any]]:
    """What `decode_layers` gives, by a call a layer: what one gives is the next one's hidden states and projections."""
    order = inspect.signature(decode_layer.function).parameters
    entries: list[list[Any]] = [[] for _ in arguments]
    for number in range(LAYERS):
        calls = [in_pages(argument, number, case.batch) for argument in arguments]
        found = run_on_ranks(decode_layer[case.cores], [[call[name] for name in order] for call in calls])
        for of_rank, one, rank in zip(entries, arguments, found, strict=True):
            of_rank.append(rank[1:3])
            one[:2] = [rank[0].reshape(len(rank[0]), -1), rank[-1].reshape(len(rank[0]), -1)[:, : one[1].shape[1]]]
    new = [[np.concatenate(both) for both in zip(*of_rank, strict=True)] for of_rank in entries]
    return [[rank[0], *of_rank] for rank, of_rank in zip(found, new, strict=True)]


def errors(case: Case, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Relative L2 to float64 of hidden states, new latents, new keys: the worst rank's, and the plain model's."""
    step = Step(case, dtype)
    arguments = [step.arguments(rank) for rank in range(RANKS)]
    found = layer_by_layer(arguments, case) if case.apart else run_on_ranks(decode_layers[case.cores], arguments)
    assert all(np.array_equal(rank[0], found[0][0]) for rank in found)  # the residual has the same bits on all ranks
    exact, same = step.of_plain(torch.float64)[1:], step.of_plain(dtype)[1:]
    return [
        (max(relative(rank[place], wanted) for rank in found), relative(same[place], wanted))
        for place, wanted in enumerate(exact)
    ]


MORE = [Case(3), Case(2, cores=1), Case(1, group=2), Case(3, 2, group=2), Case(1, apart=True)]
CASES = [Case(1), Case(2, apart=True), Case(2, 2, cores=1), Case(2, 2, group=4), Case(2, group=2, stored="fp8")]


@pytest.mark.parametrize("case", CASES + (MORE if os.environ.get("KIMI_K2_SLOW") else []), ids=str)
def test_layers_in_float32(case: Case) -> None:
    assert max(error for error, _ in errors(case, torch.float32)) < 1e-5


@pytest.mark.parametrize("case", [Case(1), Case(2, group=2, stored="fp8")], ids=str)
def test_layers_in_bfloat16_are_no_farther_than_pytorch(case: Case) -> None:
    for error, of_plain in errors(case, torch.bfloat16):
        assert error <= of_plain
        assert error < 2e-2


def test_a_cache_too_long_to_be_transposed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "_CACHE_BYTES", 0)
    test_layers_in_float32(Case(2))


def test_a_field_that_a_layer_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="q_bias"):
        layer_of({"q_bias": None})
