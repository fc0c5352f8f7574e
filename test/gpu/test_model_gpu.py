"""Whole models on a GPU: decode through every kernel and a CUDA graph against float64, and a converted checkpoint.

The comparison itself also runs on a CPU, at small sizes and in plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from exact import distance
from on_hopper import HOPPER, NEEDS_HOPPER

from kimi_k2.bench.kernels.model import decide_routes, synthetic_rank, widened
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.errors import KernelError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts
from kimi_k2.ops import registry
from kimi_k2.parallel.apply import load_rank
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

DEVICE = "cuda" if HOPPER else "cpu"
FP8, INT4 = "kimi-k2-instruct-0905", "kimi-k2-thinking"
TP8 = Layout(8, target="cuda", experts="stored")
W2_BF16 = Layout(1, target="cuda", experts="w2_bf16")

Test = TypeVar("Test", bound=Callable[..., None])


def on_gpu(test: Test) -> Test:
    """Mark a test that needs a Hopper GPU."""
    for mark in NEEDS_HOPPER:
        test = mark(test)
    return test


def rank_of_many(config: KimiK2Config, layout: Layout = TP8) -> KimiK2ForCausalLM:
    """Rank 0's part with random weights."""
    return decide_routes(synthetic_rank(config, layout, 0, communicate=False, device=DEVICE))


def real(preset: str, layers: int = 3) -> KimiK2Config:
    """The model's own sizes: one dense layer, then MoE layers."""
    return KimiK2Config.load(preset).model_copy(update={"num_hidden_layers": layers})


def small(preset: str) -> KimiK2Config:
    """Sizes that the expert kernels take, and a CPU soon runs."""
    return tiny_config(preset, hidden_size=1024, moe_intermediate_size=256, intermediate_size=512, num_hidden_layers=3)


