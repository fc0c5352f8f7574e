"""What the folder is: its files, the definitions that it has to have, and what its form of the model never does.

The form: decode on PyTorch operations alone, without NKI kernels; the language model alone; checkpoints in FP8 blocks,
in INT4 groups or in BF16.
"""

from __future__ import annotations

from .bundle import Reference


def _of(package: str, *names: str) -> list[str]:
    return [f"{package}.{name}" for name in names]


# Files of src/ with what they say of themselves, each above those that need it, and the modules they are made of.
FILES: dict[str, tuple[str, list[str]]] = {
    "__init__": (
        "Kimi-K2 for NxD Inference: `from src.modeling_kimi_k2 import NeuronKimiK2ForCausalLM`.\n\n"
        "Here: typed errors, bounds on what is read, files, and which fields of a config.json are known.",
        [
            *_of("kimi_k2", "errors", "limits", "files", "config_fields"),
            *_of("kimi_k2.quantization", "rows", "modules", "compressed_tensors"),
        ],
    ),
    "quantization": (
        "What a stored format is, FP8 blocks, and the arithmetic of their conversion for Trainium2's e4m3.",
        [
            *_of("kimi_k2.quantization", "stored", "fp8_block", "neuron_e4m3"),
            *_of("kimi_k2.sharding", "errors"),
        ],
    ),
    "configuration": (
        "A checkpoint's config.json, validated field by field, and the formats that compressed-tensors names there.",
        [
            *_of("kimi_k2.quantization", "int4_group", "mixed"),
            *_of("kimi_k2", "config_file", "config", "vision_config"),
        ],
    ),
    "checkpoint": (
        "A checkpoint's tensors: which there are, reading them in a stream, and writing a rank's file.",
        [*_of("kimi_k2.checkpoint", "index", "names", "reader"), "kimi_k2.sharding.rank_file"],
    ),
    "sharding": (
        "Which slice of which tensor goes to which rank, and the conversion of tensors.",
        [
            *_of("kimi_k2.sharding", "layout", "plan", "convert"),
            *_of("kimi_k2.sharding.experts", "format", "blockwise", "per_channel"),
        ],
    ),
    "presharding": (
        "One file a rank: streamed, in bounded memory; and all of a checkpoint in memory, uncut.",
        [
            *_of("kimi_k2", "checkpoint.writer", "sharding.experts.bf16"),
            *_of("kimi_k2.sharding", "manifest", "source", "layer_sink", "presharder", "whole"),
        ],
    ),
    "options": (
        "KimiK2InferenceConfig; every option of NxDI: tested, refused or inherited; the state dict; CPU mode.",
        _of("nxdi", "options", "lora", "config", "quantized", "presharding", "checkpoint", "cpu_mode"),
    ),
    "modules": (
        "Attention, router and experts on NxD's parallel layers.",
        [
            *_of("nxdi", "products", "norm", "attention", "flash_decoding", "router", "experts", "tiles"),
            *_of("kimi_k2", "model.rope", "model.linear", "ops.embedding", "ops.experts", "ops.linear"),
        ],
    ),
    "modeling_kimi_k2": (
        "NeuronKimiK2ForCausalLM: Kimi-K2 on NxD Inference.",
        _of("nxdi", "modeling_kimi_k2", "mlp", "patches", "prefill", "capture", "kv_cache", "block_kv_cache"),
    ),
}

ROOTS = [
    Reference("nxdi.modeling_kimi_k2", "NeuronKimiK2ForCausalLM"),
    Reference("nxdi.config", "load_kimi_config"),
    Reference("kimi_k2.quantization.fp8_block", "Fp8BlockFormat"),
    Reference("kimi_k2.quantization.int4_group", "Int4GroupFormat"),
    Reference("kimi_k2.quantization.stored", "UnquantizedFormat"),
    Reference("kimi_k2.quantization.mixed", "MixedFormat"),
    Reference("kimi_k2.sharding.experts.bf16", "FloatExperts"),
    Reference("kimi_k2.sharding.experts.blockwise", "BlockwiseExperts"),
    Reference("kimi_k2.sharding.experts.per_channel", "ChannelExperts"),
]
