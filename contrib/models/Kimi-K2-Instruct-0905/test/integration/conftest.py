"""The compiled model on a device; skipped unless the two variables are set.

    KIMI_K2_MODEL=/models/Kimi-K2-Instruct-0905 KIMI_K2_COMPILED=/compiled pytest test/integration

KIMI_K2_MODEL is the checkpoint that was compiled; KIMI_K2_COMPILED is what examples/compile.py wrote.
"""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if os.environ.get("KIMI_K2_MODEL") and os.environ.get("KIMI_K2_COMPILED"):
        return
    skip = pytest.mark.skip(reason="needs a trn2.48xlarge, KIMI_K2_MODEL and KIMI_K2_COMPILED")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def app():
    """The application, its weights on the device."""
    from examples.generate import load

    return load(os.environ["KIMI_K2_COMPILED"])


@pytest.fixture(scope="session")
def tokenizer():
    """The checkpoint's own."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["KIMI_K2_MODEL"], trust_remote_code=True)
