"""Which tensors a head's files hold, by the names that SpecForge, TorchSpec and vLLM give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig
from kimi_k2.errors import MissingTensorError, TensorDtypeError, TensorShapeError, UnexpectedTensorError

D2T, T2D = "d2t", "t2d"
LAYER = "midlayer."
_FLOATING = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {D2T: (torch.int64, torch.int32), T2D: (torch.bool,)}


def module_name(name: str) -> str:
    """A tensor's name with `midlayer.` for the layer, which files exported for vLLM call `layers.0.`."""
    return LAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def head_shapes(config: DraftConfig, target: KimiK2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head must have, and its shape."""
    size, heads = config.hidden_size, config.num_attention_heads
    read = len(config.layers(target)) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, read), "norm.weight": (size,)}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{LAYER}{norm}.weight"] = (size,)
    for name in ("gate_proj", "up_proj"):
        shapes[f"{LAYER}mlp.{name}.weight"] = (config.intermediate_size, size)
    shapes[f"{LAYER}mlp.down_proj.weight"] = (size, config.intermediate_size)
    attention: dict[str, tuple[int, ...]]
    if config.form == "llama":
        queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
        attention = {"q_proj": (queries, 2 * size), "k_proj": (keys, 2 * size), "v_proj": (keys, 2 * size)}
        attention["o_proj"] = (size, queries)
    else:
        rank, value, nope, rope = (
            config.kv_lora_rank,
            config.v_head_dim,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        attention = {
            "q_a_proj": (config.q_lora_rank, 2 * size),
            "q_a_layernorm": (config.q_lora_rank,),
            "q_b_proj": (heads * (nope + rope), config.q_lora_rank),
            "kv_a_proj_with_mqa": (rank + rope, 2 * size),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (nope + value), rank),
            "o_proj": (size, heads * value),
        }
    shapes |= {f"{LAYER}self_attn.{name}.weight": shape for name, shape in attention.items()}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (read,)
    if config.fc_norm:
        norms = range(len(config.layers(target)))
        shapes |= {f"fc_norm.{number}.weight": (config.target_hidden_size,) for number in norms}
    if config.draft_vocab_size != config.vocab_size:
        shapes |= {"lm_head.weight": (config.draft_vocab_size, size), D2T: (config.draft_vocab_size,)}
    return shapes


def optional_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a head may have: the target's embedding and lm_head serve where it has none."""
    size = config.hidden_size
    return {
        "embed_tokens.weight": (config.vocab_size, size),
        "lm_head.weight": (config.draft_vocab_size, size),
        D2T: (config.draft_vocab_size,),
        T2D: (config.vocab_size,),
    }


def check_tensors(reader: CheckpointReader, held: Mapping[str, str], config: DraftConfig, target: KimiK2Config) -> None:
    """Refuse files that are no such head.

    Args:
        reader: of the files.
        held: by `module_name` the name in the files.
        config: of the head.
        target: of the model that it drafts for.

    Raises:
        CheckpointError: (subclasses) a tensor is missing or unexpected, or has another shape or dtype.
    """
    needed = head_shapes(config, target)
    for name, shape in needed.items():
        if name not in held:
            raise MissingTensorError(f"expected {list(shape)}", file=reader.directory, tensor=name)
    known = optional_shapes(config) | needed
    for name, stored in held.items():
        found = reader.tensors[stored]
        where = reader.directory / found.shard
        if name not in known:
            raise UnexpectedTensorError("config.json implies no such tensor", file=where, tensor=stored)
        if found.shape != known[name]:
            raise TensorShapeError(
                f"expected shape {list(known[name])}, got {list(found.shape)}", file=where, tensor=stored
            )
        if found.dtype not in _DTYPES.get(name, _FLOATING):
            expected = " or ".join(str(one).removeprefix("torch.") for one in _DTYPES.get(name, _FLOATING))
            raise TensorDtypeError(f"expected {expected}, got {found.dtype}", file=where, tensor=stored)
