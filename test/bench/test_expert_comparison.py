"""Routed experts beside peers: what the benchmark holds results against, and what it says. Timing needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import unpack_from_int32
from torch import Tensor
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

from kimi_k2.bench.kernels import tune
from kimi_k2.bench.kernels.expert_formats import (
    RandomExperts,
    checkpoint,
    drawn,
)
from kimi_k2.bench.kernels.expert_peers import DEEP_GEMM_PAIRS, Peer, peers
from kimi_k2.bench.kernels.experts import TOKENS, Selection, drawn_cases, errors_of, run, sections
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, KernelError
from kimi_k2.kernels.experts.entries import fp8_tensors

EXPERTS, INTER, HIDDEN = 4, 256, 512


def stored(name: str) -> tuple[RandomExperts, list[tuple[Tensor, Tensor]]]:
    """Experts of a format and, from libraries' own code, their float64 gate_up_proj and down_proj."""
    torch.manual_seed(0)
    experts = drawn(name, EXPERTS, INTER, HIDDEN, device="cpu")
    first, second = experts.stored.gate_up.tensors, experts.stored.down.tensors
    if name == "BF16":
        return experts, [(first["weight"][e].double(), second["weight"][e].double()) for e in range(EXPERTS)]

    def fp8(weight: Tensor, scale_inv: Tensor) -> Tensor:
        return weight.double() * torch.kron(scale_inv.double(), torch.ones(128, 128, dtype=torch.float64))

    def int4(words: Tensor, scale: Tensor) -> Tensor:
        values = unpack_from_int32(words, 4, torch.Size((words.shape[0], words.shape[1] * 8)))
        scaled: Tensor = values.double() * scale.double().repeat_interleave(32, 1)
        return scaled

    whole, tensors = (
        (fp8, fp8_tensors(experts.stored)) if name == "FP8" else (int4, checkpoint(experts, range(EXPERTS)))
    )
    up, up_scale, down, down_scale = tensors
    return experts, [(whole(up[e], up_scale[e]), whole(down[e], down_scale[e])) for e in range(EXPERTS)]


@pytest.mark.parametrize("name", ["FP8", "INT4", "BF16"])
def test_the_reference_is_the_sum_of_transformers_mlps(name: str) -> None:
    experts, weights = stored(name)
    config = DeepseekV3Config(hidden_size=HIDDEN, intermediate_size=INTER, hidden_act="silu")
    x, indices = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[0, 3], [2, 1], [3, 2]])
    shares, wanted = torch.rand(3, 2), torch.zeros(3, HIDDEN, dtype=torch.float64)
    for token in range(3):
        for expert, share in zip(indices[token].tolist(), shares[token].double(), strict=True):
            mlp = DeepseekV3MLP(config).double()
            gate_up, down = weights[expert]
            for linear, weight in zip(
                (mlp.gate_proj, mlp.up_proj, mlp.down_proj), (*gate_up.chunk(2), down), strict=True
            ):
                linear.weight.data = weight
            with torch.no_grad():
                wanted[token] += share * mlp(x[token].double())
    assert experts.shape == (EXPERTS, INTER)
    # INT4 weights are value times scale in float32 here, in float64 there.
    torch.testing.assert_close(
        experts.reference(x, indices, shares), wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max())
    )


def test_the_standard_cases_cover_every_power_of_two_and_layout() -> None:
    wanted = Selection()
    assert [tokens.bit_length() for tokens in TOKENS] == list(range(1, 18)) and TOKENS[-1] == 65536
    assert (
        {"TP1", "TP2", "TP4", "TP8", "EP4", "EP8"}
        <= set(wanted.layouts)
        <= set(tune.cases(KimiK2Config.load("kimi-k2-instruct-0905")))
    )
    assert {"uniform", "zipf:0.5", "zipf:1.0", "zipf:1.5", "same"} == set(wanted.routings)


