"""The expert kernels in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import hopper, is_hopper, runs_cuda
from kimi_k2.kernels.experts import bf16 as moe_bf16
from kimi_k2.kernels.experts import fp8 as moe_fp8
from kimi_k2.kernels.experts import fp8_decode as moe_decode
from kimi_k2.kernels.experts import invariant, tuning, w4a16_few
from kimi_k2.kernels.experts import w4a16 as moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import GROUP as W4A16_GROUP
from kimi_k2.kernels.experts.w4a16_layout import checkpoint_order, prepare_w4a16
from kimi_k2.kernels.linear import tuning as linear_tuning
from kimi_k2.kernels.rowwise import pairs
from kimi_k2.ops import experts as ops_experts
from kimi_k2.ops import linear as ops_linear
from kimi_k2.ops.experts import ExpertWeights
from kimi_k2.ops.linear import Weight
from kimi_k2.ops.registry import COMPOSED, PLAIN, batch_invariant, is_decoding
from kimi_k2.ops.streams import beside
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.mxfp4 import CompressedMxfp4Format, QuarkMxfp4Format
from kimi_k2.quantization.nvfp4 import CompressedNvfp4Format, Nvfp4Format

BLOCK = (128, 128)
# Tokens whose unquantized shared expert goes first where its launches and the routed ones have blocks to begin: the
# routed ones' hold every SM to their end. INT4, a layer of a rank of TP8: 6 us of 167 at 16 tokens, 5 of 330 at 64; at
# eight nothing, at four 4 us more.
SHARED_FIRST = range(16, 65)
# Tokens from which on the shared expert's last product adds to the routed ones' sums, as it writes them.
ADDING = 1024
FIXED_PARTS = "sums in parts by the weights' shape, pairs added in their order"


def _fixed_choice(
    x: Tensor, topk_indices: Tensor, shape: tuple[int, int, int], dtype: str, block: str, *, int4: bool
) -> list[int] | None:
    """The launch to pin in batch-invariant mode for experts [E, H, I]; None leaves it to the kernel."""
    if not batch_invariant():
        return None
    (experts, hidden, inter), top_k = shape, topk_indices.shape[1]
    device = hopper(x.device.index, "routed_experts")[0]
    tuned = tuning.choose(x.shape[0], top_k, experts, inter, hidden, dtype=dtype, block=block, device=device)
    how = invariant.fixed_choice(tuned, x.shape[0], top_k, hidden, inter, decoding=is_decoding(), int4=int4)
    return [int(value) for value in astuple(how)]


def _routing(topk_indices: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels take it; a gate's results may be cuts of wider tensors, in float64 too."""
    return topk_indices.contiguous(), topk_weights.float().contiguous()


def fp8_tensors(experts: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `moe_fp8` takes them."""
    gate_up, down = experts.gate_up.tensors, experts.down.tensors
    return gate_up["weight"], gate_up["weight_scale_inv"], down["weight"], down["weight_scale_inv"]


def _is_fp8(x: Tensor, experts: ExpertWeights) -> bool:
    """Blocks of 128x128 kept as stored, in sizes that the kernels take, and BF16 tokens."""
    if x.dtype != torch.bfloat16 or not experts.gate_up.fp8_block == experts.down.fp8_block == BLOCK:
        return False
    names = "gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"
    return moe_fp8.moe_fp8.fits(**dict(zip(names, fp8_tensors(experts), strict=True)))


def _supports_moe_decode(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    """FP8 blocks, few tokens."""
    _, hidden, inter = next(iter(experts.down.tensors.values())).shape
    few = moe_decode.supports(x.shape[0], topk_indices.shape[1], hidden, inter, x.device)
    return few and _is_fp8(x, experts)


@ops_experts.routed_experts.entry("moe_decode", takes=_supports_moe_decode)
def routed_experts_decode(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """`moe_decode` over the experts that this rank holds."""
    routing = _routing(topk_indices, topk_weights)
    return moe_decode.moe_decode(x.contiguous(), *fp8_tensors(experts), *routing, experts.expert_map)


def _supports_moe_fp8(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    """FP8 blocks."""
    return is_hopper(x.device) and _is_fp8(x, experts)


@ops_experts.routed_experts.entry("moe_fp8", takes=_supports_moe_fp8, batch_invariant=FIXED_PARTS)
def routed_experts_fp8(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """`moe_fp8` over the experts that this rank holds."""
    routing = _routing(topk_indices, topk_weights)
    count, hidden, inter = experts.down.tensors["weight"].shape
    choice = _fixed_choice(x, topk_indices, (count, hidden, inter), "fp8_e4m3", "128x128", int4=False)
    return moe_fp8.moe_fp8(x.contiguous(), *fp8_tensors(experts), *routing, experts.expert_map, choice)


@dataclass(frozen=True)
class W4A16Order:
    """The order in memory that `moe_w4a16` wants (`moe_w4a16_layout`), of gate_up_proj or of down_proj."""

    gate_up: bool

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """One expert's projection in the checkpoint's order."""
        return checkpoint_order(tensors, self.gate_up)


W4A16_ORDERS = W4A16Order(True), W4A16Order(False)


_NVFP4 = Nvfp4Format, CompressedNvfp4Format
FOUR_BIT_FLOATS = (*_NVFP4, CompressedMxfp4Format, QuarkMxfp4Format)


def _values(tensors: dict[str, Tensor]) -> Tensor:
    """A projection's values: BF16, or packed ones as words of eight."""
    values = tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]
    return values if values.dtype == torch.bfloat16 else values.view(torch.int32)


