"""transformers' own model from the same checkpoint: what the plain model is compared with.

Weights are dequantized by the libraries that define their formats (transformers for FP8, compressed-tensors for
INT4), so that a mistake in this package's dequantization cannot cancel out. K2.5's go
through transformers' own conversion of published names, which splits `wqkv` and permutes its rows for RoPE in halves.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import EXPERT, VISION
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, KimiK2Error
from kimi_k2.files import read_data
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.vision_config import Grid


class MissingLibraryError(KimiK2Error, ImportError):
    """A library that only comparisons need is not installed."""


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingLibraryError(f"the comparison needs {name}: pip install 'kimi-k2[parity]' ({error})") from None


def transformers_config(directory: str | Path) -> Any:
    """transformers' DeepseekV3Config from a checkpoint's config.json (its `text_config` if it has one)."""
    transformers = _import("transformers")
    raw = read_data(Path(directory) / "config.json", ConfigError)
    raw = dict(raw.get("text_config", raw))
    # transformers merges per-expert weights and knows its keys by model_type; kimi_k2 is not one of its own.
    for key in ("model_type", "architectures", "quantization_config", "compression_config"):
        raw.pop(key, None)
    # It warns of an explicit YaRN factor, which all published configurations of the family have.
    with quiet("transformers.modeling_rope_utils"):
        return transformers.DeepseekV3Config(**raw)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Errors only from this logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def dequantize_with_own_library(stored: dict[str, Tensor], config: KimiK2Config, dtype: torch.dtype) -> Tensor:
    """A Linear's weight from its stored tensors (by suffix), by transformers or compressed-tensors.

    Raises:
        MissingLibraryError: the library is not installed.
    """
    if "weight_packed" in stored:
        _import("compressed_tensors")
        from compressed_tensors.compressors import PackedQuantizationCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        # The library multiplies in the scale's dtype; a BF16 scale would round the product.
        widened = {**stored, "weight_scale": stored["weight_scale"].to(dtype)}
        out: Tensor = PackedQuantizationCompressor.decompress(widened, scheme)["weight"].to(dtype)
        return out
    if "weight_scale_inv" in stored:
        fp8 = _import("transformers.integrations.finegrained_fp8")
        quantization = config.quantization
        assert isinstance(quantization, Fp8BlockFormat)
        block = list(quantization.weight_block_size)
        if not hasattr(fp8, "_dequantize_fp8_weight"):
            raise MissingLibraryError("the comparison of FP8 needs transformers 5.x, which can dequantize it on a CPU")
        weight: Tensor = fp8._dequantize_fp8_weight(stored["weight"], stored["weight_scale_inv"], block, dtype)
        return weight
    return stored["weight"].to(dtype)


def reference_state_dict(directory: str | Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Dequantized weights of a (small) checkpoint under Hugging Face's per-expert names, all in memory."""
    config = KimiK2Config.from_pretrained(directory)
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    with CheckpointReader(directory) as reader:
        for name, tensor in reader.stream():
            module, _, suffix = name.rpartition(".")
            groups[module][suffix] = tensor.clone()
    state: dict[str, Tensor] = {}
    for module, stored in groups.items():
        bias = stored.pop("e_score_correction_bias", None)
        if bias is not None:
            state[f"{module}.e_score_correction_bias"] = bias
        state[f"{module}.weight"] = dequantize_with_own_library(stored, config, dtype)
    return state