@pytest.mark.parametrize(
    ("wanted", "error", "named"),
    [
        (Selection(formats=["FP4"]), KernelError, "format: FP4 not among FP8, BF16, INT4, MXFP4"),
        (Selection(layouts=["E64", "TP3"]), KernelError, "shape: TP3 not among TP1.*, E64, E128, E384"),
        (Selection(routings=["zipf"]), ConfigError, "expected uniform, same or zipf:EXPONENT"),
    ],
)
def test_unknown_choices_are_refused(wanted: Selection, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        run(KimiK2Config.load("kimi-k2-instruct-0905"), wanted, None, print)


def test_launches_that_a_first_look_finds_slow_are_not_timed_again() -> None:
    asked: list[tuple[str, int]] = []
    speeds = {"a": 100.0, "b": 105.0, "c": 130.0}

    class Captures:
        def times(self, calls: list[Callable[[], str]], replays: int, warm_up: int) -> list[float]:
            asked.append((calls[0](), replays))
            return [speeds[calls[0]()]]

    calls = {name: [partial(str, name)] for name in speeds}
    assert tune.fastest(calls, Captures(), 25) == {"a": 100.0, "b": 105.0}  # type: ignore[arg-type]
    assert asked == [(name, tune.FIRST_REPLAYS) for name in speeds] + [("a", 25), ("b", 25)]


def test_cases_are_in_bands_of_tokens() -> None:
    wanted = Selection(formats=["FP8", "BF16"], layouts=["TP8", "EP8"], routings=["uniform", "same"], tokens=[8192, 64])
    every = list(sections(wanted))
    assert every[:2] == [
        ("FP8", "TP8", [(64, "uniform"), (64, "same")]),
        ("BF16", "TP8", [(64, "uniform"), (64, "same")]),
    ]
    assert [(name, layout, [tokens for tokens, _ in left]) for name, layout, left in every[4:6]] == [
        ("FP8", "TP8", [8192, 8192]),
        ("BF16", "TP8", [8192, 8192]),
    ]


def test_drawn_cases_are_of_the_selection_and_the_same_for_a_seed() -> None:
    wanted = Selection(drawn=400, seed=3)
    cases = drawn_cases(wanted)
    assert len(set(cases)) == 400 and cases == drawn_cases(wanted) != drawn_cases(replace(wanted, seed=4))
    assert {case[0] for case in cases} == set(wanted.formats) and {case[1] for case in cases} == set(wanted.layouts)
    exponents = [float(case[2].removeprefix("zipf:")) for case in cases if case[2].startswith("zipf")]
    assert {"uniform", "same"} < {case[2] for case in cases} and 100 < len(exponents) < 166
    assert 0 <= min(exponents) < 0.1 and 1.4 < max(exponents) <= 1.5
    tokens = [case[3] for case in cases]
    assert min(tokens) == 1 and 60000 < max(tokens) <= 65536 and 170 < sum(count <= 256 for count in tokens) < 230
    given = list(sections(wanted))
    assert len(given) == 18 and sum(len(left) for *_, left in given) == 400


def test_deep_gemm_is_left_out_where_it_ends_in_an_illegal_access() -> None:
    deep = Peer("DeepGEMM pipeline", lambda *_: torch.empty(0), least=512, most_pairs=DEEP_GEMM_PAIRS)
    taken = (256, 8), (512, 8), (32768, 8), (65536, 2), (65536, 8)
    assert [deep.takes(*sizes) for sizes in taken] == [False, True, True, True, False]


def test_a_peer_that_fails_is_left_out_and_a_wrong_one_refused() -> None:
    experts, _ = stored("BF16")
    given = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[0, 3], [2, 1], [3, 2]]), torch.rand(3, 2)
    told: list[str] = []

    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    found = errors_of({"ours": experts.reference, "failing": fails}, experts, given, told.append)
    assert found == {"ours": 0.0} and told == ["no row of failing: RuntimeError: out of memory"]
    with pytest.raises(RuntimeError, match="out of memory"):
        errors_of({"ours": fails}, experts, given, told.append)
    with pytest.raises(KernelError, match=r"wrong: 1\.0e\+00 from float64"):
        errors_of({"wrong": lambda *_: torch.zeros(3, HIDDEN)}, experts, given, told.append)


def test_a_peer_that_is_not_installed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert list(peers(stored("FP8")[0], told.append)) == []
    assert [line.partition(":")[0] for line in told] == ["no row of triton", "no row of deep_gemm"]
