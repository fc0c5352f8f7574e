"""Errors of the sweep."""

from __future__ import annotations

from pathlib import Path

from kimi_k2.errors import KimiK2Error


class SweepError(KimiK2Error, ValueError):
    """A sweep cannot run as asked, or a result file is not one.

    Attributes:
        file: path of the result file at fault, if one is.
    """

    def __init__(self, message: str, *, file: str | Path | None = None) -> None:
        self.file = str(file) if file is not None else None
        super().__init__(f"{self.file}: {message}" if self.file else message)


class BackendUnavailableError(SweepError):
    """The machine lacks what a backend needs."""


class RanksLostError(KimiK2Error):
    """A rank failed in the middle of a generation: the others are at another sum, and only a new start helps.

    The one error of a cell that a sweep does not record and go on after.
    """
