"""Four-bit (W4A16) routed experts on Hopper: `torch.ops.kimi_k2.moe_w4a16`.

Replaces `ops.experts.routed_experts` over weights that are symmetric INT4 in groups of 32, 64 or 128 along the input
dimension (compressed-tensors `pack-quantized`: K2-Thinking, K2.5), MXFP4 or NVFP4 (csrc/w4a16_formats.cuh). Weights are
unpacked to bfloat16 in registers, value times scale rounded once (those of four-bit floats are exact); for few tokens
an expert to e4m3, unrounded, and scales are applied to sums (tokens are then the sum of two e4m3 values, which hold
bfloat16's bits: csrc/w4a16_e4m3.cuh). Sums are float32; the intermediate is bfloat16. INT4's second stage may have
bfloat16 weights instead (`w2_bf16`). Weights must first be put in the kernel's order by `prepare_w4a16`.
csrc/w4a16_kernel.cuh says how the launch works; up to `DECODE_TOKENS` tokens csrc/w4a16_decode.cu takes the pairs one
by one, those of one expert together. Capture-safe: see common/workspace.py for scratch memory.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import hopper, is_hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure
from kimi_k2.kernels.common.workspace import Layout, lay_out
from kimi_k2.kernels.experts import fp8 as moe_fp8
from kimi_k2.kernels.experts import fp8_decode as moe_decode
from kimi_k2.kernels.experts.launch import MAPPED, ROUTING, fill, queues
from kimi_k2.kernels.experts.tuning import ExpertChoice, choices
from kimi_k2.kernels.experts.w4a16_layout import CHUNK_COLUMNS, CHUNK_ROWS, FORMATS, GROUP, INT4, format_of

MAX_EXPERTS = moe_fp8.MAX_EXPERTS
TUNING_DTYPES = {False: "int4", True: "int4_w2_bf16"}
# Chunks of weights (18 KB) that a block keeps requested: enough to cover the memory's latency; more would make flags,
# atomics and token loads wait behind them.
IN_FLIGHT = {16: 6, 32: 6, 64: 5, 128: 3}
# Items of the first stage that a launch of up to 32 tokens an expert makes of few chosen experts, an SM each.
MOST_ITEMS = 132
# Bytes of a token's 128 columns as e4m3 values, offsets and a factor (csrc/w4a16_records.cuh).
RECORD = 288
# Up to here the pairs are GEMMs of their own, by whether the second stage is in bfloat16 and, in INT4, by the
# intermediate size: H200, TP4, 58 us against 62 at four tokens; at six 82 against 85, but 50 against 38 where all go to
# the same experts.
DECODE_TOKENS = {False: 6, True: 2}
DECODE_ROWS = 2560  # tokens times intermediate size
# Of a token with fewer experts, under expert parallelism, some warps have none: no more INT4 tokens than that.
FEW_EXPERTS = 4
DECODE_HIDDEN = (1024, 7168)
Arguments = structure("experts/csrc/w4a16.cuh", "Args")
DecodeArguments = structure("experts/csrc/w4a16_decode.cu", "DecodeArguments")


def takes_groups(size: int, down_proj_quantized: bool = True) -> bool:
    """Whether the kernel takes INT4 with a scale a group of so many columns, the second matrices INT4 too or BF16."""
    wider = down_proj_quantized and size in {one.group for one in FORMATS if one.scale == INT4.scale}
    return size == GROUP or wider


PACKED = (
    "x bf16[T,H], gate_up_proj_packed i32[E,F,H/8], gate_up_proj_scale bf16|u8|e4m3[E,F,G],"
    f" down_proj_packed i32|bf16[E,H,D], down_proj_scale bf16|u8|e4m3[E,H,S]?, {ROUTING}"
)
# down_proj as gate_up_proj: packed, with a scale as often, or BF16 beside INT4 in groups of 32.
LIMITS = (
    f"H % {CHUNK_ROWS} == 0; F > 0; F % {2 * CHUNK_COLUMNS} == 0; 0 < E <= {MAX_EXPERTS}; {MAPPED};"
    " F // 2 == D * (1 if down_proj_packed.dtype == bf16 else 8);"
    " (down_proj_packed.dtype == bf16) == (down_proj_scale is None);"
    " down_proj_scale is None or F // 2 * G == S * H and gate_up_proj_scale.dtype == down_proj_scale.dtype;"
    f" down_proj_scale is not None or gate_up_proj_scale.dtype == bf16 and G * {GROUP} == H"
)


def _known(gate_up_proj_packed: Tensor, gate_up_proj_scale: Tensor) -> None:
    format_of(gate_up_proj_packed, gate_up_proj_scale)


def supports(hidden: int, inter: int, experts: int, device: torch.device) -> bool:
    """Whether the kernel takes these sizes on this device (compute capability 9.0)."""
    shape = hidden % CHUNK_ROWS == 0 and inter > 0 and inter % CHUNK_COLUMNS == 0 and 0 < experts <= MAX_EXPERTS
    return shape and is_hopper(device)


def workspace_sizes(
    tokens: int, top_k: int, experts: int, hidden: int, inter: int, choice: ExpertChoice
) -> dict[str, tuple[int, torch.dtype]]:
    """Element count and dtype of every scratch buffer that one call needs."""
    sizes = moe_fp8.workspace_sizes(tokens, top_k, experts, hidden, inter, choice)
    pairs = tokens * top_k
    contrib = (pairs * choice.splits2 * hidden, torch.float32 if choice.fused else torch.bfloat16)
    made = {
        "xq": (MAX_EXPERTS + 1, torch.int32),
        "xs": (0, torch.uint8),
        "inter_s": (MAX_EXPERTS, torch.int32),
        "inter_q": (pairs * inter, torch.bfloat16),
        "contrib": contrib,
    }
    if choice.max_tokens <= 32:
        made["inter_q"] = (pairs * inter // CHUNK_COLUMNS * RECORD, torch.uint8)
        made["xs"] = (tokens * hidden // CHUNK_COLUMNS * RECORD, torch.uint8)
        made["partial"] = (max(sizes["partial"][0], MOST_ITEMS * choice.max_tokens * CHUNK_ROWS), torch.float32)
    return sizes | made


@functools.lru_cache(maxsize=1024)
def _layout(tokens: int, top_k: int, experts: int, hidden: int, inter: int, choice: ExpertChoice) -> Layout:
    # Every launch leaves its counters, the sort's (`xq`) among them, at zero.
    counters = frozenset({"xq", "count1", "count2"})
    return lay_out(workspace_sizes(tokens, top_k, experts, hidden, inter, choice), counters)


def check_choice(choice: ExpertChoice) -> None:
    """Refuse a split first stage for many tokens an expert: csrc/w4a16_item.cuh sums splits for at most 32.

    Raises:
        KernelError: naming the field.
    """
    if choice.max_tokens > 128:
        raise KernelError(f"max_tokens is {choice.max_tokens}, expected at most 128 for INT4")
    if choice.splits1 > 1 and choice.max_tokens > 32:
        raise KernelError(f"splits1 is {choice.splits1}, expected 1 with max_tokens {choice.max_tokens} above 32")


def takes_decode(tokens: int, top_k: int, local_top_k: float, hidden: int, inter: int, w2_bf16: bool) -> bool:
    """Whether csrc/w4a16_decode.cu takes them: few tokens, an item for each pair and a few rows.

    Args:
        local_top_k: of a token's experts, those that this rank holds of an even routing.
    """
    fits = top_k <= 16 and hidden in DECODE_HIDDEN and top_k * inter * 2 <= moe_decode.SHARED_BYTES
    most = DECODE_TOKENS[w2_bf16]
    if not w2_bf16:
        most = max(1, min(most, DECODE_ROWS // inter, most if local_top_k >= FEW_EXPERTS else int(local_top_k)))
    return fits and tokens <= most


@kernel_operation(
    "moe_w4a16",
    f"{PACKED}, gate_up_proj_all f32[E,F,1]?, down_proj_all f32[E,H,1]? -> out bf16[T,H]; {LIMITS};"
    " (gate_up_proj_all is None) == (gate_up_proj_scale.dtype != e4m3);"
    " (gate_up_proj_all is None) == (down_proj_all is None)",
    also=_known,
)
def moe_w4a16(
    x: Tensor,
    gate_up_proj_packed: Tensor,
    gate_up_proj_scale: Tensor,
    down_proj_packed: Tensor,
    down_proj_scale: Tensor | None,
    topk_indices: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None = None,
    choice: list[int] | None = None,
    unpaired: bool = False,
    inner: int = 1,
    gate_up_proj_all: Tensor | None = None,
    down_proj_all: Tensor | None = None,
    divides: bool = False,
    *,
    out: Tensor,
) -> None:
    """Sum over each token's chosen experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        gate_up_proj_packed, down_proj_packed: as `prepare_w4a16` ordered them, and their scales; or bfloat16 down_proj.
        gate_up_proj_scale: bfloat16 a 32, 64 or 128 columns of INT4, uint8 (e8m0) a 32 of MXFP4, e4m3 a 16 of NVFP4.
        topk_indices .. expert_map: as `moe_fp8` takes them.
        choice: the fields of `ExpertChoice` in order, to pin the launch; None: the tuned one.
        unpaired: of a pinned launch: a token's bits depend neither on how many tokens its expert has nor on `fused`.
        inner: parts of the first stage's columns that a work item sums one after another, where `splits1` is 1 and
            `max_tokens` 32: the bits of so many `splits1`.
        gate_up_proj_all, down_proj_all: of NVFP4 the scale of all of a matrix in each of its rows.
        divides: these divide, as compressed-tensors has them.

    Returns:
        Zeros for a token without a valid local pair.
    """
    kind, shape = format_of(gate_up_proj_packed, gate_up_proj_scale), (*topk_indices.shape, len(down_proj_packed))
    shape = *shape, x.shape[1], gate_up_proj_packed.shape[1] // 2
    tokens, top_k, experts, hidden, inter = shape
    w2_bf16 = down_proj_scale is None
    packed = gate_up_proj_packed, gate_up_proj_scale, down_proj_packed, down_proj_scale
    share = 1.0 if expert_map is None else experts / expert_map.shape[0]
    if choice is None and takes_decode(tokens, top_k, top_k * share, hidden, inter, w2_bf16):
        intermediate = torch.empty(tokens * top_k * inter, dtype=torch.bfloat16, device=x.device)
        tensors = x, topk_indices, topk_weights, expert_map, *packed, intermediate, out, gate_up_proj_all, down_proj_all
        arguments = fill(DecodeArguments, shape, topk_indices, expert_map, *tensors)
        arguments.format, arguments.divides = FORMATS.index(kind), divides
        launch("experts/w4a16_decode", "kimi_w4a16_decode", "moe_w4a16", x.device, arguments)
        return
    weights = dict(zip(("w13", "s13", "w2", "s2"), packed, strict=True)) | {"expert_map": expert_map}
    weights |= {"all13": gate_up_proj_all, "all2": down_proj_all}
    cut = {"x": x, "out": out, "topk_ids": topk_indices, "topk_weights": topk_weights}
    name = hopper(x.device.index, "moe_w4a16")[0]
    choice_for = choices(choice, shape, TUNING_DTYPES[w2_bf16], f"1x{GROUP}", name)
    for queue, chosen in queues(Arguments, cut, weights, shape, choice_for, _layout):
        check_choice(chosen)
        queue.w2_bf16, queue.in_flight, queue.unpaired = w2_bf16, IN_FLIGHT[chosen.max_tokens], unpaired
        queue.most_items, queue.inner, queue.divides = 0 if unpaired else MOST_ITEMS, inner, divides
        launch(kind.library, "kimi_w4a16", "moe_w4a16", x.device, queue)
