"""Pictures of figures, by matplotlib, where it is installed."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimi_k2.files import replace_file


@contextmanager
def chart(path: Path, width: float, height: float, **labels: str) -> Iterator[Any]:
    """Axes to draw on, written to `path` as its suffix says; inches; `labels` are of `Axes.set`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    yield axes
    axes.set(**labels)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=120)
    replace_file(path, drawn.getvalue())
    plt.close(figure)
