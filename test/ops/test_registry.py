"""Order, pins and refusals of the dispatch table; the plain functions stay what runs on a CPU."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import torch
from stored_experts import drawn
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2 import ops
from kimi_k2.errors import KernelError
from kimi_k2.ops import linear, registry
from kimi_k2.ops.experts import noaux_tc_gate


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    yield
    registry.pin("")


def test_entries_have_the_plain_functions_arguments() -> None:
    registry.load_providers()
    for operation in registry.TABLE.values():
        wanted = list(inspect.signature(operation.plain.call).parameters)
        for entry in operation.entries:
            assert list(inspect.signature(entry.call).parameters)[: len(wanted)] == wanted, (operation.name, entry.name)
            assert callable(entry.takes)


def test_the_order_is_the_tables() -> None:
    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    registry.load_providers()
    assert {operation.name: operation.names for operation in registry.TABLE.values()} == {
        "absorb_and_store": ["absorb", "triton", "plain"],
        "add_norm": ["fused", "plain"],
        "add_norm_route": ["cuda", "plain"],
        "add_project": ["fused_linear", "block_gemm", "e4m3", "dense_gemm", "plain"],
        "all_reduce": ["push", "plain"],
        "apply_rotary_interleaved": ["triton", "plain"],
        "attend_values": ["cuda", "uniform", "plain"],
        "attention_plan": ["e4m3", "mla_plan", "plain"],
        "dense_linear": ["dense_gemm", "plain"],
        "dequantize_fp8_block": ["triton", "plain"],
        "add_layer_norm": ["triton", "plain"],
        "embedding": ["triton", "plain"],
        "float32_linear": ["dense_gemm", "plain"],
        "fp8_linear": ["fused_linear", "block_gemm", "e4m3", "plain"],
        "gather_last": ["plain"],
        "gelu_linear": ["cublaslt", "plain"],
        "mla_absorbed_attention": ["plain"],
        "mla_decode": ["mla_decode", "e4m3", "plain"],
        "mla_naive_attention": ["mla_prefill", "plain"],
        "mla_ragged_attention": ["mla_prefill", "plain"],
        "next_step": ["cuda", "plain"],
        "project": ["fused_linear", "block_gemm", "e4m3", "dense_gemm", "plain"],
        "query_and_entry": ["cuda", "plain"],
        "rms_norm": ["triton", "plain"],
        "rotary_cos_sin": ["cuda", "plain"],
        "rotate_and_store": ["triton", "plain"],
        "route": ["router", "plain"],
        "routed_experts": ["moe_decode", "moe_fp8", "moe_w4a16", "moe_bf16", "plain"],
        "routed_experts_with_shared": [
            "moe_decode",
            "moe_few",
            "moe_w4a16_few",
            "adding_product",
            "side_stream",
            "plain",
        ],
        "silu_and_mul": ["cuda", "plain"],
        "rotated_attention": ["wgmma", "plain"],
        "swiglu": ["block_gemm", "e4m3", "plain"],
        "store_entries": ["triton", "plain"],
        "token_places": ["cuda", "plain"],
        "value_rows": ["cuda", "batched", "plain"],
    }


def test_cpu_tensors_take_the_plain_function_and_explain_counts_it() -> None:
    registry.pin("")
    linear.fp8_linear(torch.randn(3, 256), torch.zeros(128, 256).to(torch.float8_e4m3fn), torch.rand(1, 2), (128, 128))
    assert "fp8_linear: plain (1 calls); order fused_linear > block_gemm > e4m3 > plain" in registry.explain()
    assert "route: not called" in registry.explain()


@pytest.mark.parametrize("text", ["nonsense=plain", "route=marlin", "route"])
def test_a_pin_that_the_table_lacks_is_refused(text: str) -> None:
    with pytest.raises(KernelError, match="expected"):
        registry.pin(text)


def test_the_environment_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.ENVIRONMENT, "route=plain,routed_experts=moe_fp8")
    registry.pin()
    assert registry._pins == {"route": "plain", "routed_experts": "moe_fp8"}
    assert [entry.name for entry in registry.TABLE["routed_experts"]._allowed[False]] == ["moe_fp8"]
    assert not registry.TABLE["route"]._allowed[False]


@pytest.mark.parametrize("text", ["plain", "*=plain"])
def test_everything_can_be_pinned_to_plain(text: str) -> None:
    registry.pin(text)
    assert not any(operation._allowed[False] for operation in registry.TABLE.values())
    registry.pin(f"{text},route=router")
    assert [name for name, operation in registry.TABLE.items() if operation._allowed[False]] == ["route"]
    registry.pin("")
    for operation in registry.TABLE.values():
        assert list(operation._allowed[False]) == [entry for entry in operation.entries if not entry.optional]


def test_an_optional_entry_is_taken_only_where_it_is_pinned() -> None:
    """And so are those that join it with others."""
    names = ("fp8_linear", "project", "add_project", "swiglu")

    def allowed() -> dict[str, list[str]]:
        return {name: [entry.name for entry in registry.TABLE[name]._allowed[False]] for name in names}

    registry.pin("")
    assert not any("e4m3" in entries for entries in allowed().values())
    registry.pin("fp8_linear=e4m3")
    assert allowed() == {name: ["e4m3"] for name in names}
    registry.pin("fp8_linear=plain")
    assert not any(allowed().values())


def test_a_pinned_operation_is_not_joined_with_others() -> None:
    """The entry that routes behind the norm routes as `router` does."""
    joined = registry.TABLE["add_norm_route"]
    for pins, free in (("route=plain", False), ("route=router", True), ("route=plain,add_norm_route=cuda", True)):
        registry.pin(pins)
        assert bool(joined._allowed[False]) == free, pins


def test_what_an_entry_makes_of_weights(halved: registry.Operation[[torch.Tensor], torch.Tensor]) -> None:
    halved.entry("none", takes=lambda x: True, prepare=lambda weight: None)(lambda x: x)
    assert halved.prepare(3) is None
    halved.entry("twice", takes=lambda x: True, prepare=lambda weight: weight * 2)(lambda x: x)
    assert halved.prepare(3) == 6
    halved.allow({"halved": "none"})
    assert halved.prepare(3) is None


class OnGpu(torch.Tensor):
    """A tensor of the CPU that asks the table as one of a GPU would."""

    is_cuda = True


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> registry.Operation[[torch.Tensor], torch.Tensor]:
    """An operation of its own."""
    monkeypatch.setattr(registry, "TABLE", {})

    @registry.operation
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    return halved


def test_entries_are_tried_in_their_order(halved: registry.Operation[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(3).as_subclass(OnGpu)
    halved.entry("second", takes=lambda x: len(x) < 4)(lambda x: x * 2)
    halved.entry("first", takes=lambda x: len(x) < 3, before="second")(lambda x: x * 3)
    assert halved.names == ["first", "second", "plain"]
    assert [halved.choose(x[:n]).name for n in (2, 3)] == ["first", "second"]
    assert halved.choose(torch.cat((x, x)).as_subclass(OnGpu)).name == "plain"
    assert halved.choose(torch.ones(2)).name == "plain"
    assert float(halved(x).sum()) == 6
    assert registry.explain() == "halved: second (1 calls); order first > second > plain"


def test_names_are_unique(halved: registry.Operation[[torch.Tensor], torch.Tensor]) -> None:
    halved.entry("one", takes=lambda x: True)(lambda x: x)
    for name, before in (("one", None), ("plain", None), ("two", "three")):
        with pytest.raises(KernelError, match=r"already|no entry three"):
            halved.entry(name, takes=lambda x: True, before=before)
    with pytest.raises(KernelError, match="an operation halved already"):
        registry.operation(halved.plain.call)


@pytest.mark.parametrize("joins", [{"route": "ruter"}, {"ruote": ""}])
def test_a_join_that_names_nothing_is_refused(
    joins: dict[str, str], halved: registry.Operation[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_loaded", False)
    halved.entry("wrong", takes=lambda x: True, joins=joins)(lambda x: x)
    with pytest.raises(KernelError, match=r"halved=wrong joins r\w+=\w*, which is no entry"):
        registry.load_providers()


@pytest.mark.parametrize("group", [registry.PROVIDER_GROUP, None])
def test_a_provider_that_cannot_be_imported_is_named(group: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's, which an entry point names, or one of ours."""
    found = [EntryPoint("theirs", "no_such.kernels", group)] if group else []
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry, "PROVIDERS", (*registry.PROVIDERS, *(() if group else ("no_such.kernels",))))
    monkeypatch.setattr(registry, "entry_points", lambda group: [point for point in found if point.group == group])
    with pytest.raises(KernelError, match=r"no_such\.kernels, which offers kernels"):
        registry.load_providers()


