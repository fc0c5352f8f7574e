"""One layer with experts at Kimi-K2's width, decode, TP32/EP2: each of the 64 ranks' BF16/FP8 graph executed in turn.

The graph is cut at its collectives; what the ranks contribute is joined or summed here. Weights are made for one rank
at a time, experts only those that the token chooses. Prints the relative L2 distance to float64 behind each module.

python real_width_worker.py OUTPUT
"""

from __future__ import annotations

import math
import sys
from typing import Any

import environment
import torch
import worker  # noqa: F401 - prepares the process
from cut import CutProgram, place
from harness import neuron_config

from kimi_k2.config import KimiK2Config
from kimi_k2.model.rope import rope_inv_freq
from kimi_k2.quantization.fp8_block import quantize_fp8_block
from kimi_k2.quantization.neuron_e4m3 import halve_blocks

TP, EP, PAST, VOCAB, BLOCK = 32, 2, 60, 2048, 64
RANKS = TP * EP
FP8 = torch.float8_e4m3fn
MODULES = ("embedding", "qkv_a_proj", "attention", "experts", "logits")  # each ends in a collective, in this order


def draw(*shape: int, name: str, scale: float = 1.0) -> torch.Tensor:
    """Gaussian values in BF16, the same for a name."""
    generator = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
    return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)


