"""Scratch memory of the compiled graphs. Nothing here is measured by us: each part names where it is from.

The rule of `check_fit`: a fixed part, as reported for the published K2.5 port at its shortest cache, and on top the
arrays that are alive at once in our own graphs, modelled. Growth with the context as reported for that port is shown
beside it but not taken over: its decode graph is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.expert_blocks import blocks_at_once, expert_blocks
from kimi_k2.plan.published import data
from kimi_k2.plan.roofline import GIB
from kimi_k2.plan.target import Target
from kimi_k2.plan.torch_native import BLOCK, KEYS, blocks_of
from kimi_k2.sharding.experts.format import expert_formats

BF16, FLOAT32 = 2, 4
SMALL_ARRAYS = 1.1  # what the formulas leave out; test/nxd holds them to the lowered graphs


@dataclass(frozen=True)
class Reported:
    """Scratch of another implementation, as its source states it.

    Attributes:
        nbytes: interpolated at the context, or on at the pace of the last two lengths.
        longest, largest: tokens that it was last reported at, and its bytes there.
    """

    nbytes: int
    longest: int
    largest: int


@dataclass(frozen=True)
class Scratch:
    """What a Trainium deployment needs beside its weights and cache.

    Attributes:
        fixed: reported for another implementation, see the module's text.
        prefill, decode, tower: arrays alive at once in our graphs, modelled; 0 without graphs of the tower. The runtime
            shares scratch between graphs.
        reported: what that other implementation needs at this context.
    """

    fixed: int
    prefill: int
    decode: int
    tower: int
    reported: Reported

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.fixed + max(self.prefill, self.decode, self.tower)


def make_scratch(config: KimiK2Config, target: Target) -> Scratch:
    """The scratch of a Trainium target."""
    fixed = int(_points()[0][1] * GIB)
    return Scratch(
        fixed, *live_bytes(config, target), tower_live_bytes(config, target), reported_scratch(target.context)
    )


def tower_live_bytes(config: KimiK2Config, target: Target) -> int:
    """The same for the largest graph of the vision tower, 0 without one: in attention, feed-forward or projector."""
    vision, ranks = config.vision, target.tower_ranks
    if vision is None or ranks is None:
        return 0
    width, fed = vision.hidden_size, vision.intermediate_size // ranks
    heads, most = vision.num_attention_heads // ranks, 0
    for patches, frames in target.tower_buckets:
        stream, tokens = patches * width * BF16, patches // (frames * vision.merged_size // width)
        # Residual, normed and rotated; scores before and after a step, and twice what tells images apart, all float32.
        attention = 3 * stream + (2 * heads + 2) * patches**2 * FLOAT32
        feed_forward = 4 * stream + 2 * patches * fed * BF16  # sums over ranks are float32
        # The projector's second matrix is transposed.
        projector = (vision.merged_size // ranks + tokens) * config.hidden_size * BF16 + patches * width * FLOAT32
        most = max(most, attention, feed_forward, projector)
    return int(SMALL_ARRAYS * most)


def live_bytes(config: KimiK2Config, target: Target) -> tuple[int, int]:
    """Bytes of the intermediate arrays that are alive at once in the prefill and in the decode graph, at most.

    Nothing is taken to be fused. Which arrays these are was read from lowered graphs (`plan/hlo.py`).
    """
    prefill = max(_attention_prefill(config, target), _experts_prefill(config, target))
    decode = max(_head(config, target), _attention_decode(config, target), _experts_decode(config, target))
    return int(SMALL_ARRAYS * prefill), int(SMALL_ARRAYS * decode)


def _heads(config: KimiK2Config, target: Target) -> int:
    return config.num_attention_heads // target.layout.ranks


def _stream(config: KimiK2Config, tokens: int) -> int:
    return tokens * config.hidden_size * BF16


def _gate_up(config: KimiK2Config, target: Target, experts: int) -> int:
    """Elements of `experts` gate and up matrices on one rank."""
    return experts * config.hidden_size * 2 * config.moe_intermediate_size // target.layout.moe_tp


class HeldAs(NamedTuple):
    """How an expert's weights are held.

    Attributes:
        itemsize: bytes a value.
        dequantized: they are multiplied by scales before their GEMM; of tiles gate and up are, and of blocks all beside
            at least as many tokens as a block has rows.
        scales_outputs: the GEMM's outputs are multiplied instead; of tiles those of down are.
        block: rows of a block of those that are dequantized and lie in none; 0 of others.
    """

    itemsize: int
    dequantized: bool
    scales_outputs: bool
    block: int


def held_as(config: KimiK2Config, target: Target) -> HeldAs:
    """How the expert format of `target` holds a rank's expert weights."""
    rows, columns = config.moe_intermediate_size, config.hidden_size
    experts = expert_formats()[target.layout.experts].for_layout(config, target.layout)
    specs = experts.specs(rows, columns, target.layout.dtype)
    # A scale an output channel multiplies the GEMM's result instead.
    finer = any(shape[-1] > 1 for name, (_, shape) in specs.items() if name != "weight")
    block = rows // specs["scale"][1][0] if finer and not experts.tiles else 0
    return HeldAs(specs["weight"][0].itemsize, finer, experts.tiles or not finer, block)