def test_a_pinned_entry_that_does_not_take_the_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake CUDA tensor asks the table as a real one would; the entry refuses float64."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 7168, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(384, 7168, dtype=torch.bfloat16, device="cuda")
        bias = torch.empty(384, device="cuda")
        chosen = registry.TABLE["route"].choose(x, weight, bias, 8)
        assert chosen.name == "router"
        assert registry.TABLE["route"].choose(x.double(), weight, bias, 8).name == "plain"
        assert registry.TABLE["route"].choose(x, weight, bias, 8, n_group=2).name == "plain"
        assert registry.TABLE["route"].choose(x.expand(65, -1), weight, bias, 8) == chosen
        few = weight.narrow(0, 0, 16), bias.narrow(0, 0, 16)
        assert registry.TABLE["route"].choose(x.expand(65, -1), *few, 8).name == "plain"
        registry.pin("route=router")
        with pytest.raises(KernelError, match="pinned"):
            registry.TABLE["route"].choose(x.double(), weight, bias, 8)
        registry.pin("route=plain")
        assert registry.TABLE["route"].choose(x, weight, bias, 8).name == "plain"


@pytest.mark.parametrize("name", ["moe_decode", "moe_fp8", "moe_w4a16"])
def test_every_expert_kernel_takes_what_the_plain_gate_returns(name: str) -> None:
    """The plain gate's results are cuts of wider tensors, and float64 for float64 logits."""
    scores = torch.randn(70, 16, dtype=torch.float64)
    indices, weights = noaux_tc_gate(scores, torch.zeros(16), 4)
    assert not indices.is_contiguous()
    experts = drawn("int4" if name == "moe_w4a16" else "fp8", 16, 128, 1024, device="cpu")
    registry.load_providers()
    call = next(entry.call for entry in registry.TABLE["routed_experts"].entries if entry.name == name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(70, 1024, dtype=torch.bfloat16)
        assert call(x, experts, indices, weights).shape == x.shape
