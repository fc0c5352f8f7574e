"""Whole models on a GPU: decode through every kernel and a CUDA graph against float64, and a converted checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kimi_k2.checkpoint.synthetic import tiny_config, write_synthetic_checkpoint
from kimi_k2.config import KimiK2Config
from kimi_k2.cuda.decode import DecodeStep
from kimi_k2.kernels import dispatch
from kimi_k2.kernels.bench.model import synthetic_rank
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts
from kimi_k2.model.router import Router
from kimi_k2.parallel.load import load_rank
from kimi_k2.sharding.plan import Layout
from kimi_k2.sharding.presharder import Presharder

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
PLAIN = ",".join(f"{operation}={dispatch.PLAIN}" for operation in dispatch.TABLE)


def rank_of_eight(preset: str, layers: int = 3) -> KimiK2ForCausalLM:
    """One rank's part at the real sizes, whose router bias decides: bfloat16 must not choose other experts."""
    config = KimiK2Config.load(preset).model_copy(update={"num_hidden_layers": layers})
    model = synthetic_rank(config, Layout(8, target="cuda", experts="stored"), 0, communicate=False)
    generator = torch.Generator("cuda").manual_seed(7)
    for module in model.modules():
        if isinstance(module, Router):
            module.e_score_correction_bias.normal_(std=0.5, generator=generator)
    return model


def widened(model: KimiK2ForCausalLM) -> KimiK2ForCausalLM:
    """A copy that computes in float64; what is stored quantized stays so."""
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    return exact


@torch.inference_mode()
def decode_errors(model: KimiK2ForCausalLM, batch: int, steps: int = 4) -> tuple[float, float, str]:
    """Relative L2 of logits to float64 over some steps: ours, the plain model in bfloat16; which kernels were used."""
    exact = widened(model)
    context = 300
    reference = exact.new_cache(batch, context + steps)
    reference.data[:, :, :context].normal_()
    caches = [model.new_cache(batch, context + steps) for _ in range(2)]
    for cache in caches:
        cache.data.copy_(reference.data)
    reference.data.copy_(caches[0].data)  # the same values everywhere
    torch.manual_seed(3)
    ids = torch.randint(0, exact.lm_head.weight.shape[0], (steps, batch), device="cuda")
    wanted, plain, ours = [], [], []
    for step, tokens in enumerate(ids):
        positions = torch.full((batch, 1), context + step, device="cuda")
        wanted.append(exact(tokens[:, None], positions, reference)[:, 0])
        dispatch.pin(PLAIN)
        plain.append(model(tokens[:, None], positions, caches[0])[:, 0])
        dispatch.pin("")
    replayed = DecodeStep(model, caches[1], graph=True)
    for step, tokens in enumerate(ids):
        ours.append(replayed(tokens, torch.full((batch,), context + step, device="cuda")).clone())
    used = dispatch.explain()

    def error(found: list[Tensor]) -> float:
        return float((torch.stack(found).double() - torch.stack(wanted)).norm() / torch.stack(wanted).norm())

    return error(ours), error(plain), used


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("preset", ["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def test_decode_is_no_further_from_float64_than_plain_bfloat16(preset: str, batch: int) -> None:
    ours, plain, used = decode_errors(rank_of_eight(preset), batch)
    print(f"\n{preset}, batch {batch}: ours {ours:.2e}, plain bfloat16 {plain:.2e}\n{used}")
    assert ours < 1.2 * plain


def test_decode_with_quantized_activations() -> None:
    """Eight tokens: the FP8 experts round activations to e4m3, which the plain model does not."""
    ours, plain, used = decode_errors(rank_of_eight("kimi-k2-instruct-0905"), 8)
    print(f"\nbatch 8: ours {ours:.2e}, plain bfloat16 {plain:.2e}")
    assert "moe_fp8 (" in used
    assert ours < 0.04


@torch.inference_mode()
def test_prefill_in_chunks_with_kernels() -> None:
    """Prefill through the kernels against float64; the experts' activations are rounded to e4m3."""
    model = rank_of_eight("kimi-k2-instruct-0905", 2)
    exact = widened(model)
    ids = torch.randint(0, exact.lm_head.weight.shape[0], (2, 96), device="cuda")
    caches = model.new_cache(2, 96), exact.new_cache(2, 96)
    for start in (0, 64):
        chunk, positions = ids[:, start : start + 64], torch.arange(start, min(96, start + 64), device="cuda")
        found, wanted = (
            one(chunk, positions.expand(2, -1), cache) for one, cache in zip((model, exact), caches, strict=True)
        )
        assert float((found.double() - wanted).norm() / wanted.norm()) < 0.04
    assert "mla_naive_attention: mla_prefill (" in dispatch.explain()


@pytest.mark.parametrize("preset", ["kimi-k2-instruct-0905", "kimi-k2-thinking"])
@torch.inference_mode()
def test_a_converted_checkpoint_on_a_gpu(preset: str, tmp_path: Path) -> None:
    """The rank's file that `convert --target cuda` writes, loaded to a GPU, against the checkpoint read on the CPU."""
    config = tiny_config(preset, hidden_size=512, moe_intermediate_size=256, intermediate_size=512, num_hidden_layers=3)
    layout = Layout(1, target="cuda", experts="stored")
    write_synthetic_checkpoint(tmp_path / "source", config)
    Presharder(tmp_path / "source", tmp_path / "ranks", layout).run()
    ids = torch.randint(0, config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    wanted = KimiK2ForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float64)(ids)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        model = load_rank(tmp_path / "ranks", config, layout, 0, dtype=dtype, device="cuda")
        found = model(ids.cuda()).double().cpu()
        assert float((found - wanted).norm() / wanted.norm()) < limit
    if preset == "kimi-k2-thinking":
        experts = [module for module in model.modules() if isinstance(module, Experts)]
        assert experts
        assert all(module.kernel_order for module in experts)
