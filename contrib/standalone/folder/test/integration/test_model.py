"""Compile, load and run the model, and compare logits with transformers' DeepseekV3ForCausalLM.

    pytest test/integration                                                 # a tiny model that is written here
    torchrun --nproc-per-node 2 -m pytest test/integration                  # the same in NxD's CPU mode on two ranks
    KIMI_K2_MODEL=/models/Kimi-K2-Instruct-0905 KIMI_K2_COMPILED=/compiled pytest test/integration -k full

Where there is no `neuronx-cc`, NxD's CPU mode stands for the device. KIMI_K2_TP and KIMI_K2_EP are the ranks of an
expert and the groups of experts. What the model expects of full weights has not been run.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "unit")]

import test_conversion as tiny
from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
from src.configuration import KimiK2Config
from src.modeling_kimi_k2 import NeuronKimiK2ForCausalLM
from src.options import KimiK2InferenceConfig, KimiK2NeuronConfig, load_kimi_config
from src.sharding import Layout, expert_formats

from src import ConfigError

ON_CPU = shutil.which("neuronx-cc") is None
TP, EP = int(os.environ.get("KIMI_K2_TP", os.environ.get("WORLD_SIZE", "1"))), int(os.environ.get("KIMI_K2_EP", "1"))
MODEL, COMPILED = os.environ.get("KIMI_K2_MODEL"), os.environ.get("KIMI_K2_COMPILED")
# In float32. On a device its sums are in another order, and that bound is a guess: nobody has run it.
TOLERANCE = 2e-5 if ON_CPU else 1e-3
PROMPTS = [[5, 17, 300, 44, 9, 1, 2, 3, 250, 7, 8, 90, 91, 92, 93, 94, 95], [400, 401, 402, 11, 12]]
FORCED = [[33, 34, 35, 36, 37, 38], [210, 211, 212, 213, 214, 215]]


def configuration(directory: str | Path, experts: str, **options: Any) -> KimiK2InferenceConfig:
    """The model's configuration with its routed experts held as `experts` says: blockwise, per_channel or bf16."""
    layout = Layout(TP, EP, experts=experts)
    for_experts = expert_formats()[experts].for_layout(KimiK2Config.from_pretrained(directory), layout).neuron_options()
    neuron = KimiK2NeuronConfig(
        tp_degree=TP * EP,
        moe_tp_degree=TP,
        moe_ep_degree=EP,
        on_cpu=ON_CPU,
        save_sharded_checkpoint=not ON_CPU,
        **for_experts,
        **options,
    )
    return KimiK2InferenceConfig(neuron, load_config=load_kimi_config(directory))


def tiny_app(directory: Path, compiled: Path, experts: str) -> NeuronKimiK2ForCausalLM:
    """Compile and load the tiny model in float32, two sequences at a time."""
    blockwise = {"block_size": 16, "use_torch_block_wise": True, "parallelize_token_to_block_mapping": EP > 1}
    config = configuration(
        directory,
        experts,
        torch_dtype=torch.float32,
        batch_size=2,
        seq_len=48,
        max_context_length=48,
        n_positions=48,
        enable_bucketing=False,
        blockwise_matmul_config=blockwise,
    )
    app = NeuronKimiK2ForCausalLM(str(directory), config)
    app.compile(str(compiled))
    app.load(str(compiled))
    return app


@torch.inference_mode()
def logits_of(app: NeuronKimiK2ForCausalLM) -> torch.Tensor:
    """[steps, 2, vocab] behind both prompts and behind each forced token."""
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    width = int(lengths.max())
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS])
    mask = (torch.arange(width) < lengths[:, None]).to(torch.int32)
    positions = torch.where(mask.bool(), torch.arange(width).expand_as(ids), torch.ones_like(ids))
    logits = [app(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]]
    for step in range(len(FORCED[0])):
        at = lengths + step
        mask = (torch.arange(int(at.max()) + 1) < at[:, None]).to(torch.int32)
        token = torch.tensor([[row[step]] for row in FORCED])
        logits.append(app(input_ids=token, attention_mask=mask, position_ids=at[:, None]).logits[:, -1])
    return torch.stack(logits)


