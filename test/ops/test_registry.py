"""Order, pins and refusals of the dispatch table; the plain functions stay what runs on a CPU."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2.errors import KernelError
from kimi_k2.model import attention, cache, linear, moe, norm, rope, router
from kimi_k2.ops import registry
from kimi_k2.quantization import fp8_block

PLAIN = {
    "apply_rotary_interleaved": rope.apply_rotary_interleaved,
    "dequantize_fp8_block": fp8_block.dequantize_fp8_block,
    "fp8_linear": linear.fp8_linear,
    "mla_absorbed_attention": attention.mla_absorbed_attention,
    "mla_naive_attention": attention.mla_naive_attention,
    "rms_norm": norm.rms_norm,
    "route": router.route,
    "routed_experts": moe.routed_experts,
    "store_entries": cache.store_entries,
}


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    yield
    registry.pin("")


def test_every_operation_has_a_plain_function_and_entries_with_its_arguments() -> None:
    assert set(PLAIN) == set(registry.TABLE)
    for operation, entries in registry.TABLE.items():
        wanted = list(inspect.signature(PLAIN[operation]).parameters)
        for entry in entries:
            module = importlib.import_module(entry.module)
            assert list(inspect.signature(getattr(module, operation)).parameters)[: len(wanted) - 1] == wanted[:-1]
            assert callable(getattr(module, f"supports_{operation}"))


def test_the_order_is_the_tables() -> None:
    assert {op: [entry.name for entry in entries] for op, entries in registry.TABLE.items()} == {
        "apply_rotary_interleaved": ["triton"],
        "dequantize_fp8_block": ["triton"],
        "fp8_linear": ["triton_decode"],
        "mla_absorbed_attention": ["mla_decode"],
        "mla_naive_attention": ["mla_prefill"],
        "rms_norm": ["triton"],
        "route": ["router"],
        "routed_experts": ["moe_decode", "moe_fp8", "moe_w4a16"],
        "store_entries": ["triton"],
    }


def test_cpu_tensors_take_the_plain_function_and_explain_counts_it() -> None:
    registry.pin("")
    x, weight = torch.randn(3, 256), torch.randn(128, 256).to(torch.float8_e4m3fn)
    scale = torch.rand(1, 2)
    wanted = F.linear(x.double(), weight.double() * scale.double().repeat_interleave(128, 1))
    out = linear.fp8_linear(x, weight, scale, (128, 128))
    assert (out - wanted).norm() / wanted.norm() < 1e-6
    assert "fp8_linear: plain (1 calls); order triton_decode > plain" in registry.explain()
    assert "route: not called" in registry.explain()


@pytest.mark.parametrize("text", ["nonsense=plain", "route=marlin", "route"])
def test_a_pin_that_the_table_lacks_is_refused(text: str) -> None:
    with pytest.raises(KernelError, match="expected"):
        registry.pin(text)


def test_the_environment_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.ENVIRONMENT, "route=plain,routed_experts=moe_fp8")
    registry.pin()
    assert registry._pins == {"route": "plain", "routed_experts": "moe_fp8"}


def test_a_pinned_entry_that_does_not_take_the_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake CUDA tensor asks the table as a real one would; the entry refuses float64."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 7168, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(384, 7168, dtype=torch.bfloat16, device="cuda")
        bias = torch.empty(384, device="cuda")
        chosen = registry.choose("route", x, weight, bias, 8)
        assert chosen is not None and chosen.name == "router"
        assert registry.choose("route", x.double(), weight, bias, 8) is None
        assert registry.choose("route", x, weight, bias, 8, n_group=2) is None
        assert registry.choose("route", x.expand(65, -1), weight, bias, 8) == chosen
        few = weight.narrow(0, 0, 16), bias.narrow(0, 0, 16)
        assert registry.choose("route", x.expand(65, -1), *few, 8) is None
        registry.pin("route=router")
        with pytest.raises(KernelError, match="pinned"):
            registry.choose("route", x.double(), weight, bias, 8)
        registry.pin("route=plain")
        assert registry.choose("route", x, weight, bias, 8) is None


@pytest.mark.parametrize("entry", [entry.name for entry in registry.TABLE["routed_experts"]])
def test_every_expert_kernel_takes_what_the_plain_gate_returns(entry: str) -> None:
    """The plain gate's results are cuts of wider tensors, and float64 for float64 logits."""
    scores = torch.randn(70, 16, dtype=torch.float64)
    indices, weights = router.noaux_tc_gate(scores, torch.zeros(16), 4)
    assert not indices.is_contiguous()
    hidden, inter, count = 1024, 128, 16

    def stored(rows: int, columns: int, packed: bool) -> dict[str, torch.Tensor]:
        if packed:
            return {
                "_packed": torch.empty(count, rows, columns // 8, dtype=torch.int32),
                "_scale": torch.empty(count, rows, columns // 32, dtype=torch.bfloat16),
            }
        codes = torch.empty(count, rows, columns, dtype=torch.float8_e4m3fn)
        return {"": codes, "_scale_inv": torch.empty(count, rows // 128, columns // 128)}

    module = importlib.import_module(next(e.module for e in registry.TABLE["routed_experts"] if e.name == entry))
    with FakeTensorMode(allow_non_fake_inputs=True):
        packed = entry == "moe_w4a16"
        held = {f"gate_up_proj{k}": v for k, v in stored(2 * inter, hidden, packed).items()}
        held |= {f"down_proj{k}": v for k, v in stored(hidden, inter, packed).items()}
        experts = SimpleNamespace(_buffers=held, kernel_order=True, expert_map=lambda: None, **held)
        x = torch.empty(70, hidden, dtype=torch.bfloat16)
        assert module.routed_experts(x, experts, indices, weights).shape == x.shape
