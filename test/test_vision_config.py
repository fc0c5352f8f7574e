"""`vision_config`: both spellings, what is refused, and what a synthetic checkpoint states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_k2.checkpoint.names import vision_tensors
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.errors import MissingTensorError, TensorShapeError
from kimi_k2.synthetic.config import tiny_config
from kimi_k2.vision_config import VisionConfig


def test_published_names_and_those_of_transformers_mean_the_same() -> None:
    raw = raw_preset("kimi-k2.5")
    theirs = {
        "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 80,
        "pos_emb_height": 10, "pos_emb_width": 12, "pos_emb_time": 4, "merge_kernel_size": [2, 2], "patch_size": 14,
    }  # fmt: skip
    published = {
        "vt_hidden_size": 48, "vt_num_attention_heads": 3, "vt_num_hidden_layers": 2, "vt_intermediate_size": 80,
        "init_pos_emb_height": 10, "init_pos_emb_width": 12, "init_pos_emb_time": 4, "merge_kernel_size": [2, 2],
        "mm_projector_type": "patchmerger", "merge_type": "sd2_tpool", "mm_hidden_size": 48, "text_hidden_size": 7168,
    }  # fmt: skip
    ours = KimiK2Config.from_dict({**raw, "vision_config": theirs})
    other = KimiK2Config.from_dict({**raw, "vision_config": published})
    assert ours == other
    assert ours.vision is not None and ours.vision.hidden_size == 48


def test_text_members_have_no_tower() -> None:
    for name in ("kimi-k2-instruct", "kimi-k2-thinking"):
        config = KimiK2Config.from_preset(name)
        assert config.vision is None
        assert not list(vision_tensors(config))


def test_synthetic_checkpoint_states_its_tower(k25_int4: Path) -> None:
    config = KimiK2Config.from_pretrained(k25_int4)
    assert config == tiny_config("kimi-k2.5")
    assert config.vision is not None
    assert config.vision.image_token_id == 768 - 256 + 21  # <|media_pad|> of the shrunk vocabulary


def test_a_tower_is_read_back_from_json() -> None:
    """NxDI saves a model's fields as JSON, which has lists where the configuration has tuples."""
    saved = json.loads(json.dumps(VisionConfig(num_hidden_layers=2).model_dump()))
    assert VisionConfig.model_validate(saved) == VisionConfig(num_hidden_layers=2)


def test_reader_checks_the_towers_tensors(k25_int4: Path) -> None:
    config = KimiK2Config.from_pretrained(k25_int4)
    assert config.vision is not None
    for change, kind in (({"num_hidden_layers": 3}, MissingTensorError), ({"intermediate_size": 96}, TensorShapeError)):
        other = config.model_copy(update={"vision": config.vision.model_copy(update=change)})
        with pytest.raises(kind, match=r"vision_tower\.encoder\.blocks"):
            CheckpointReader.for_config(k25_int4, other, vision=True)
        CheckpointReader.for_config(k25_int4, other)  # whoever wants the text alone is not bothered
