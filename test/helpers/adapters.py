"""Adapters (LoRA) as PEFT writes them, and the plain model with one merged into its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.linear import Linear
from kimi_k2.model.moe import Experts

ATTENTION = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj", "self_attn.o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    model: KimiK2ForCausalLM, out: Path, rank: int, seed: int, *, experts: bool = True, only: tuple[str, ...] = ()
) -> Path:
    """Of all attention linears and shared experts (or dense MLPs), or `only` some, and of every routed expert."""
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    config = model.config

    def add(name: str, rows: int, columns: int) -> None:
        for matrix, shape, size in (("A", (rank, columns), columns**-0.5), ("B", (rows, rank), 0.02)):
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = torch.randn(shape, generator=draw) * size

    for number in range(config.num_hidden_layers):
        moe, layer = config.is_moe_layer(number), f"model.layers.{number}"
        mlp = "mlp.shared_experts" if moe else "mlp"
        for name in only or (*ATTENTION, *(f"{mlp}.{projection}" for projection in MLP)):
            module = model.get_submodule(f"{layer}.{name}")
            assert isinstance(module, Linear)
            rows, columns = module.weight.shape
            add(f"{layer}.{name}", rows, columns)
        for expert in range(config.n_routed_experts if moe and experts else 0):
            wide = config.moe_intermediate_size, config.hidden_size
            for name in MLP:
                add(f"{layer}.mlp.experts.{expert}.{name}", *(wide[::-1] if name == "down_proj" else wide))
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors")
    # NxDI reads no text here but a list.
    modules = sorted({name.rpartition(".")[2] for name in only}) or "all-linear"
    about = {"r": rank, "lora_alpha": 3 * rank, "target_modules": modules, "peft_type": "LORA", "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(about))
    return out


def merge(model: KimiK2ForCausalLM, adapter: Path) -> None:
    """W + (alpha / r) B A, for every pair of a directory, in place."""
    about, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        more = about["lora_alpha"] / about["r"] * tensors[name.replace(".lora_A.", ".lora_B.")].double() @ a.double()
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        owner, _, expert = module.rpartition(".experts.")
        if not owner:
            linear = model.get_submodule(module)
            assert isinstance(linear, Linear)
            weight = linear.weight
        else:
            experts, (number, projection) = model.get_submodule(f"{owner}.experts"), expert.split(".")
            assert isinstance(experts, Experts)
            whole = experts.gate_up_proj[int(number)]
            half = len(whole) // 2
            projections = {
                "gate_proj": whole[:half],
                "up_proj": whole[half:],
                "down_proj": experts.down_proj[int(number)],
            }
            weight = projections[projection]
        weight.data.copy_(weight.double() + more.to(weight.device))
