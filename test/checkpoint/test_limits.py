"""Files that claim too much are refused at once: huge headers, deep JSON, sizes that no model has."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.api import KimiK2
from kimi_k2.checkpoint.index import INDEX_NAME
from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.errors import ConfigError, KimiK2Error
from kimi_k2.files import parse_json
from kimi_k2.limits import CONFIG_FIELDS, JSON_NESTING
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config


@pytest.fixture
def fp8(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["fp8"], tmp_path / "fp8"))


def edit(directory: Path, **changes: Any) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, **changes}))


@pytest.mark.parametrize("field", CONFIG_FIELDS)
@pytest.mark.parametrize("value", [10**9 + 1, 10**18, 10**30])
def test_sizes_that_no_model_has(field: str, value: int) -> None:
    changed = {field: float(value * 10**6) if field == "rope_theta" else value}
    with pytest.raises(ConfigError, match=field):
        KimiK2Config.from_dict(raw_preset() | changed)


@pytest.mark.parametrize("name", ["kimi-k2-instruct", "kimi-k2.6"])
def test_published_models_are_far_below(name: str) -> None:
    config = KimiK2Config.from_preset(name)
    for field, (least, most) in CONFIG_FIELDS.items():
        assert 10 * least <= getattr(config, field) * 10 <= most, field


def test_layers_times_experts(fp8: Path) -> None:
    edit(fp8, num_hidden_layers=900, n_routed_experts=9000)
    with pytest.raises(ConfigError, match="in all 900 layers"):
        KimiK2Config.from_pretrained(fp8)


def test_nesting_is_counted() -> None:
    fine = b"[" * JSON_NESTING + b"]" * JSON_NESTING
    assert parse_json(fine)
    assert parse_json(b'"' + b"[" * 5000 + b'"')
    with pytest.raises(ValueError, match="deep"):
        parse_json(b"[" + fine + b"]")


@pytest.mark.parametrize("file", ["config.json", INDEX_NAME, "tokenizer_config.json", "generation_config.json"])
def test_a_field_twice_is_refused(fp8: Path, file: str) -> None:
    """Readers differ in which they take; ours and a library's must not."""
    content = (fp8 / file).read_text()
    (fp8 / file).write_text('{"deep": [{"\\u0061b": 1, "ab": 2}], ' + content.lstrip()[1:])
    with pytest.raises(KimiK2Error, match=rf"{re.escape(file)}: not valid JSON: field 'ab' twice"):
        KimiK2.open(fp8).__enter__()


def test_a_directory_that_holds_something_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds 'thesis\.tex'; give an empty directory"):
        write_synthetic_checkpoint(tmp_path, tiny_config())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
