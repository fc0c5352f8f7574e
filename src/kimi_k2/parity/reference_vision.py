"""transformers' Kimi_K25ForConditionalGeneration from the same checkpoint: what tower and whole model are held to.

The weights go through transformers' own conversion of published names, which splits `wqkv` and permutes its rows for
RoPE in halves, so that a mistake in this package's layout cannot cancel out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.checkpoint.vision_names import VISION
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.parity.reference import MissingLibraryError, quiet, transformers_config
from kimi_k2.vision_config import Grid


def transformers_kimi_k25(directory: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' whole model (eval mode) of a small unquantized checkpoint with a tower.

    Raises:
        MissingLibraryError: this transformers has no `kimi_k25`.
        ConfigError: the checkpoint has no tower.
        RuntimeError: its weights are not exactly transformers' own.
    """
    library = _library()
    config = KimiK2Config.from_pretrained(directory)
    text = transformers_config(directory).to_dict()
    model, loading = library.Kimi_K25ForConditionalGeneration.from_pretrained(
        directory, config=_configuration(library, config, text, directory), dtype=dtype, output_loading_info=True
    )
    _check_loaded(directory, loading, ())
    return model.eval()


def transformers_tower(directory: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The same with tower and projector alone, of a checkpoint of any size and format: a language model of no layers.

    Raises:
        MissingLibraryError: this transformers has no `kimi_k25`.
        ConfigError: the checkpoint has no tower.
        CheckpointError: (subclasses) a shard or tensor is missing, damaged or of the wrong shape or dtype.
        RuntimeError: the tower's weights are not exactly transformers' own.
    """
    library = _library()
    config = KimiK2Config.from_pretrained(directory)
    text = transformers_config(directory).to_dict() | {"num_hidden_layers": 0, "vocab_size": 2}
    text |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    theirs = _configuration(library, config, text, directory)
    with CheckpointReader.for_config(directory, config, vision=True) as reader:
        stored = dict(reader.stream(lambda name: VISION.match(name) is not None))
    with quiet("transformers"):  # it warns of every part of the language model that is not there
        model, loading = library.Kimi_K25ForConditionalGeneration.from_pretrained(
            None, config=theirs, state_dict=stored, dtype=dtype, output_loading_info=True
        )
    _check_loaded(directory, loading, ("lm_head.", "model.language_model."))
    return model.eval()


def _library() -> Any:
    try:
        from transformers.models import kimi_k25
    except ImportError:
        raise MissingLibraryError("the comparison needs transformers 5.23 or newer, which has kimi_k25") from None
    return kimi_k25


def _configuration(library: Any, config: KimiK2Config, text: dict[str, Any], directory: str | Path) -> Any:
    vision = config.vision
    if vision is None:
        raise ConfigError("missing", field="vision_config", file=directory)
    text.pop("transformers_version", None)
    fields = ("patch_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    positions = ("pos_emb_height", "pos_emb_width", "pos_emb_time")
    return library.Kimi_K25Config(
        text_config=text,
        vision_config={name: getattr(vision, name) for name in (*fields, *positions)},
        projection_hidden_size=vision.hidden_size,
        projection_layer_norm_eps=vision.projection_layer_norm_eps,
        image_token_id=vision.image_token_id,
        video_token_id=config.vocab_size if vision.video_token_id is None else vision.video_token_id,
        tie_word_embeddings=False,
    )


def _check_loaded(directory: str | Path, loading: dict[str, Any], left_out: tuple[str, ...]) -> None:
    """RuntimeError if anything was missing, not expected or wrong, names that begin with one of `left_out` aside."""
    found = {kind: {name for name in names if not str(name).startswith(left_out)} for kind, names in loading.items()}
    if faults := {kind: names for kind, names in found.items() if names}:
        raise RuntimeError(f"{directory}: not the weights that transformers expects: {faults}")


@torch.inference_mode()
def transformers_features(model: Any, pixels: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Embeddings [tokens, hidden] of each image or video chunk, by transformers' tower and projector.

    Grid by grid: transformers 5.23 cannot pack clips of different lengths (`get_vision_temporal_merge_index`
    concatenates tables of different widths), and its `get_video_features` splits by patches of all frames, which fails
    for every clip of more than one frame.
    """
    parts = pixels.split([grid.patches for grid in grids])
    return [
        model.model.mm_projector(model.model.vision_tower(part, grid_thw=torch.tensor([grid])).pooler_output).squeeze(1)
        for part, grid in zip(parts, grids, strict=True)
    ]
