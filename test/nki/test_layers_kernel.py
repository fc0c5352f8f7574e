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
from kimi_k2.neuron import layer_arguments
from kimi_k2.nki.kernels import latent_attention
from kimi_k2.nki.kernels.layer_attention import FIELDS
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
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-3,
}  # fmt: skip
Q_RANKS = {"bf16": 128, "fp8": 256}  # of the first a core has no whole block of the next layer's down projections


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


_FOLDER = tempfile.TemporaryDirectory()  # gone with the process


@cache
def checkpoint(stored: str) -> Path:
    directory = Path(_FOLDER.name) / stored
    config = with_format(tiny_config(q_lora_rank=Q_RANKS[stored], **SIZES), stored)
    write_synthetic_checkpoint(directory, config, seed=1)
    return directory


@cache
def plain(stored: str, dtype: torch.dtype) -> KimiK2ForCausalLM:
    return KimiK2ForCausalLM.from_pretrained(checkpoint(stored), dtype=dtype)


@cache
def converted(stored: str, dtype: torch.dtype, group: int) -> list[dict[str, Tensor]]:
    """What each rank's file holds; attention in FP8 where the checkpoint has it so and ranks share a cache."""
    made = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    experts = "tiles" if stored == "fp8" else "bf16_tiles"
    Presharder(
        checkpoint(stored),
        made,
        Layout(RANKS, experts=experts, dtype=dtype, decode="layers", query_group=group if group > 1 else 0),
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

    def arguments(self, rank: int) -> dict[str, Any]:
        """Of `decode_layers` on one rank."""
        case, model = self.case, plain(self.case.stored, torch.float64).model
        first: Any = model.layers[0]
        downs = torch.cat(
            [one.dequantized(torch.float64) for one in (first.self_attn.q_a_proj, first.self_attn.kv_a_proj_with_mqa)]
        )
        hidden = model.embed_tokens(self.ids).flatten(0, 1)
        cos_sin = (part.flatten(0, 1).float() for part in model.rotary(self.positions, torch.float64))
        place, each = rank % case.group, SLOTS // case.group
        more: dict[str, Any] = {}
        if case.group > 1:
            own = torch.full((case.batch * case.tokens, 1), int(place == 1), dtype=torch.int32)
            groups = tuple(tuple(range(n, n + case.group)) for n in range(0, RANKS, case.group))
            more = {"cache_groups": groups, "own": own}
        slots = slice(place * each, (place + 1) * each)
        return {
            "hidden": hidden.float(), "projected": (hidden @ (downs * first.input_layernorm.weight).T).float(),
            "layers": tuple(self.layer(number, rank, slots) for number in range(LAYERS)),
            "rotation": layer_arguments.rotation(*cos_sin),
            "lengths": (self.lengths - place * each).clamp(0, each).int(), "ranks": RANKS,
            "groups": (tuple(range(RANKS)),), "first_expert": torch.zeros(1, 1, dtype=torch.int32), "attended": each,
            **layer_arguments.numbers(self.config), **more,
        }  # fmt: skip

    def layer(self, number: int, rank: int, slots: slice) -> Any:
        name, file = f"layers.{number}.", converted(self.case.stored, self.dtype, self.case.group)[rank]
        held = {tensor.removeprefix(name): file[tensor] for tensor in file if tensor.startswith(name)}
        cached = torch.nn.functional.pad(self.cached[number, :, slots], (0, 0, 0, BEHIND), value=1e4)
        latents, keys = cached.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        found = {**layer_arguments.weights(held, self.dtype), "latents": latents, "keys": keys}
        return layer_of({field: to_kernel(one) for field, one in found.items()})


def run(kernel: Any, calls: list[dict[str, Any]]) -> list[list[Any]]:
    """A kernel on all ranks, each with its own arguments by name."""
    order = inspect.signature(kernel.function).parameters.values()
    return run_on_ranks(kernel, [[call.get(argument.name, argument.default) for argument in order] for call in calls])


def in_pages(arguments: dict[str, Any], number: int, batch: int) -> dict[str, Any]:
    """Of `decode_layer`, a layer of those of `decode_layers`, its cache in pages of 32 slots in no order."""
    tensors, slots = dict(zip(FIELDS, arguments["layers"][number], strict=True)), arguments["attended"]
    halves = zip(*(tensors[name][:, :slots].chunk(2, dim=-1) for name in ("latents", "keys")), strict=True)
    entries = torch.stack([torch.cat(half, dim=-1) for half in halves])
    order = torch.randperm(batch * slots // 32, generator=torch.Generator().manual_seed(7))
    pages = torch.empty(2, len(order), 1, 32, entries.shape[-1], dtype=entries.dtype)
    pages[:, order] = entries.reshape(pages.shape)
    runs = (order.view(batch, -1, 1) * 16 + torch.arange(16)).flatten(1).int()
    return {**arguments, **tensors, "latents": pages[0], "keys": pages[1], "runs": runs, "each": 2}


def layer_by_layer(arguments: list[dict[str, Any]], case: Case) -> list[list[Any]]:
    """What `decode_layers` gives, by a call a layer: what one gives is the next one's hidden states and projections."""
    entries: list[list[Any]] = [[] for _ in arguments]
    for number in range(LAYERS):
        found = run(decode_layer[case.cores], [in_pages(own, number, case.batch) for own in arguments])
        for of_rank, own, rank in zip(entries, arguments, found, strict=True):
            of_rank.append(rank[1:3])
            hidden, projected = (rank[place].reshape(len(rank[0]), -1) for place in (0, -1))
            own |= {"hidden": hidden, "projected": projected[:, : own["projected"].shape[1]]}
    new = [[np.concatenate(both) for both in zip(*of_rank, strict=True)] for of_rank in entries]
    return [[rank[0], *of_rank] for rank, of_rank in zip(found, new, strict=True)]


def errors(case: Case, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Relative L2 to float64 of hidden states, new latents, new keys: the worst rank's, and the plain model's."""
    step = Step(case, dtype)
    arguments = [step.arguments(rank) for rank in range(RANKS)]
    found = layer_by_layer(arguments, case) if case.apart else run(decode_layers[case.cores], arguments)
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