@torch.inference_mode()
def decode_errors(
    model: KimiK2ForCausalLM,
    batch: int,
    steps: int = 6,
    context: int = 300,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> tuple[float, float, str]:
    """Distance of logits to float64 over some steps: ours, the plain model in bfloat16; which kernels were used.

    All three start from the same cached values.
    """
    exact = widened(model)
    torch.manual_seed(3)
    caches = [new_cache(model, batch, context + steps, dtype=cache_dtype) for _ in range(2)]
    reference = new_cache(exact, batch, context + steps, dtype=torch.float64)
    reference.data[:, :, :context].normal_()
    reference.data.copy_(reference.data.to(cache_dtype))
    for cache in caches:
        cache.data.copy_(reference.data)
    vocabulary = model.model.embed_tokens.weight.shape[0]
    ids = torch.randint(0, vocabulary, (steps, batch), device=DEVICE)
    wanted, plain, ours = [], [], []
    registry.pin(registry.PLAIN)
    for step, tokens in enumerate(ids):
        positions = torch.full((batch, 1), context + step, device=DEVICE)
        wanted.append(exact(tokens[:, None], positions, reference)[:, 0])
        plain.append(model(tokens[:, None], positions, caches[0])[:, 0])
    registry.pin("")
    replayed = DecodeStep(model, caches[1], graph=HOPPER)
    for step, tokens in enumerate(ids):
        ours.append(replayed(tokens, torch.full((batch,), context + step, device=DEVICE)).clone())
    used = registry.explain()
    truth = torch.stack(wanted)
    return distance(torch.stack(ours), truth), distance(torch.stack(plain), truth), used


@pytest.mark.parametrize("config", [small(FP8), small(INT4), W2_BF16.held(small(INT4))], ids=["fp8", "int4", "mixed"])
def test_the_comparison_at_small_sizes(config: KimiK2Config) -> None:
    """Where no kernel serves these sizes it is DecodeStep's arrangement in bfloat16 that is compared."""
    model = rank_of_many(config, replace(TP8, moe_tp=1))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        ours, plain, _ = decode_errors(model, 3, steps=3, context=20, cache_dtype=dtype)
        print(f"\n{dtype} cache: ours {ours:.2e}, plain bfloat16 {plain:.2e}")
        assert 0 < plain < 0.03
        assert ours < 1.5 * plain


def rows() -> Iterator[Any]:
    """Config, layout, batch, and dtype of the cache."""
    sizes = [(real(FP8), (1, 3, 8)), (real(INT4), (1, 3, 8)), (W2_BF16.held(real(INT4)), (1, 3))]
    given = [(config, TP8, batch, torch.bfloat16) for config, batches in sizes for batch in batches]
    for row in (*given, (real(FP8), TP8, 2, torch.float8_e4m3fn)):
        yield pytest.param(*row, marks=pytest.mark.memory(14))
    # Expert parallel over four (96 experts of 2048, 16 heads) and undivided (64 heads, half of the experts).
    for layout, experts in ((replace(TP8, moe_tp=1, moe_ep=4), 384), (replace(TP8, moe_tp=1), 192)):
        config = real(FP8, 2).model_copy(update={"n_routed_experts": experts})
        yield pytest.param(config, layout, 1, torch.bfloat16, marks=pytest.mark.memory(46))


@on_gpu
@pytest.mark.parametrize(("config", "layout", "batch", "cached"), rows())
def test_decode_is_no_further_from_float64_than_plain_bfloat16(
    config: KimiK2Config, layout: Layout, batch: int, cached: torch.dtype
) -> None:
    """Over an e4m3 cache each rounds its own new entries, of which float64's stay what they are."""
    ours, plain, used = decode_errors(rank_of_many(config, layout), batch, cache_dtype=cached)
    print(f"\n{layout}, batch {batch}, {cached}: ours {ours:.2e}, plain bfloat16 {plain:.2e}\n{used}")
    assert "plain (" not in next(line for line in used.splitlines() if line.startswith("routed_experts:"))
    # Beyond four tokens the FP8 experts round activations to e4m3, which the plain model does not.
    rounded = batch > 4 and isinstance(config.quantization, Fp8BlockFormat)
    assert ours < (0.04 if rounded else 1.2 * plain)


@on_gpu
@torch.inference_mode()
@pytest.mark.parametrize("preset", [FP8, INT4])
def test_a_step_has_the_same_bits_each_time(preset: str) -> None:
    """Every sum has a fixed order, however launches overlap: a launch that reads too early or too late is seen."""
    model = rank_of_many(real(preset, 2))
    flushed = torch.empty(2**26, dtype=torch.uint8, device=DEVICE)
    for batch in (1, 8, 20, 65, 128):
        cache = new_cache(model, batch, 512)
        cache.data.normal_()
        tokens = torch.randint(0, 100_000, (batch,), device=DEVICE)
        positions = torch.randint(100, 500, (batch,), device=DEVICE)
        step = DecodeStep(model, cache, graph=True)
        step(tokens, positions)
        wanted = step(tokens, positions).clone()
        for _ in range(40):
            flushed.zero_()  # the step's launches are there before it ends
            assert torch.equal(step(tokens, positions), wanted), batch


@on_gpu
def test_a_graph_of_plain_experts_is_refused() -> None:
    """They read the routing back, which would end the process in the middle of a capture."""
    registry.pin("routed_experts=plain")
    model = rank_of_many(small(FP8), Layout(1, target="cuda", experts="stored"))
    now = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(KernelError, match="experts that a kernel takes"):
        DecodeStep(model, new_cache(model, 1, 4), graph=True)
    registry.pin("")
    assert bool(DecodeStep(model, new_cache(model, 1, 4), graph=True)(now, now).isfinite().all())


@on_gpu
@torch.inference_mode()
@pytest.mark.memory(14)
def test_prefill_in_chunks_with_kernels() -> None:
    """Prefill through the kernels against float64; the experts' activations are rounded to e4m3."""
    registry.pin("")
    model = rank_of_many(real(FP8, 2))
    exact = widened(model)
    ids = torch.randint(0, model.model.embed_tokens.weight.shape[0], (2, 96), device=DEVICE)
    caches = new_cache(model, 2, 96), new_cache(exact, 2, 96, dtype=torch.float64)
    for start in (0, 64):
        chunk, positions = ids[:, start : start + 64], torch.arange(start, min(96, start + 64), device=DEVICE)
        found, wanted = (
            one(chunk, positions.expand(2, -1), cache) for one, cache in zip((model, exact), caches, strict=True)
        )
        assert distance(found, wanted) < 0.04
    assert "mla_naive_attention: mla_prefill (" in registry.explain()


@pytest.mark.parametrize("source", [FP8, INT4, "mixed"])
@torch.inference_mode()
def test_a_converted_checkpoint(source: str, tmp_path: Path) -> None:
    """The rank's file that `convert --target cuda` writes, loaded to the GPU, against the checkpoint in float64."""
    config = W2_BF16.held(small(INT4)) if source == "mixed" else small(source)
    layout = Layout(1, target="cuda", experts="stored")
    write_synthetic_checkpoint(tmp_path / "source", config)
    Presharder(tmp_path / "source", tmp_path / "ranks", layout).run()
    registry.pin("")
    ids = torch.randint(0, config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    exact = decide_routes(KimiK2ForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float64))
    wanted = exact(ids)
    # With kernels FP8 experts round activations to e4m3.
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.05 if source == FP8 else 0.02)):
        model = decide_routes(load_rank(tmp_path / "ranks", config, layout, 0, dtype=dtype, device=DEVICE))
        error = distance(model(ids.to(DEVICE)).cpu(), wanted)
        print(f"\n{source}, {dtype}: {error:.2e}")
        assert error < limit
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    for module in experts:
        assert (module.stored().gate_up.order is not None) == (HOPPER and source != FP8)
    # The same weights, by then in the kernel's order, serve the decode step.
    ours, plain, _ = decode_errors(model, 2, steps=3, context=20)
    assert ours < 1.5 * plain
