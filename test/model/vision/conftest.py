"""A tiny K2.5 in BF16 with a vision tower, as transformers can load it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_k2.parity.reference import MissingLibraryError, transformers_kimi_k25
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


@pytest.fixture(scope="session")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "k2.5"
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2.5"), "bf16"), seed=5)
    return directory


@pytest.fixture(scope="session")
def reference(k25: Path) -> Any:
    try:
        return transformers_kimi_k25(k25)
    except MissingLibraryError as error:
        pytest.skip(str(error))