def load_transformers_model(directory: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' DeepseekV3ForCausalLM (eager attention, eval mode) with this checkpoint's weights.

    Works with transformers 4.57 (a module for each expert) and 5.x (stacked experts).

    Raises:
        MissingLibraryError: transformers, or for INT4 compressed-tensors, is not installed.
        RuntimeError: (from torch) the weights do not fit transformers' model exactly.
    """
    transformers = _import("transformers")
    config = transformers_config(directory)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the plain loop; grouped kernels take no float64
    model = transformers.DeepseekV3ForCausalLM(config).to(dtype)
    state = reference_state_dict(directory, dtype)
    if any(key.endswith("experts.gate_up_proj") for key in model.state_dict()):
        state = _stack_experts(state, config.n_routed_experts)
    model.load_state_dict(state, strict=True)
    for key, tensor in state.items():  # .to(dtype) may have rounded what was float32 on purpose
        if key.endswith("e_score_correction_bias"):
            model.get_submodule(key.rpartition(".")[0]).e_score_correction_bias = tensor.clone()
    # Nor may it round the frequencies: from_pretrained makes them in float32 whatever the dtype.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _stack_experts(state: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    rest = {key: value for key, value in state.items() if not EXPERT.match(key)}
    for moe in {match["moe"] for key in state if (match := EXPERT.match(key))}:
        names = [f"{moe}.experts.{expert}" for expert in range(experts)]
        rest[f"{moe}.experts.gate_up_proj"] = torch.stack(
            [torch.cat((state[f"{name}.gate_proj.weight"], state[f"{name}.up_proj.weight"])) for name in names]
        )
        rest[f"{moe}.experts.down_proj"] = torch.stack([state[f"{name}.down_proj.weight"] for name in names])
    return rest


def transformers_kimi_k25(directory: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' whole model (eval mode) of a small unquantized checkpoint with a tower.

    Raises:
        MissingLibraryError: this transformers has no `kimi_k25`.
        ConfigError: the checkpoint has no tower.
        RuntimeError: its weights are not exactly transformers' own.
    """
    return _kimi_k25(directory, {}, dtype)


def transformers_tower(directory: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The same with tower and projector alone, of a checkpoint of any size and format: a language model of no layers.

    Raises:
        MissingLibraryError: this transformers has no `kimi_k25`.
        ConfigError: the checkpoint has no tower.
        CheckpointError: (subclasses) a shard or tensor is missing, damaged or of the wrong shape or dtype.
        RuntimeError: the tower's weights are not exactly transformers' own.
    """
    config = KimiK2Config.from_pretrained(directory)
    with CheckpointReader.for_config(directory, config, vision=True) as reader:
        stored = dict(reader.stream(lambda name: VISION.match(name) is not None))
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) | {"num_hidden_layers": 0, "vocab_size": 2}
    with quiet("transformers"):  # it warns of every part of the language model that is not there
        return _kimi_k25(directory, none, dtype, stored)


def _kimi_k25(
    directory: str | Path, changed: dict[str, Any], dtype: torch.dtype, stored: dict[str, Tensor] | None = None
) -> Any:
    """With `changed` fields of the language model; of the tower's `stored` tensors alone, or of all in the files."""
    _import("transformers")
    try:
        from transformers.models import kimi_k25 as library
    except ImportError:
        raise MissingLibraryError("the comparison needs transformers 5.23 or newer, which has kimi_k25") from None
    config = KimiK2Config.from_pretrained(directory)
    vision = config.vision
    if vision is None:
        raise ConfigError("missing", field="vision_config", file=directory)
    text = transformers_config(directory).to_dict() | changed
    text.pop("transformers_version", None)
    fields = ("patch_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    positions = ("pos_emb_height", "pos_emb_width", "pos_emb_time")
    theirs = library.Kimi_K25Config(
        text_config=text,
        vision_config={name: getattr(vision, name) for name in (*fields, *positions)},
        projection_hidden_size=vision.hidden_size,
        projection_layer_norm_eps=vision.projection_layer_norm_eps,
        image_token_id=vision.image_token_id,
        video_token_id=config.vocab_size if vision.video_token_id is None else vision.video_token_id,
        tie_word_embeddings=False,
    )
    model, loading = library.Kimi_K25ForConditionalGeneration.from_pretrained(
        None if stored else directory, config=theirs, state_dict=stored, dtype=dtype, output_loading_info=True
    )
    left_out = ("lm_head.", "model.language_model.") if stored else ()
    reported = {kind: {name for name in names if not str(name).startswith(left_out)} for kind, names in loading.items()}
    if faults := {kind: names for kind, names in reported.items() if names}:
        raise RuntimeError(f"{directory}: not the weights that transformers expects: {faults}")
    return model.eval()


@torch.inference_mode()
def transformers_features(model: Any, pixels: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Embeddings [tokens, hidden] of each image or video chunk, by transformers' tower and projector.

    Grid by grid: transformers 5.23 cannot pack clips of different lengths (`get_vision_temporal_merge_index`
    concatenates tables of different widths), and its `get_video_features` splits by patches of all frames, which fails
    for every clip of more than one frame.
    """
    images = pixels.split([grid.patches for grid in grids])
    return [
        model.model.mm_projector(
            model.model.vision_tower(patches, grid_thw=torch.tensor([grid])).pooler_output
        ).squeeze(1)
        for patches, grid in zip(images, grids, strict=True)
    ]