class Layer:
    """The layer's whole weights in BF16, experts on demand, and its mathematics in float64."""

    def __init__(self, config: KimiK2Config) -> None:
        self.config, c = config, config
        hidden, heads = c.hidden_size, c.num_attention_heads

        def linear(rows: int, columns: int, name: str) -> torch.Tensor:
            return draw(rows, columns, name=name, scale=columns**-0.5)

        self.embed = draw(VOCAB, hidden, name="embed")
        self.head = linear(VOCAB, hidden, "head")
        self.qkv_a = linear(c.q_lora_rank + c.cache_dim, hidden, "qkv_a")
        self.q_b = linear(heads * c.qk_head_dim, c.q_lora_rank, "q_b")
        self.kv_b = linear(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank, "kv_b")
        self.o = linear(hidden, heads * c.v_head_dim, "o")
        self.router = linear(c.n_routed_experts, hidden, "router")
        self.bias = draw(c.n_routed_experts, name="bias", scale=0.3).float()
        self.shared = [linear(c.moe_intermediate_size, hidden, name) for name in ("gate", "up")]
        self.shared.append(linear(hidden, c.moe_intermediate_size, "down"))
        self.norm = {n: 1 + 0.1 * draw(s, name=n) for n, s in (
            ("input_layernorm", hidden), ("post_attention_layernorm", hidden), ("norm", hidden),
            ("q_a_layernorm", c.q_lora_rank), ("kv_a_layernorm", c.kv_lora_rank))}  # fmt: skip
        self.latents = draw(PAST, c.kv_lora_rank, name="latents")
        self.keys = draw(PAST, c.qk_rope_head_dim, name="keys")
        self.experts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def expert(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """gate, up and down [out, in] in FP8 as Neuron holds them, with scales of 64x64 blocks."""
        if number not in self.experts:
            c, held = self.config, []
            shapes = [(c.moe_intermediate_size, c.hidden_size)] * 2 + [(c.hidden_size, c.moe_intermediate_size)]
            for name, (rows, columns) in zip(("gate", "up", "down"), shapes, strict=True):
                plain = draw(rows, columns, name=f"{name}{number}", scale=columns**-0.5).float()
                halved = halve_blocks(*quantize_fp8_block(plain, (128, 128)), (128, 128), BLOCK)
                held.append((halved.weight, halved.scale))
            self.experts[number] = held
        return self.experts[number]

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm in float64."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.norm[name].double()

    def reference(self, token: int) -> dict[str, torch.Tensor]:
        """Values behind each module, and the chosen experts, in float64."""
        c, n = self.config, self.config.qk_nope_head_dim
        x = self.embed[token].double()
        down = self.qkv_a.double() @ self.rms(x, "input_layernorm")
        q_down, latent, rope = down.split([c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim])
        angles = PAST * rope_inv_freq(c, "cpu").double()
        multiplier = c.rope_scaling.rotary_multiplier if c.rope_scaling else 1.0

        def rotated(v: torch.Tensor) -> torch.Tensor:
            even, odd, cos, sin = v[..., 0::2], v[..., 1::2], angles.cos() * multiplier, angles.sin() * multiplier
            return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

        q = (self.q_b.double() @ self.rms(q_down, "q_a_layernorm")).view(c.num_attention_heads, -1)
        latents = torch.cat((self.latents.double(), self.rms(latent, "kv_a_layernorm")[None]))
        keys = torch.cat((self.keys.double(), rotated(rope)[None]))
        kv = (latents @ self.kv_b.double().mT).view(PAST + 1, c.num_attention_heads, -1)
        scores = torch.einsum("hd,thd->ht", q[:, :n], kv[..., :n]) + rotated(q[:, n:]) @ keys.mT
        out = torch.einsum("ht,thv->hv", (scores * c.softmax_scale).softmax(-1), kv[..., n:])
        attended = self.o.double() @ out.flatten()
        x = x + attended
        normed = self.rms(x, "post_attention_layernorm")
        routed = self.router.double() @ normed
        scores = routed.sigmoid()
        chosen = (scores + self.bias.double()).topk(c.num_experts_per_tok).indices
        weights = scores[chosen] / scores[chosen].sum() * c.routed_scaling_factor
        gate, up, low = (w.double() for w in self.shared)
        summed = low @ (torch.nn.functional.silu(gate @ normed) * (up @ normed))
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            gate, up, low = (
                w.double() * s.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                for w, s in self.expert(expert)
            )
            summed = summed + weight * (low @ (torch.nn.functional.silu(gate @ normed) * (up @ normed)))
        logits = self.head.double() @ self.rms(x + summed, "norm")
        return {"qkv_a_proj": down, "attention": attended, "experts": summed, "logits": logits, "chosen": chosen}

    def part(self, name: str, rank: int, *, experts: bool) -> torch.Tensor:
        """A parameter of the graph on one rank."""
        tensors = {
            "embed_tokens.weight": (self.embed, 1), "lm_head.weight": (self.head, 0),
            "self_attn.qkv_a_proj.weight": (self.qkv_a, 0), "self_attn.q_b_proj.weight": (self.q_b, 0),
            "self_attn.kv_b_proj.weight": (self.kv_b, 0), "self_attn.o_proj.weight": (self.o, 1),
            "mlp.shared_experts.gate_proj.weight": (self.shared[0], 0),
            "mlp.shared_experts.up_proj.weight": (self.shared[1], 0),
            "mlp.shared_experts.down_proj.weight": (self.shared[2], 1),
        }  # fmt: skip
        short = name.removeprefix("layers.0.")
        if short in tensors:
            tensor, dim = tensors[short]
            return tensor.chunk(RANKS, dim)[rank].contiguous()
        if short.split(".")[-2] in self.norm:
            return self.norm[short.split(".")[-2]]
        if short.endswith("linear_router.weight"):
            return self.router
        if short.endswith("e_score_correction_bias"):
            return self.bias
        if short.endswith("rank"):
            return torch.tensor([rank], dtype=torch.int32)
        if ".mlp.experts." in short:
            return self.bank(short, rank, experts=experts)
        raise KeyError(name)

    def bank(self, name: str, rank: int, *, experts: bool) -> torch.Tensor:
        """A rank's stack of experts (or its scales), input dimension first; unchosen experts are zero."""
        c, scale = self.config, name.endswith("scale")
        width, local, unit = c.moe_intermediate_size // TP, c.n_routed_experts // EP, BLOCK if scale else 1
        down = "down_proj" in name
        shape = (width, c.hidden_size) if down else (c.hidden_size, 2 * width)
        stack = torch.zeros(local, shape[0] // unit, shape[1] // unit, dtype=torch.float32 if scale else torch.uint8)
        part = slice(rank % TP * width // unit, (rank % TP + 1) * width // unit)
        for number, held in self.experts.items() if experts else ():
            if number // local != rank // TP:
                continue
            gate, up, low = (pair[1] if scale else pair[0].view(torch.uint8) for pair in held)
            whole = low[:, part].mT if down else torch.cat((gate[part], up[part])).mT
            stack[number % local] = whole
        return stack if scale else stack.view(FP8)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(2)
    overrides = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": VOCAB}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905", **overrides, **ids)
    module = environment.contrib("config")
    quantized = {
        "quantized": True, "quantization_type": "blockwise_symmetric", "quantization_dtype": "f8e4m3",
        "quantization_block_axis": [1, 2], "quantization_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    options: dict[str, Any] = neuron_config(TP, EP, 1, seq_len=64, torch_dtype=torch.bfloat16, **quantized)
    neuron = module.KimiK2NeuronConfig(**options)
    inference = module.KimiK2InferenceConfig(neuron, load_config=module.load_kimi_config(config))
    app = environment.contrib("modeling_kimi_k2").NeuronKimiK2ForCausalLM("none", inference)
    lowering = environment.contrib("lowering")
    graph = lowering.lower(app, lowering.STAGES[1])
    programs = [CutProgram(graph, phase) for phase in range(len(MODULES))]
    cuts = programs[0].cuts
    assert len(cuts) == len(MODULES), cuts

    layer, token = Layer(config), 77
    expected = layer.reference(token)
    pad = (0, 0, 0, 64 - PAST)
    common = {
        "input.0": torch.tensor([[token]], dtype=torch.int32),
        "input.1": (torch.arange(64) < PAST).to(torch.int32)[None],
        "input.2": torch.tensor([[PAST]], dtype=torch.int32),
        "input.3": torch.zeros(1, dtype=torch.int32),
        "kv_mgr.past_key_values.0": torch.nn.functional.pad(layer.keys, pad)[None, None],
        "kv_mgr.past_key_values.1": torch.nn.functional.pad(layer.latents, pad)[None, None],
    }
    # Placed once: no other module reads them.
    banks = {
        name: place(layer.part(name, 0, experts=False)) for name in graph.parameters.values() if ".mlp.experts." in name
    }
    fed = [torch.zeros(cut.shape, dtype=cut.dtype) for cut in cuts]
    found = {}
    for phase, (cut, name) in enumerate(zip(cuts, MODULES, strict=True)):
        outputs = []
        for rank in range(RANKS):
            own = dict(common)
            for key in graph.parameters.values():
                if key not in own:
                    idle = ".mlp.experts." in key and name != "experts"
                    own[key] = banks[key] if idle else layer.part(key, rank, experts=True)
            outputs.append(programs[phase](own, fed))
        gathered = cut.kind == "all-gather"
        joined = torch.cat(outputs) if gathered else torch.stack([out.float() for out in outputs]).sum(0)
        fed[phase] = joined.reshape(cut.shape).to(cut.dtype)
        found[name] = fed[phase].flatten().double()
        if name in expected:
            error = float((found[name] - expected[name]).norm() / expected[name].norm())
            print(f"{name}: relative L2 {error:.1e}", flush=True)
            found[name] = torch.tensor(error)
    found.pop("embedding")
    torch.save({name: float(error) for name, error in found.items()}, sys.argv[1])
    assert math.isfinite(sum(float(error) for error in found.values()))


if __name__ == "__main__":
    main()
