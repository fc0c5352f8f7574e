"""A tiny checkpoint through the conversion, against arithmetic written out here; needs neither NxD nor a device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from src.configuration import KimiK2Config
from src.presharding import Presharder
from src.sharding import Layout

from src import ConfigError

TINY = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 384, "moe_intermediate_size": 128, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "max_position_embeddings": 8192,
    "rope_theta": 50000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 511,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int",
                "dynamic": False, "actorder": None,
            },
        },
    },
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def _linears() -> dict[str, tuple[int, int]]:
    """[output, input] of every Linear but head and router."""
    hidden, heads = TINY["hidden_size"], TINY["num_attention_heads"]
    q, kv, rope, nope, v = (TINY[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim",
                                                    "qk_nope_head_dim", "v_head_dim"))  # fmt: skip
    shapes = {}
    for layer in range(TINY["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        shapes |= {
            f"{root}.self_attn.q_a_proj": (q, hidden), f"{root}.self_attn.q_b_proj": (heads * (nope + rope), q),
            f"{root}.self_attn.kv_a_proj_with_mqa": (kv + rope, hidden),
            f"{root}.self_attn.kv_b_proj": (heads * (nope + v), kv), f"{root}.self_attn.o_proj": (hidden, heads * v),
        }  # fmt: skip
        mlps = {"mlp": TINY["intermediate_size"]}
        if layer >= TINY["first_k_dense_replace"]:
            names = [f"mlp.experts.{expert}" for expert in range(TINY["n_routed_experts"])]
            mlps = dict.fromkeys([*names, "mlp.shared_experts"], TINY["moe_intermediate_size"])
        for name, width in mlps.items():
            shapes |= {f"{root}.{name}.{one}_proj": (width, hidden) for one in ("gate", "up")}
            shapes[f"{root}.{name}.down_proj"] = (hidden, width)
    return shapes


def _fp8(name: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Values over all finite e4m3 codes, a scale for each block of 128 x 128; and their product."""
    codes = torch.randint(0, 126, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    weight = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand([-(-size // 128) for size in shape], generator=generator) * 2e-4 + 1e-4
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    return {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}, weight.float() * wide


def _int4(name: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Eight values a word, the first in its lowest bits, a BF16 scale for each 32; and their product."""
    rows, columns = shape
    values = torch.randint(-7, 8, shape, generator=generator)
    shifts = 4 * torch.arange(8)
    words = ((values + 8).view(rows, -1, 8) << shifts).sum(-1)
    scale = (torch.rand(rows, columns // 32, generator=generator) * 0.01 + 0.005).to(torch.bfloat16)
    stored = {
        f"{name}.weight_packed": torch.where(words >= 2**31, words - 2**32, words).to(torch.int32),
        f"{name}.weight_scale": scale, f"{name}.weight_shape": torch.tensor(shape, dtype=torch.int32),
    }  # fmt: skip
    return stored, values.float() * scale.float().repeat_interleave(32, 1)


def write_checkpoint(directory: Path, quantization: dict | None) -> Tensors:
    """Write a tiny checkpoint; returns its weights dequantized, float32 by Hugging Face's names."""
    generator = torch.Generator().manual_seed(1)
    stored, plain = {}, {}
    for name, shape in _linears().items():
        if quantization is FP8:
            made, weight = _fp8(name, shape, generator)
        elif quantization is INT4 and ".mlp.experts." in name:
            made, weight = _int4(name, shape, generator)
        else:
            weight = torch.randn(shape, generator=generator).mul(shape[1] ** -0.5).bfloat16().float()
            made = {f"{name}.weight": weight.bfloat16()}
        stored |= made
        plain[f"{name}.weight"] = weight
    hidden, experts = TINY["hidden_size"], TINY["n_routed_experts"]
    others = {"model.embed_tokens": (TINY["vocab_size"], hidden), "lm_head": (TINY["vocab_size"], hidden)}
    norms = {"model.norm": hidden}
    for layer in range(TINY["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        norms |= dict.fromkeys((f"{root}.input_layernorm", f"{root}.post_attention_layernorm"), hidden)
        norms |= {f"{root}.self_attn.q_a_layernorm": TINY["q_lora_rank"],
                  f"{root}.self_attn.kv_a_layernorm": TINY["kv_lora_rank"]}  # fmt: skip
        if layer >= TINY["first_k_dense_replace"]:
            others[f"{root}.mlp.gate"] = (experts, hidden)
            plain[f"{root}.mlp.gate.e_score_correction_bias"] = torch.randn(experts, generator=generator) * 0.1
    for name, shape in others.items():
        plain[f"{name}.weight"] = torch.randn(shape, generator=generator).mul(0.05).bfloat16().float()
    for name, size in norms.items():
        plain[f"{name}.weight"] = (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16().float()
    for name, weight in plain.items():
        if name.rpartition(".")[0] not in _linears():
            stored[name] = weight if name.endswith("bias") else weight.bfloat16()
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
    config = TINY if quantization is None else {**TINY, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return plain


@pytest.fixture(scope="module", params=["fp8", "int4", "bf16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """Directory and dequantized weights."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, write_checkpoint(directory, {"fp8": FP8, "int4": INT4, "bf16": None}[request.param])


def dequantized(tensors: Tensors, name: str) -> torch.Tensor:
    """A stack of experts [E, input, output] in float64, whatever its scales are."""
    weight, scale = tensors[f"{name}.weight"].to(torch.float64), tensors.get(f"{name}.scale")
    if scale is None:
        return weight
    for dimension in (1, 2):
        scale = scale.repeat_interleave(weight.shape[dimension] // scale.shape[dimension], dimension)
    return weight * scale.to(torch.float64)


@pytest.mark.parametrize("experts", ["blockwise", "per_channel", "bf16"])
def test_ranks_hold_the_checkpoint(checkpoint: tuple[Path, Tensors], tmp_path: Path, experts: str) -> None:
    """Four ranks, two groups of experts; per element at most the error of the format."""
    directory, plain = checkpoint
    Presharder(directory, tmp_path, Layout(2, 2, experts=experts)).run()
    ranks = [load_file(tmp_path / "weights" / f"tp{rank}_sharded_checkpoint.safetensors") for rank in range(4)]
    root = "model.layers.1"
    wanted = plain[f"{root}.self_attn.o_proj.weight"].bfloat16()
    assert torch.equal(torch.cat([one["layers.1.self_attn.o_proj.weight"] for one in ranks], 1), wanted)
    both = [plain[f"{root}.self_attn.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    joined = torch.cat([one["layers.1.self_attn.qkv_a_proj.weight"] for one in ranks])
    assert torch.equal(joined, torch.cat(both).bfloat16())
    bias = plain[f"{root}.mlp.gate.e_score_correction_bias"]
    for tensors in ranks:
        assert torch.equal(tensors["layers.1.mlp.router.e_score_correction_bias"], bias)  # float32, not rounded
    # FP8 blocks are halved: exact but for odd subnormals, whose last bit, 2^-9, is lost to even. Other formats round.
    stored_in_blocks = (directory / "config.json").read_text().find('"fp8"') >= 0
    for expert in (0, 7, 8, 15):
        own = [ranks[2 * (expert // 8) + part] for part in range(2)]
        mlp, local = "layers.1.mlp.expert_mlps.mlp_op", expert % 8
        fused = [dequantized(one, f"{mlp}.gate_up_proj")[local].chunk(2, 1) for one in own]
        made = {
            "gate_proj": torch.cat([one[0] for one in fused], 1),
            "up_proj": torch.cat([one[1] for one in fused], 1),
        }
        made["down_proj"] = torch.cat([dequantized(one, f"{mlp}.down_proj")[local] for one in own])
        for name, weight in made.items():
            wanted = plain[f"{root}.mlp.experts.{expert}.{name}.weight"].to(torch.float64).T
            error = (weight - wanted).abs()
            if experts == "bf16":
                assert torch.equal(weight, wanted.bfloat16().to(torch.float64))
            elif experts == "blockwise" and stored_in_blocks:
                assert float(error.max()) <= 3e-4 * 2**-9 + 1e-12
            else:
                assert float(error.norm() / wanted.norm()) < 0.04


def test_no_value_reads_as_nan_on_trainium2(tmp_path: Path) -> None:
    """Its e4m3 ends at 240: codes of exponent 15 are NaN there."""
    write_checkpoint(tmp_path / "model", FP8)
    Presharder(tmp_path / "model", tmp_path / "out", Layout(1, experts="blockwise")).run()
    tensors = load_file(tmp_path / "out" / "weights" / "tp0_sharded_checkpoint.safetensors")
    codes = tensors["layers.1.mlp.expert_mlps.mlp_op.down_proj.weight"].view(torch.uint8)
    assert int((codes & 0x7F).max()) < 0x78


@pytest.mark.parametrize(
    ("change", "field"),
    [({"n_group": 8}, "num_experts_per_tok"), ({"surprise": 1}, "surprise"), ({"hidden_size": None}, "hidden_size")],
)
def test_configurations_are_refused_by_name(change: dict, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        KimiK2Config.from_dict({**TINY, **change})
