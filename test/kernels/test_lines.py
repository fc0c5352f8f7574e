"""Every kernel's line: results of the right shape from tensors without data, and all that it refuses, by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from machines import Machine, standing_in
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kimi_k2.kernels
from kimi_k2.errors import KernelError
from kimi_k2.kernels.common import launch
from kimi_k2.kernels.common.line import DTYPES, Operand
from kimi_k2.kernels.common.operation import OPERATIONS
from kimi_k2.kernels.router import gate

MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(kimi_k2.kernels.__path__, "kimi_k2.kernels.")
    if not module.name.endswith(("_triton", "libraries"))
]

E4M3, F32, I32 = torch.float8_e4m3fn, torch.float32, torch.int32
# Sizes and arguments that a line takes, the shape of each result and its dtype unless it is bfloat16, and what breaks
# a condition each. Of an optional tensor "with" makes one.
TOKENS: dict[str, Any] = {"T": 3, "H": 512, "eps": 1e-6}
WHOLE: list[dict[str, Any]] = [{"T": 1, "H": 516}, {"H": 8200}]
ENTRY: dict[str, Any] = {"B": 2, "H": 4, "N": 2, "P": 70, "eps": 1e-6}
EXPERTS: dict[str, Any] = {"T": 3, "H": 1024, "I": 256, "E": 4, "k": 2, "M": 9}
BLOCKS: list[dict[str, Any]] = [
    {"H": 1088}, {"I": 200}, {"E": 513}, {"H": 8448}, {"I": 8320}, {"with": "expert_map", "M": 0},
]  # fmt: skip
ROUTER: dict[str, Any] = {"T": 3, "H": 512, "E": 64, "top_k": 8, "index_dtype": torch.int64}
CHOICE: list[dict[str, Any]] = [
    {"E": 544},
    {"top_k": 17},
    {"index_dtype": torch.int16},
    {"with": "num_valid", "N": (2,)},
]
PRODUCT: dict[str, Any] = {"T": 3, "K": 512, "N": 200, "P": 320, "terms": 2, "choice": [1, 32, 1]}
PRODUCTS: list[dict[str, Any]] = [{"K": 448}, {"N": 204}, {"terms": 3}, {"P": 256}]
CONTEXT: dict[str, Any] = {"B": 3, "H": 8, "N": 3, "R": 70, "W": 5, "softmax_scale": 0.1}
PAGES: list[dict[str, Any]] = [
    {"H": 12},
    {"N": 2},
    {"with": "block_table"},
    {"N": 2**26, "R": 64, "with": "block_table"},
]
PACKED: dict[str, Any] = {
    "T": 3, "H": 512, "E": 4, "F": 512, "G": 16, "D": 32, "S": 8, "J": 64, "k": 2, "M": 9, "splits": 2,
    "with": "down_proj_scale",
}  # fmt: skip
PACKS: list[dict[str, Any]] = [
    {"H": 640, "G": 20}, {"F": 640, "D": 40, "S": 10}, {"F": 0, "D": 0, "S": 0}, {"E": 513},
    {"with": "down_proj_scale expert_map", "M": 0}, {"G": 17}, {"D": 33}, {"S": 9}, {"with": ""},
    {"down_proj_packed": lambda: torch.empty(4, 512, 256, dtype=torch.bfloat16), "G": 8, "with": ""},
]  # fmt: skip
PLAN = [((2 * 3 + 132 // 4 + 1 + 3 + 132, 4), I32)]  # three contexts, 132 blocks
CASES: dict[str, tuple[dict[str, Any], list[Any], list[dict[str, Any]]]] = {
    "absorb": (ENTRY, [(2, 4, 576)], []),
    "absorb_and_store": (ENTRY, [(2, 4, 576)], [{"H": 3}]),
    "add": (
        {"S": (3, 5, 16)}, [(3, 5, 16)], [{"S": (3, 4)}, {"b": lambda: torch.empty(241).bfloat16()[1:].view(3, 5, 16)}]
    ),
    "add_norm": (TOKENS, [(3, 512)] * 2, WHOLE),
    "add_norm_apart": (TOKENS, [(3, 512), (3, 512), ((3,), F32)], WHOLE),
    "add_norm_route": (
        {**TOKENS, "E": 64, "top_k": 8, "index_dtype": torch.int64},
        [(3, 512), (3, 512), ((3, 8), torch.int64), ((3, 8), F32)],
        [{"H": 384}, {"E": 48}, {"T": 65}, {"E": 416}, {"E": 0}, {"top_k": 17}],
    ),
    "add_quantize": (
        {"T": 3, "K": 512, "eps": 1e-6, "terms": 2}, [(3, 512), ((2, 3, 512), E4M3), ((4, 320), F32)],
        [{"K": 448}, {"terms": 3}, {"K": 8320}],
    ),
    "attend_values": (
        CONTEXT, [(3, 1024)], [*PAGES, {"cache": lambda: torch.empty(3, 70, 576, dtype=E4M3)}]
    ),
    "block_gemm": (PRODUCT, [(3, 200)], PRODUCTS),
    "dense_gemm": (
        {"T": 3, "K": 512, "N": 40, "cluster": 2, "D": torch.bfloat16}, [(3, 40)],
        [{"K": 480}, {"N": 44}, {"cluster": 9},
         {"x": lambda: torch.empty(1024, dtype=torch.bfloat16).as_strided((3, 512), (8, 1))}]
    ),
    "fp8_block_to_bf16": ({"N": 200, "K": 300}, [(200, 300)], []),
    "fused_add_linear": (
        {"T": 3, "K": 512, "N": 200, "eps": 1e-6, "with": "weight_scale_inv norm_weight"}, [(3, 200), (3, 512)],
        [{"T": 17}, {"K": 448}, {"with": "norm_weight"},
         {"x": lambda: torch.empty(3, 1024, dtype=torch.bfloat16)[:, :512]}],
    ),
    "fused_gate": (
        ROUTER, [((3, 8), torch.int64), ((3, 8), F32)],
        CHOICE,
    ),
    "fused_linear": (
        {"T": 3, "K": 512, "N": 200, "with": "weight_scale_inv"}, [(3, 200)], [{"T": 17}, {"K": 448}, {"with": ""}]
    ),
    "held_rows": ({"S": (3, 5), "V": 20, "H": 512, "first": 4}, [(3, 5, 512)], [{"H": 8200}]),
    "mla_decode": (
        {**CONTEXT, "S": (3,)}, [(3, 8, 512)], [*PAGES, {"S": (3, 4, 1)}, {"S": (3, 9)}, {"S": (3, 4), "with": "lse"}]
    ),
    "mla_plan": ({"B": 3, "capacity": 640, "heads": 8}, PLAN, [{"B": 0}, {"heads": 12}]),
    "mla_plan_by_length": ({"B": 3, "capacity": 640, "heads": 8}, PLAN, [{"B": 1025}, {"heads": 12}]),
    "mla_prefill": (
        {"B": 2, "S": 5, "H": 8, "T": 9, "softmax_scale": 0.1}, [(2, 5, 8, 128)], [{"T": 0}, {"ranks": 3}]
    ),
    "mla_prefill_ragged": (
        {"T": 5, "H": 8, "S": 9, "new": [2, 3], "lengths": [4, 5], "softmax_scale": 0.1}, [(5, 8, 128)], [{"ranks": 3}]
    ),
    "moe_bf16": (EXPERTS, [(3, 1024)], [{"H": 960}, {"I": 192}, BLOCKS[-1]]),
    "moe_decode": (EXPERTS, [(3, 1024)], [
        *BLOCKS, {"with": "shared_down"}, {"H": 2048}, {"k": 17}, {"parts": [1, 2]}, {"k": 11, "parts": [1, 1, 1]},
        {"T": 5, "parts": [1, 1, 1]}, {"k": 1, "parts": [1, 1, 1]}, {"I": 384, "parts": [1, 1, 1]},
    ]),
    "moe_fp8": (EXPERTS, [(3, 1024)], BLOCKS),
    "moe_w4a16": (
        PACKED, [(3, 512)],
        [*PACKS, {"with": "down_proj_scale gate_up_proj_all down_proj_all"}, {"with": "down_proj_scale down_proj_all"}],
    ),
    "moe_w4a16_few": (
        PACKED, [(3, 512)],
        [*PACKS, {"G": 8, "S": 4}, {"splits": 9}, {"H": 16640, "G": 520, "splits": 1}, {"k": 1},
         {"k": 16, "F": 1024, "D": 64, "S": 16}, {"T": 5}, {"with": "down_proj_scale shared_down"},
         {"with": "down_proj_scale shared_gate_up shared_down", "J": 40}],
    ),
    "norm_apart": (TOKENS, [(3, 512), ((3,), F32)], WHOLE),
    "places": ({"B": 3, "T": 6, "W": 5, "page": 64, "with": "input_ids"}, [], [{"T": 5}, {"T": 0}]),
    "push_all_reduce": (
        {"S": (3, 8), "capacity": 512, "mail": [0, 0], "rank": 1}, [(3, 8)],
        [{"S": (3, 3)}, {"capacity": 514}, {"S": (3, 256)}, {"mail": [0]}, {"rank": 2}],
    ),
    "queries_and_entries": (
        {"T": 3, "H": 4, "Q": 192, "C": 576, "R": 512, "E": 32, "N": 2, "P": 5, "eps": 1e-6}, [(3, 576)],
        [{"C": 584}, {"Q": 64}, {"R": 480, "C": 544}, {"E": 48, "C": 608}],
    ),
    "quantize_groups": (
        {"T": 3, "G": 512, "terms": 2}, [((2, 3, 512), E4M3), ((4, 320), F32)],
        [{"G": 448}, {"G": 384, "swiglu": True}, {"terms": 3}, {"G": 8320, "with": "norm_weight"}],
    ),
    "query_and_entry": (
        {**ENTRY, "q_eps": 1e-6, "kv_eps": 1e-6, "with": "q_b_scale_inv"}, [(2, 4, 576)], [{"B": 17}, {"with": ""}]
    ),
    "rotary": (
        {"P": (2, 5), "D": 32, "multiplier": 1.5, "dtype": torch.bfloat16}, [(2, 5, 32)] * 2, [{"dtype": F32}]
    ),
    "rotate_pairs": ({"B": 2, "S": 5, "H": 3, "D": 64}, [(2, 5, 3, 64)], [{"D": 96}]),
    "route_norm": (TOKENS, [(3, 512), (3, 512), (3, 512), ((3,), F32)], [{"H": 7424}]),
    "router_decode": (
        ROUTER, [((3, 8), torch.int64), ((3, 8), F32)],
        [{"H": 384}, {"E": 48}, {"T": 65}, {"E": 416}, {"E": 0}, *CHOICE[1:]],
    ),
    "router_gemm": ({"T": 3, "H": 512, "E": 64}, [((3, 64), F32)], [{"H": 384}, {"E": 48}]),
    "row_norm": ({**TOKENS, "S": (3, 5)}, [(3, 5, 512)], [{"H": 8200}, {"S": ()}]),
    "silu_and_mul": ({"S": (3, 5), "G": 32}, [(3, 5, 16)], [
        {"G": 24}, {"gate_up": lambda: torch.empty(481).bfloat16()[1:].view(3, 5, 32)},
    ]),
    "value_rows": ({"B": 3, "H": 8, "V": 20}, [(3, 160)], []),
    "vision_add_layer_norm": (
        {"T": 3, "D": 64, "eps": 1e-5}, [(3, 64), (3, 64)],
        [{"D": 8200}, {"delta": lambda: torch.empty(3, 64)}],
    ),
    "vision_packed_attention": (
        {"H": 4, "C": 208, "tokens": 9, "P": 5, "S": 3, "J": 2, "slots": 4, "softmax_scale": 0.1},
        [(9, 4, 72)], [{"C": 200}],
    ),
    "vision_rotate_and_pack": (
        {"T": 9, "H": 4}, [(3, 4, 9, 208, 8)],
        [{"qkv": lambda: torch.empty(9, 4, 3, 72, dtype=torch.bfloat16).transpose(1, 2)}]
    ),
    "wide_gemm": (PRODUCT, [(3, 200)], PRODUCTS),
    "write_slots": ({"B": 2, "S": 3, "C": 72, "T": 9}, [], []),
}  # fmt: skip


def shape_of(dims: tuple[str | CodeType, ...], case: dict[str, Any]) -> tuple[int, ...]:
    found: tuple[int, ...] = ()
    for dim in dims:
        size = case[dim] if isinstance(dim, str) else eval(dim, {}, case)
        found += size if isinstance(size, tuple) else (size,)
    return found


def tensors_of(name: str, case: dict[str, Any]) -> dict[str, Tensor]:
    """Empty ones as the line has them, the optional ones that `with` names."""
    chosen = case.get("with", "").split()
    return {
        operand.name: torch.empty(shape_of(operand.dims, case), dtype=DTYPES[operand.dtype.split("|")[0]], device="cpu")
        for operand in OPERATIONS[name].line.operands
        if not operand.optional or operand.name in chosen
    }


def arguments_of(name: str, case: dict[str, Any]) -> dict[str, Any]:
    known = {argument.name for argument in OPERATIONS[name].registered._opoverload._schema.arguments}
    missing = {"weight_scale_inv": None, "norm_weight": None, "q_b_scale_inv": None, "down_proj_scale": None}
    given = {**missing, **tensors_of(name, case), **case}
    given = {key: value() if callable(value) else value for key, value in given.items()}
    return {key: value for key, value in given.items() if key in known}


# Further ways to a launch.
WAYS: dict[str, dict[str, Any]] = {
    "attend_values": {"plan": torch.zeros(200, 4, dtype=I32)},
    "mla_decode": {"plan": torch.zeros(200, 4, dtype=I32)},
    "moe_decode": {
        "parts": [2, 4, 1],
        "with": "shared_gate_up shared_gate_up_scale_inv shared_down shared_down_scale_inv",
    },
    "moe_w4a16": {"choice": [0, 32, 2, 1, 1]},
    "router_decode": {"T": 17, "with": "inverse num_valid", "N": ()},
}


class Library:
    """Of functions that do nothing."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        self.called.append(name)
        return lambda *_: 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:no tuned choices")
