"""Errors of the sweep."""

from __future__ import annotations

from kimi_k2.errors import KimiK2Error, PlacedError


class SweepError(PlacedError, ValueError):
    """A sweep cannot run as asked, or a result file is not one."""


class RanksLostError(KimiK2Error):
    """A rank failed in the middle of a generation: the others are at another sum, and only a new start helps.

    The one error of a cell that a sweep does not record and go on after.
    """