def four_bit_tensors(experts: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `moe_w4a16` takes them."""
    gate_up, down = experts.gate_up.tensors, experts.down.tensors
    return _values(gate_up), gate_up["weight_scale"], _values(down), down.get("weight_scale")


def _scales_of_all(experts: ExpertWeights) -> dict[str, Any]:
    """The operation's arguments of NVFP4."""
    scheme = experts.gate_up.quantization
    if not isinstance(scheme, _NVFP4):
        return {}
    whole = scheme.suffixes[-1]
    named = {"gate_up_proj_all": experts.gate_up.tensors[whole], "down_proj_all": experts.down.tensors[whole]}
    return named | {"divides": isinstance(scheme, CompressedNvfp4Format)}


def _is_four_bits(experts: ExpertWeights, dtype: torch.dtype) -> bool:
    """Kept as stored, for BF16 tokens: MXFP4, NVFP4, or INT4 in groups; with groups of 32 the second may be BF16."""
    scheme, second = experts.gate_up.quantization, experts.down.quantization
    if dtype != torch.bfloat16 or second not in (scheme, None):
        return False
    if isinstance(scheme, Int4GroupFormat):
        if not moe_w4a16.takes_groups(scheme.group_size, second is not None):
            return False
    elif not isinstance(scheme, FOUR_BIT_FLOATS) or second is None:
        return False
    down = _values(experts.down.tensors)
    if second is None and down.dtype != torch.bfloat16:
        return False
    count, hidden, columns = down.shape
    return moe_w4a16.supports(hidden, columns if second is None else columns * 8, count, down.device)


def prepare_w4a16_experts(experts: ExpertWeights, dtype: torch.dtype) -> ExpertWeights | None:
    """Put the experts into `moe_w4a16`'s order, in place, if it would serve tokens of `dtype`; None if not.

    Raises:
        KernelError: a CUDA graph is being captured.
    """
    if experts.gate_up.order is not None or not _is_four_bits(experts, dtype):
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise KernelError("four-bit experts must be prepared before a graph is captured: their order changes")
    prepare_w4a16(*four_bit_tensors(experts), in_place=True)
    gate_up, down = (replace(w, order=o) for w, o in zip((experts.gate_up, experts.down), W4A16_ORDERS, strict=True))
    return replace(experts, gate_up=gate_up, down=down)


def supports_moe_w4a16(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    """What `prepare_w4a16_experts` has put into order, BF16 tokens, up to 16 experts a token."""
    prepared = (experts.gate_up.order, experts.down.order) == W4A16_ORDERS
    return prepared and topk_indices.shape[1] <= 16 and _is_four_bits(experts, x.dtype)


def _few_int4(x: Tensor, experts: ExpertWeights, topk_indices: Tensor) -> bool:
    """In a decode step of batch-invariant mode: what `moe_w4a16_few` takes of INT4 in both stages."""
    if not (batch_invariant() and is_decoding()):
        return False
    words, scale, down, second = four_bit_tensors(experts)
    if second is None or not runs_cuda(x.device):
        return False
    named = {"gate_up_proj_packed": words, "gate_up_proj_scale": scale, "down_proj_packed": down}
    splits = invariant.decode_splits(topk_indices.shape[1], x.shape[1], words.shape[1] // 2, int4=True)
    return w4a16_few.moe_w4a16_few.fits(x=x, **named, down_proj_scale=second, k=topk_indices.shape[1], splits=splits)


@ops_experts.routed_experts.entry(
    "moe_w4a16", takes=supports_moe_w4a16, prepare=prepare_w4a16_experts, batch_invariant=FIXED_PARTS
)
def routed_experts_w4a16(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """`moe_w4a16` over the experts that this rank holds."""
    routing = _routing(topk_indices, topk_weights)
    weights = four_bit_tensors(experts)
    count, hidden, inter = weights[0].shape[0], x.shape[1], weights[0].shape[1] // 2
    dtype, block = moe_w4a16.TUNING_DTYPES[weights[3] is None], f"1x{W4A16_GROUP}"
    choice = _fixed_choice(x, topk_indices, (count, hidden, inter), dtype, block, int4=True)
    if choice is not None and _few_int4(x, experts, topk_indices):
        return w4a16_few.moe_w4a16_few(x.contiguous(), *weights, *routing, choice[2], experts.expert_map)
    inner = 1
    if choice is not None and x.shape[0] >= invariant.INNER_TOKENS:
        choice[2], inner = 1, choice[2]
    arguments = x.contiguous(), *weights, *routing, experts.expert_map, choice, choice is not None, inner
    return moe_w4a16.moe_w4a16(*arguments, **_scales_of_all(experts))


def _supports_moe_bf16(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    """Both projections unquantized in BF16, BF16 tokens."""
    if experts.gate_up.quantization is not None or experts.down.quantization is not None:
        return False
    down = experts.down.tensors["weight"]
    plain = x.dtype == down.dtype == experts.gate_up.tensors["weight"].dtype == torch.bfloat16
    return plain and moe_bf16.supports(down.shape[1], down.shape[2], x.device)


@ops_experts.routed_experts.entry(
    "moe_bf16", takes=_supports_moe_bf16, batch_invariant="one tile for all decode steps, one for all prompts"
)
def routed_experts_bf16(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """`moe_bf16` over the experts that this rank holds."""
    weights = experts.gate_up.tensors["weight"], experts.down.tensors["weight"]
    routing = _routing(topk_indices, topk_weights)
    how = list(invariant.fixed_bf16_launch(decoding=is_decoding())) if batch_invariant() else None
    return moe_bf16.moe_bf16(x.contiguous(), *weights, *routing, experts.expert_map, how)


def _like_a_routed_one(experts: ExpertWeights, shared_gate_up: Weight, shared_down: Weight) -> bool:
    """Whether the shared expert has FP8 blocks and the routed ones' width."""
    fp8 = shared_gate_up.fp8_block == shared_down.fp8_block == BLOCK
    return fp8 and shared_down.tensors["weight"].shape == experts.down.tensors["weight"].shape[1:]


def _supports_joined(x: Tensor, experts: ExpertWeights, *others: Any) -> bool:
    """What `moe_decode` takes, and a shared expert of the routed ones' width and format."""
    *routing, shared_gate_up, shared_down = others
    return _supports_moe_decode(x, experts, *routing) and _like_a_routed_one(experts, shared_gate_up, shared_down)


def with_shared(
    x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor, shared_gate_up: Weight,
    shared_down: Weight, *, in_parts: bool = False,
) -> Tensor:  # fmt: skip
    """`moe_decode`, with the shared expert as one more of the routed ones.

    `in_parts`: the bits that a step of many tokens has by `moe_fp8` and `block_gemm`.
    """
    routing = _routing(topk_indices, topk_weights)
    suffixes, parts = ("weight", "weight_scale_inv"), None
    shared = [one.tensors[suffix] for one in (shared_gate_up, shared_down) for suffix in suffixes]
    if in_parts:
        _, hidden, inter = experts.down.tensors["weight"].shape
        first = invariant.decode_splits(topk_indices.shape[1], hidden, inter)
        parts = [first, linear_tuning.parts(2 * inter, hidden), linear_tuning.parts(hidden, inter)]
    arguments = x.contiguous(), *fp8_tensors(experts), *routing, experts.expert_map, *shared, parts
    return moe_decode.moe_decode(*arguments)


ops_experts.routed_experts_with_shared.entry(
    "moe_decode", takes=_supports_joined, joins={"routed_experts": "moe_decode"}
)(with_shared)


def _supports_few(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, *others: Any) -> bool:
    """In a decode step of batch-invariant mode: what `moe_decode` takes with parts, a shared expert as there."""
    topk_weights, *shared = others
    if not (batch_invariant() and is_decoding() and _supports_moe_fp8(x, experts, topk_indices, topk_weights)):
        return False
    if not (_like_a_routed_one(experts, *shared) and runs_cuda(x.device)):
        return False
    named = {"gate_up_proj": experts.gate_up.tensors["weight"], "down_proj": experts.down.tensors["weight"]}
    one = {"shared_gate_up": shared[0].tensors["weight"], "k": topk_indices.shape[1]}
    return moe_decode.moe_decode.fits(**named, **one, T=len(x), parts=[1, 1, 1])


ops_experts.routed_experts_with_shared.entry(
    "moe_few",
    takes=_supports_few,
    joins={"routed_experts": "moe_fp8", "swiglu": "block_gemm", "project": "block_gemm", "fp8_linear": "block_gemm"},
    batch_invariant="the sums of moe_fp8 and block_gemm",
)(partial(with_shared, in_parts=True))


def _supports_few_int4(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, *others: Any) -> bool:
    """What `moe_w4a16_few` takes, with an unquantized shared expert."""
    topk_weights, *shared = others
    scheme = experts.gate_up.quantization
    if not isinstance(scheme, Int4GroupFormat) or any(one.quantization is not None for one in shared):
        return False
    (tokens, top_k), rows = topk_indices.shape, experts.gate_up.tensors["weight_packed"].shape[1]
    if not w4a16_few.has_room(tokens, top_k, rows // 2):
        return False
    fits = supports_moe_w4a16(x, experts, topk_indices, topk_weights) and _few_int4(x, experts, topk_indices)
    return fits and w4a16_few.supports_shared(*(one.tensors["weight"] for one in shared))


@ops_experts.routed_experts_with_shared.entry(
    "moe_w4a16_few",
    takes=_supports_few_int4,
    joins={
        "routed_experts": "moe_w4a16", "swiglu": PLAIN, "project": PLAIN, "dense_linear": "dense_gemm",
        "silu_and_mul": PLAIN,
    },
    batch_invariant="the sums of moe_w4a16 and dense_gemm",
)  # fmt: skip
def few_int4_experts(
    x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor, shared_gate_up: Weight,
    shared_down: Weight,
) -> Tensor:  # fmt: skip
    """`moe_w4a16_few`: the bits that a step of many tokens has by `moe_w4a16`, `dense_gemm` and PyTorch."""
    routing = _routing(topk_indices, topk_weights)
    inter = experts.gate_up.tensors["weight_packed"].shape[1] // 2
    splits = invariant.decode_splits(topk_indices.shape[1], x.shape[1], inter, int4=True)
    shared = shared_gate_up.tensors["weight"], shared_down.tensors["weight"]
    weights = four_bit_tensors(experts)
    return w4a16_few.moe_w4a16_few(x.contiguous(), *weights, *routing, splits, experts.expert_map, *shared)


def _adds(
    x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor, shared_gate_up: Weight,
    shared_down: Weight,
) -> bool:  # fmt: skip
    """Many BF16 tokens, a shared expert in FP8 blocks or unquantized."""
    known = shared_down.fp8_block == BLOCK or shared_down.quantization is None
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) >= ADDING and known


@ops_experts.routed_experts_with_shared.entry(
    "adding_product", takes=_adds,
    joins={"swiglu": PLAIN, "project": PLAIN, "fp8_linear": PLAIN, "dense_linear": PLAIN},
)  # fmt: skip
def shared_added_to_routed(
    x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor, shared_gate_up: Weight,
    shared_down: Weight,
) -> Tensor:  # fmt: skip
    """The shared expert's hidden values on a second stream; their product reads the routed sums and writes the whole.

    So the sum needs no launch of its own, with three more passes over [T, H].
    """
    hidden, routed = beside(
        lambda: ops_experts.silu_and_mul(ops_linear.project(x, shared_gate_up)),
        partial(ops_experts.routed_experts, x, experts, topk_indices, topk_weights),
        x.device,
    )
    return routed.addmm_(hidden, ops_linear.dequantize(shared_down, x.dtype).t())


@ops_experts.routed_experts_with_shared.entry("side_stream", takes=lambda x, *_: x.is_cuda, batch_invariant=COMPOSED)
def experts_beside_shared(
    x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor, shared_gate_up: Weight,
    shared_down: Weight,
) -> Tensor:  # fmt: skip
    """The shared expert on a second stream: it fills what routing leaves idle. Fork and join become a graph's edges."""
    first = shared_gate_up.quantization is None and len(x) in SHARED_FIRST
    shared, routed = beside(
        partial(ops_experts.swiglu, x, shared_gate_up, shared_down),
        partial(ops_experts.routed_experts, x, experts, topk_indices, topk_weights),
        x.device,
        priority=-1 if first else 0,
    )
    if pairs.supports_add(routed, shared):
        return pairs.add(routed, shared)
    return routed + shared
