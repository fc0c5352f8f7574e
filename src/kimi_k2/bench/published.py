"""Token times that others reported for Kimi-K2 on trn2.48xlarge. Nothing here was measured by this project."""

from __future__ import annotations

from typing import NamedTuple

LABEL = "published, not measured here"


class PublishedRow(NamedTuple):
    """One reported result; times in milliseconds.

    Attributes:
        note: what limits the comparison.
    """

    model: str
    layout: str
    tpot: float
    ttft: float | None
    source: str
    note: str = ""


_PORT = "NxDI pull request 131"
_K25 = "README of the Kimi-K2.5 port"

PUBLISHED = (
    PublishedRow("K2-0905", "TP=64 EP=2, LNC=1, FP8 blocks", 297.0, None, _PORT),
    PublishedRow(
        "K2-0905", "TP=32 EP=2, LNC=2, FP8 blocks", 165.5, 1420.0, _PORT, "165.4 to 166.4 for 16 to 512 tokens"
    ),
    PublishedRow("K2-0905", "TP=64 EP=1, LNC=2, FP8 blocks", 144.5, None, _PORT, "512 tokens of context"),
    PublishedRow(
        "K2-0905", "TP=64 EP=1, LNC=2, FP8 a channel", 76.3, None, _PORT, "512 tokens of context; TTFT inside"
    ),
    PublishedRow(
        "K2-0905", "TP=64 EP=1, LNC=2, FP8 a channel", 41.1, None, _PORT, "1024 tokens of context; TTFT inside"
    ),
    PublishedRow("K2.5", "TP=64 EP=1, LNC=2, FP8 a channel", 21.4, 2094.0, _K25, "512 tokens of context"),
    PublishedRow("K2.6", "TP=64 EP=1, LNC=2, FP8 a channel", 17.3, 1010.0, _K25, "512 tokens of context"),
)


def published_rows() -> list[list[str]]:
    """The rows as text: model, layout, TPOT ms, TTFT ms, source, note."""
    return [
        [row.model, row.layout, f"{row.tpot:g}", "" if row.ttft is None else f"{row.ttft:g}", row.source, row.note]
        for row in PUBLISHED
    ]


PUBLISHED_HEADER = ["model", "layout on trn2.48xlarge, batch 1", "TPOT, ms", "TTFT, ms", "reported in", "note"]