@torch.inference_mode()
def reference_logits(plain: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same from transformers, one uncached pass a sequence."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**tiny.TINY, "model_type": "deepseek_v3"})).eval()
    model.load_state_dict(plain)
    rows = []
    for prompt, forced in zip(PROMPTS, FORCED, strict=True):
        rows.append(model(torch.tensor([prompt + forced])).logits[0, len(prompt) - 1 :])
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize(("stored", "experts"), [("fp8", "blockwise"), ("int4", "bf16"), ("bf16", "bf16")])
def test_logits_of_a_tiny_model(tmp_path: Path, stored: str, experts: str) -> None:
    """Prefill and decode. INT4 and BF16 experts stay in float32 here: the conversion's own rounding is none of this."""
    plain = tiny.write_checkpoint(tmp_path / "model", {"fp8": tiny.FP8, "int4": tiny.INT4, "bf16": None}[stored])
    app = tiny_app(tmp_path / "model", tmp_path / "compiled", experts)
    logits = logits_of(app)
    # Of FP8 the last bit of odd subnormals is lost at halving; the reference has what the ranks hold.
    reference = reference_logits(halved(plain) if stored == "fp8" else plain)
    print(f"\n{stored}: largest difference {float((logits - reference).abs().max()):.1e}")
    torch.testing.assert_close(logits, reference, rtol=0, atol=TOLERANCE)


def halved(plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Routed experts' weights as halved e4m3 values and doubled scales have them, from the seed of the checkpoint."""
    generator = torch.Generator().manual_seed(1)
    out = dict(plain)
    for name, shape in tiny._linears().items():
        stored, weight = tiny._fp8(name, shape, generator)
        if ".mlp.experts." not in name:
            continue
        half = (stored[f"{name}.weight"].float() / 2).to(torch.float8_e4m3fn).float()
        scale = 2 * stored[f"{name}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        out[f"{name}.weight"] = half * scale[: shape[0], : shape[1]]
        assert torch.equal(weight, plain[f"{name}.weight"])
    return out


def test_options_that_the_model_does_not_follow_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_factor"):
        KimiK2NeuronConfig(capacity_factor=1.0)
    with pytest.raises(ConfigError, match="decode"):
        KimiK2NeuronConfig(decode="kernels")


@pytest.mark.skipif(
    not MODEL or not COMPILED or ON_CPU, reason="needs a trn2.48xlarge, KIMI_K2_MODEL, KIMI_K2_COMPILED"
)
def test_full_model_says_paris() -> None:
    """Compile unless COMPILED has a model, load, and go on greedily; KIMI_K2_TP=32 KIMI_K2_EP=2 is one layout."""
    from transformers import AutoTokenizer

    assert MODEL
    assert COMPILED
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
    config = configuration(
        MODEL,
        os.environ.get("KIMI_K2_EXPERTS", "blockwise"),
        torch_dtype=torch.bfloat16,
        batch_size=1,
        seq_len=1024,
        max_context_length=512,
        n_positions=1024,
        logical_nc_config=2,
        context_encoding_buckets=[512],
        token_generation_buckets=[1024],
        blockwise_matmul_config={"use_torch_block_wise": True, "parallelize_token_to_block_mapping": EP > 1},
        on_device_sampling_config=OnDeviceSamplingConfig(top_k=1),
    )
    app = NeuronKimiK2ForCausalLM(MODEL, config)
    if not (Path(COMPILED) / "model.pt").exists():
        app.compile(COMPILED)
    app.load(COMPILED)
    ids = tokenizer.encode("The capital of France is")
    parameters = torch.tensor([[1.0, 1.0, 1.0]])
    out = app(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int32),
        position_ids=torch.arange(len(ids))[None],
        sampling_params=parameters,
    )
    for _ in range(16):
        ids.append(int(out.tokens.flatten()[-1]))
        out = app(
            input_ids=torch.tensor([ids[-1:]]),
            attention_mask=torch.ones(1, len(ids) - 1, dtype=torch.int32),
            position_ids=torch.tensor([[len(ids) - 1]]),
            sampling_params=parameters,
        )
    assert "Paris" in tokenizer.decode(ids)