def _attention_prefill(config: KimiK2Config, target: Target) -> int:
    """Residual and normed hidden states, scores in float32 before and after masking, the mask."""
    tokens, line = target.prefill_sequences * target.prompt, target.torch_native
    keys = target.prompt
    if line:
        keys = line.kv_segment_size_buckets[0] if line.kv_segment_size_buckets else min(keys, KEYS)
    scores = tokens * _heads(config, target) * keys
    return 2 * _stream(config, tokens) + scores * (2 * FLOAT32 + 1)


def _experts_prefill(config: KimiK2Config, target: Target) -> int:
    """The PyTorch form, a group of blocks at a time: hidden states thrice, the float32 sum, and the worst step."""
    tokens = target.prefill_sequences * target.prompt
    blocks = blocks_at_once(config, target)
    rows = blocks * (target.block_size or 0) * config.hidden_size
    total = tokens * config.hidden_size * FLOAT32
    if blocks and blocks == expert_blocks(config, target, tokens):  # one group: summed when its blocks are done
        total = 0
    stored, step = held_as(config, target), 0
    if target.torch_native:
        # All blocks' rows and a group's products before and after their scales; then their outputs, and every choice's
        # before and after it is float32.
        products = (
            rows * 2 * config.moe_intermediate_size // (target.layout.moe_tp * stored.block) if stored.block else rows
        )
        choices = tokens * config.num_experts_per_tok
        every = blocks_of(choices, tokens, config.n_routed_experts // target.layout.moe_ep) * BLOCK * BF16
        step = every * config.hidden_size + 2 * products * FLOAT32
        step = max(step, (every + choices * (BF16 + FLOAT32)) * config.hidden_size)
    elif stored.dequantized:
        step = 2 * _gate_up(config, target, blocks) * FLOAT32 + rows * BF16
    if stored.scales_outputs and not target.torch_native:
        step = max(step, 2 * rows * FLOAT32)  # the blocks' outputs in float32, before and after their scales
    return 3 * _stream(config, tokens) + total + step


def _head(config: KimiK2Config, target: Target) -> int:
    """lm_head, transposed."""
    return config.vocab_size // target.layout.ranks * config.hidden_size * BF16


def _attention_decode(config: KimiK2Config, target: Target) -> int:
    """The cache of one layer, cut into its two parts, and the scores; flash decoding has the heads of its group."""
    slots = target.batch * target.context // target.cache_ranks
    heads = _heads(config, target) * target.cache_ranks * target.positions
    return slots * (config.cache_dim * BF16 + heads * 2 * FLOAT32)


def _experts_decode(config: KimiK2Config, target: Target) -> int:
    """Gate and up of the experts that the step reads: gathered, and as they are multiplied. A kernel does neither."""
    local = config.n_routed_experts // target.layout.moe_ep
    slots = target.rows * config.num_experts_per_tok
    if target.layout.tiles and slots < config.n_routed_experts:
        return 0
    elements, stored = _gate_up(config, target, min(slots, local)), held_as(config, target)
    tokens = 1 if slots < local else target.rows
    if tokens < stored.block:  # operands, and a block's products before and after their scales
        products = elements // stored.block * tokens
        return elements * ((stored.itemsize if slots < local else 0) + BF16) + 2 * products * FLOAT32
    if stored.dequantized:
        return 2 * elements * FLOAT32  # before and after the scale
    return elements * ((stored.itemsize if slots < local else 0) + BF16)


def _points() -> list[tuple[int, float]]:
    """Cache length and GiB of scratch, of the published K2.5 port on 64 ranks."""
    points: list[tuple[int, float]] = data()["memory"]["scratch"]["points"]
    return points


def reported_scratch(context: int) -> Reported:
    """Piecewise linear through the reported points, and beyond the last along its last section."""
    points = _points()
    upper = next((i for i, (length, _) in enumerate(points) if i and context <= length), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    size = max(y0 + (y1 - y0) * (context - x0) / (x1 - x0), 0.0)
    longest, largest = points[-1]
    return Reported(int(size * GIB), longest, int(largest * GIB))
