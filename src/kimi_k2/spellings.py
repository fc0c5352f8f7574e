"""How the tools that write checkpoints spell the names of tensors and modules: one table, for files and lists alike.

Names inside this package are those of Moonshot's K2: `model.layers.0...`, `lm_head.weight`; and of K2.5's tower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

K2, K25 = "Moonshot's K2", "Moonshot's K2.5"
_NVIDIA, _SAVED, _MEMORY = "NVIDIA's K2.5", "transformers' K2.5", "transformers' K2.5 in memory"
# What a name begins with there, and here; the first that fits counts. The later a writer, the less it tells.
_TABLE = (
    ("model.language_model.", "model.", _MEMORY),
    ("model.vision_tower.", "vision_tower.", _MEMORY),
    ("language_model.model.blocks.", "model.layers.", _SAVED),
    ("model.mm_projector.", "mm_projector.", _SAVED),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.", _SAVED),
    ("language_model.model.", "model.", K25),
    ("language_model.lm_head.", "lm_head.", K25),
    ("language_model.", "model.", _NVIDIA),
)
_BEGINNINGS = tuple(theirs for theirs, _, _ in _TABLE)
_WRITERS = (_MEMORY, _SAVED, _NVIDIA, K25)


def plain_name(name: str) -> str:
    """A tensor's name as it is called here, whoever wrote it."""
    if name.startswith(_BEGINNINGS):
        for theirs, ours, _ in _TABLE:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
    return name


def plain_module(name: str) -> str:
    """The same of a module, which has no `.weight` behind it."""
    return plain_name(f"{name}.").removesuffix(".")


def spelled(name: str) -> Iterator[str]:
    """A plain name as each writer has it."""
    yield name
    for theirs, ours, _ in _TABLE:
        if name.startswith(ours):
            yield theirs + name.removeprefix(ours)


def writer(names: Iterable[str]) -> str:
    """Whose spelling a checkpoint's names are."""
    beginnings = (next((row for row in _TABLE if name.startswith(row[0])), None) for name in names)
    found = {row[2] for row in beginnings if row is not None}
    return next((whose for whose in _WRITERS if whose in found), K2)
