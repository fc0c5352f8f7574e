"""Checkpoints as other tools write them: some Linears left in BF16, int64 shapes, tensors that belong to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import kimi
from rewritten import rewritten
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import GenerationError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.quantization.stored import formats

IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_fp8_with_modules_that_are_not_converted(checkpoints: dict[str, Path], tmp_path: Path, key: str) -> None:
    names = ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.experts"]
    fp8 = formats()["fp8"]()

    def some_in_bf16(held: dict[str, Tensor]) -> dict[str, Tensor]:
        for scale in [name for name in held if name.endswith("weight_scale_inv")]:
            module = scale.rpartition(".")[0]
            if module.startswith(tuple(names)):
                stored = {"weight": held[f"{module}.weight"], "weight_scale_inv": held.pop(scale)}
                held[f"{module}.weight"] = fp8.dequantize(stored, torch.bfloat16)
        return held

    directory = rewritten(
        checkpoints["fp8"], tmp_path / "some", some_in_bf16, lambda raw: raw["quantization_config"].update({key: names})
    )
    with torch.inference_mode():
        expected = load_transformers_model(directory)(IDS).logits
    for keep in (False, True):
        model = KimiK2ForCausalLM.from_pretrained(directory, keep_quantized=keep)
        assert float((model(IDS) - expected).abs().max()) <= 1e-5
    assert model.get_submodule("model.layers.0.mlp.down_proj").weight.dtype == torch.float32
    config = KimiK2Config.from_pretrained(directory)
    assert KimiK2Config.from_dict(config.to_hf_dict()).quantization == config.quantization
    for target in ("cuda", "neuron"):
        kimi("convert", directory, tmp_path / target, "--tp", "1", "--target", target)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_said_to_be(bf16: Path, temperature: float) -> None:
    model = KimiK2ForCausalLM.from_pretrained(bf16)
    model.lm_head.weight[7] = torch.inf
    with pytest.raises(GenerationError, match=r"of 768 logits are NaN or Inf.*float32's range"):
        generate(model, [[1, 2, 3]], SamplingParams(max_new_tokens=2, temperature=temperature))
