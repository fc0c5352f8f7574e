"""The emulator stands in for `nki` before any kernel is imported; kernels are held to the strictest release."""

from __future__ import annotations

import pytest

from nki_emulator import install
from nki_emulator.settings import settings

install()


@pytest.fixture(autouse=True)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """NKI 0.3, unless a module says by RELEASE that its kernels are written for another, or for none."""
    monkeypatch.setattr(settings, "release", getattr(request.module, "RELEASE", "0.3"))
