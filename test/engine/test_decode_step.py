"""The engine's prompts and steps against the plain model, on a CPU: same logits, same cache, every launch named."""

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
from kimi_k2.engine.layer_step import LayerStep
from kimi_k2.engine.prompt_step import PromptStep
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import MLP
from kimi_k2.ops import registry


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    yield
    registry.pin("")


@pytest.mark.parametrize(
    ("dtype", "limit", "pins"), [(torch.float32, 2e-5, ""), (torch.float32, 2e-5, "plain"), (torch.float64, 1e-12, "")]
)
@pytest.mark.parametrize(("chunk", "pages"), [(None, None), (3, 3)])
@pytest.mark.parametrize("source", ["wide", "thinking", "bf16"])
@pytest.mark.parametrize("keep_quantized", [True, False])
@torch.inference_mode()
def test_prompts_and_steps_agree_with_the_plain_model(
    checkpoints: dict[str, Path],
    wide: Path,
    source: str,
    keep_quantized: bool,
    chunk: int | None,
    pages: int | None,
    dtype: torch.dtype,
    limit: float,
    pins: str,
) -> None:
    """Logits of prompts and of steps behind them beside one pass, and what the cache holds."""
    directory = wide if source == "wide" else checkpoints[source]
    model = KimiK2ForCausalLM.from_pretrained(directory, dtype=dtype, keep_quantized=keep_quantized)
    registry.pin(pins)
    torch.manual_seed(1)
    ids, lengths = torch.randint(0, model.config.vocab_size, (2, 9)), [4, 6]
    plain, cache = (model.new_cache(2, 9), LatentCache(model.config, 2, 9, pages, dtype=dtype))
    wanted = model(ids, None, plain)
    cache.assign([9, 9])
    step, positions = DecodeStep(model, cache), torch.tensor(lengths)
    prompts = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    found = [prefill(model, prompts, cache, chunk, read=PromptStep(step))]
    for _ in range(3):
        found.append(step(ids[torch.arange(2), positions], positions))
        positions = positions + 1
    for offset, logits in enumerate(found, -1):
        right = wanted[torch.arange(2), torch.tensor(lengths) + offset]
        assert (logits - right).norm() / right.norm() < limit
    if pages is None:
        entries, right = (held.data[:, 0, :7] for held in (cache, plain))
        assert (entries - right).norm() / right.norm() < limit
    # What is stored as two Linears and read as one is held once, where no scale's block straddles the two.
    mlp, (gate_up, _) = model.model.layers[0].mlp, step.layers[0].dense or (None, None)
    assert isinstance(mlp, MLP) and gate_up is not None
    again = LayerStep(step.layers[0].layer, lambda x: x).dense  # of the same model: no copy
    assert again is not None
    for suffix, tensor in gate_up.tensors.items():
        assert again[0].tensors[suffix].data_ptr() == tensor.data_ptr()
        for linear in (mlp.gate_proj, mlp.up_proj):
            own = linear.stored().tensors[suffix]
            assert own.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("keep_quantized", [True, False])
@pytest.mark.parametrize("source", ["fp8", "thinking", "bf16"])
@torch.inference_mode()
def test_a_renewed_step_computes_with_the_weights_taken_since(
    checkpoints: dict[str, Path], source: str, keep_quantized: bool
) -> None:
    """As recorded graphs do, it reads where it read before; the plain model reads the weights themselves."""
    model = KimiK2ForCausalLM.from_pretrained(checkpoints[source], dtype=torch.float32, keep_quantized=keep_quantized)
    cache = LatentCache(model.config, 1, 9, dtype=torch.float32)
    cache.assign([9])
    step = DecodeStep(model, cache)

    def addresses() -> list[list[int]]:
        read = [[layer.w_uk, layer.w_uv, *layer.qkv_a.tensors.values()] for layer in step.layers]
        return [[tensor.data_ptr() for tensor in tensors] for tensors in read]

    before = addresses()
    for tensor in model.model.layers.state_dict().values():
        rows = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor  # PyTorch rolls no FP8
        rows.copy_(rows.roll(1, 0))
    for layer in step.layers:
        layer.renew()
    assert addresses() == before
    ids = torch.randint(0, model.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(2))
    wanted = model(ids, None, model.new_cache(1, 9))[0]
    found = (
        prefill(model, [ids[0, :8].tolist()], cache, None, read=PromptStep(step)),
        step(ids[:, 8], torch.tensor([8])),
    )
    assert (torch.cat(found) - wanted[7:]).norm() / wanted[7:].norm() < 2e-5


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of kernels, on a CPU that the table takes for a GPU: every entry takes everything and computes plainly."""
    registry.load_providers()
    calls: Counter[str] = Counter()

    def counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return plain(*arguments, **keywords)

        return call

    for operation in registry.TABLE.values():
        for entry in operation.entries:
            monkeypatch.setattr(entry, "takes", lambda *_, **__: True)
            monkeypatch.setattr(entry, "call", counted(f"{operation.name}={entry.name}", operation.plain.call))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    return calls


def used() -> Counter[str]:
    """Entries that `explain` says were used, with the number of calls."""
    found: Counter[str] = Counter()
    for line in registry.explain().splitlines():
        operation, _, rest = line.partition(": ")
        for name, count in re.findall(r"(\w+) \((\d+) calls\)", rest.partition(";")[0]):
            found[f"{operation}={name}"] = int(count)
    return found


@pytest.mark.parametrize("pins", ["", "plain"])
@torch.inference_mode()
def test_explain_names_every_launch_of_a_step(wide: Path, launched: Counter[str], pins: str) -> None:
    model = KimiK2ForCausalLM.from_pretrained(wide, keep_quantized=True)
    registry.pin(pins)
    step, now = (DecodeStep(model, new_cache(model, 2, 4)), torch.zeros(2, dtype=torch.int64))
    registry.pin(pins)
    launched.clear()
    step(now, now)
    named = used()
    assert launched == Counter({name: count for name, count in named.items() if not name.endswith("=plain")})
    if pins:
        assert not launched
        for operation in ("add_project", "query_and_entry", "absorb_and_store", "attend_values", "mla_decode", "route"):
            assert named[f"{operation}=plain"], operation
        return
    layers = len(model.model.layers)
    for joined in ("query_and_entry=cuda", "attend_values=cuda"):
        assert launched[joined] == layers
    assert launched["add_project=fused_linear"] == layers + 1  # and the head
    assert launched["attention_plan=mla_plan"] == 1, "one plan serves all layers"
    assert launched["add_norm_route=cuda"] == launched["routed_experts_with_shared=moe_decode"] == layers - 1


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
    step, now = (DecodeStep(model, new_cache(model, 2, 4)), torch.zeros(2, dtype=torch.int64))
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
        step(now, now)
    assert not computed.seen