def test_every_launch_is_reached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's code where a Hopper would be: structures have the fields that it fills."""
    made, triton = Library(), MagicMock()
    with standing_in(Machine("cpu"), monkeypatch):
        monkeypatch.setattr(launch, "load_library", lambda _: made)
        for module in MODULES:
            if "triton_kernels" in vars(module):
                monkeypatch.setattr(module, "triton_kernels", lambda _: triton)
        for more in ({}, WAYS.get(name, {})):
            OPERATIONS[name](**arguments_of(name, {**CASES[name][0], **more}))
    assert len(made.called) + len(triton.mock_calls) > 1


@pytest.mark.parametrize(
    ("tokens", "sms", "launches"), [(1, 132, 1), (16, 132, 1), (17, 132, 2), (1, 60, 2), (0, 132, 0)]
)
def test_a_routers_blocks_wait_for_each_other_where_all_run_at_once(
    tokens: int, sms: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fewer SMs they would wait for ever."""
    made = Library()
    with standing_in(Machine("cpu"), monkeypatch):
        monkeypatch.setattr(launch, "load_library", lambda _: made)
        monkeypatch.setattr(gate, "hopper", lambda *_: ("NVIDIA H200", sms))
        OPERATIONS["router_decode"](**arguments_of("router_decode", {**ROUTER, "T": tokens, "E": 384}))
    assert len(made.called) == launches


def test_every_operation_has_a_case() -> None:
    assert set(CASES) == set(OPERATIONS)


@pytest.mark.parametrize("name", CASES)
def test_results_without_data(name: str) -> None:
    case, wanted, _ = CASES[name]
    with FakeTensorMode():
        made = OPERATIONS[name](**arguments_of(name, case))
    found = [] if made is None else [made] if isinstance(made, Tensor) else made
    shapes = [one if isinstance(one[0], tuple) else (one, torch.bfloat16) for one in wanted]
    assert [(tuple(one.shape), one.dtype) for one in found] == shapes
    assert all(one.is_contiguous() for one in found)


def names_of(one: Operand) -> list[str]:
    return [name for dim in one.dims for name in ([dim] if isinstance(dim, str) else dim.co_names)]


def broken(one: Operand, tensor: Tensor, bound: list[str]) -> Iterator[Tensor | None]:
    """A tensor otherwise than the line has it, one way at a time; `bound` are the names that other places have."""
    yield tensor.to(torch.float64)
    if not one.optional:
        yield None
    if not one.star:
        yield tensor.unsqueeze(0)
        for place, dim in enumerate(one.dims):
            if not isinstance(dim, str) or dim in bound:
                yield tensor.repeat_interleave(2, place)
    wide = torch.cat((tensor, tensor), -1)
    if tensor.shape[-1] > 1:
        yield wide[..., ::2]
    if one.layout != "rows" and tensor.dim() > 1:
        yield wide[..., 1 : tensor.shape[-1] + 1]


@pytest.mark.parametrize("name", CASES)
def test_other_tensors_are_refused(name: str) -> None:
    line, (case, _, _) = OPERATIONS[name].line, CASES[name]
    with FakeTensorMode():
        given = arguments_of(name, case)
        there = [operand for operand in line.operands if given.get(operand.name) is not None]
        for one in there:
            bound = [name for other in there if other is not one for name in names_of(other)] + list(given)
            others = [torch.empty_like(given[one.name], device="meta")] if len(there) > 1 else []
            for wrong in (*others, *broken(one, given[one.name], bound)):
                with pytest.raises(KernelError, match="expected"):
                    OPERATIONS[name](**given | {one.name: wrong})
                assert not line.fits(**given | {one.name: wrong})


@pytest.mark.parametrize("name", CASES)
def test_every_condition_refuses(name: str) -> None:
    """By its text, whether all arguments are asked about or called with; those that say more are refused too."""
    line, (case, _, worse) = OPERATIONS[name].line, CASES[name]
    said = []
    with FakeTensorMode():
        assert line.fits(**arguments_of(name, case))
        for changes in worse:
            given = arguments_of(name, {**case, **changes})
            with pytest.raises(KernelError) as refusal:
                OPERATIONS[name](**given)
            said.append(str(refusal.value))
            parameters = inspect.signature(OPERATIONS[name]).parameters.values()
            left_out = {one.name: one.default for one in parameters if one.default is not one.empty}
            assert not (line.fits(**left_out | given) and any(text in said[-1] for text, _ in line.conditions)), changes
    quiet = [text for text, _ in line.conditions if not any(text in one for one in said)]
    assert not quiet
