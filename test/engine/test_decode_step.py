"""The arrangement for CUDA graphs against the plain model, on a CPU: same tokens, same cache, every launch named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.generate import prefill
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops import registry


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    yield
    registry.pin("")


def errors_of_steps(model: KimiK2ForCausalLM, steps: int = 3) -> list[float]:
    """Relative distance of some steps' logits to those of the plain model's one pass."""
    torch.manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    wanted = model(ids)
    cache = new_cache(model, 2, 9)
    prefill(model, [ids[0, :4].tolist(), ids[1, :6].tolist()], cache)
    step, positions, found = DecodeStep(model, cache), torch.tensor([4, 6]), []
    for _ in range(steps):
        logits = step(ids[torch.arange(2), positions], positions)
        plain = wanted[torch.arange(2), positions]
        found.append(float((logits - plain).norm() / plain.norm()))
        positions = positions + 1
    return found


@pytest.mark.parametrize("pins", ["", "plain"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("source", ["wide", "thinking", "bf16"])
@pytest.mark.parametrize("keep_quantized", [True, False])
@torch.inference_mode()
def test_steps_agree_with_the_plain_model(
    checkpoints: dict[str, Path],
    wide: Path,
    source: str,
    keep_quantized: bool,
    dtype: torch.dtype,
    limit: float,
    pins: str,
) -> None:
    directory = wide if source == "wide" else checkpoints[source]
    model = KimiK2ForCausalLM.from_pretrained(directory, dtype=dtype, keep_quantized=keep_quantized)
    registry.pin(pins)
    assert max(errors_of_steps(model)) < limit


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of kernels, on a CPU that the table takes for a GPU: every entry takes everything and computes plainly."""
    registry.load_providers()
    made: Counter[str] = Counter()

    def counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            made[name] += 1
            return plain(*arguments, **keywords)

        return call

    for operation in registry.TABLE.values():
        for entry in operation.entries:
            monkeypatch.setattr(entry, "takes", lambda *_, **__: True)
            monkeypatch.setattr(entry, "call", counted(f"{operation.name}={entry.name}", operation.plain.call))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    return made


def used() -> Counter[str]:
    """Entries that `explain` says were used, with the number of calls."""
    found: Counter[str] = Counter()
    for line in registry.explain().splitlines():
        operation, _, rest = line.partition(": ")
        for name, count in re.findall(r"(\w+) \((\d+) calls\)", rest.partition(";")[0]):
            found[f"{operation}={name}"] = int(count)
    return found


@torch.inference_mode()
def test_explain_names_every_launch_of_a_step(wide: Path, launched: Counter[str]) -> None:
    model = KimiK2ForCausalLM.from_pretrained(wide, keep_quantized=True)
    step, now = DecodeStep(model, new_cache(model, 2, 4)), torch.zeros(2, dtype=torch.int64)
    registry.pin("")
    launched.clear()
    step(now, now)
    kernels = Counter({name: count for name, count in used().items() if not name.endswith("=plain")})
    assert kernels == launched
    layers = len(model.model.layers)
    for joined in ("query_and_entry=cuda", "attend_values=cuda"):
        assert launched[joined] == layers
    assert launched["add_project=fused_linear"] == layers + 1  # and the head
    assert launched["attention_plan=mla_plan"] == 1, "one plan serves all layers"
    assert launched["add_norm_route=cuda"] == launched["routed_experts_with_shared=moe_decode"] == layers - 1


@torch.inference_mode()
def test_a_step_pinned_to_plain_launches_no_kernel_of_ours(wide: Path, launched: Counter[str]) -> None:
    model = KimiK2ForCausalLM.from_pretrained(wide, keep_quantized=True)
    registry.pin("plain")
    step, now = DecodeStep(model, new_cache(model, 2, 4)), torch.zeros(2, dtype=torch.int64)
    launched.clear()
    step(now, now)
    assert not launched
    named = used()
    assert {name.partition("=")[2] for name in named} == {"plain"}
    for operation in ("add_project", "query_and_entry", "absorb_and_store", "attend_values", "mla_decode", "route"):
        assert named[f"{operation}=plain"], operation


class Computed(TorchDispatchMode):
    """What PyTorch computes outside every operation of the table."""

    inside = 0
    seen: frozenset[str] = frozenset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and not func.is_view:
            self.seen |= {func.overloadpacket.__name__}
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_nothing_is_computed_outside_the_table(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = KimiK2ForCausalLM.from_pretrained(wide, keep_quantized=True)
    step, now = DecodeStep(model, new_cache(model, 2, 4)), torch.zeros(2, dtype=torch.int64)
    computed = Computed()  # type: ignore[no-untyped-call]

    def within(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            computed.inside += 1
            try:
                return plain(*arguments, **keywords)
            finally:
                computed.inside -= 1

        return call

    for operation in registry.TABLE.values():
        monkeypatch.setattr(operation.plain, "call", within(operation.plain.call))
    with computed:
        step.run()
    assert not computed.seen
    with computed:
        step(now, now)
    assert computed.seen == {"copy_"}  # tokens and positions go where the graph reads them
