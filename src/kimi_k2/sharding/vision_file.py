"""The vision tower beside the ranks' files: one file for all of them, under the checkpoint's own names.

The tower has 0.4 B parameters and works on whole images, so ranks do not cut it; each reads what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_k2.checkpoint.index import DTYPE_CODES, DTYPES
from kimi_k2.checkpoint.names import VISION
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.checkpoint.writer import SafetensorsWriter, tensor_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.checksum import MakeDigest
from kimi_k2.sharding.rank_file import FileLayout

VISION_FILE = "vision.safetensors"


def write_vision(
    reader: CheckpointReader,
    config: KimiK2Config,
    output: Path,
    digest: MakeDigest,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, Any] | None:
    """Copy tower and projector as they are stored; None if the model has none.

    Args:
        reader: of the checkpoint, tower included.
        config: of the checkpoint.
        output: directory of the conversion.
        digest: of the checksums.
        on_bytes: called with the bytes of each tensor.

    Returns:
        The manifest's entry: file, bytes, tensors, and a checksum a tensor.

    Raises:
        NonfiniteError: a tensor holds NaN or Inf.
        CheckpointError: the source is damaged, or the disk is full.
    """
    if config.vision is None:
        return None
    names = [name for name in reader.names() if VISION.match(name)]
    specs = [TensorSpec(name, reader.tensors[name].dtype, reader.tensors[name].shape) for name in names]
    sums = {}
    with SafetensorsWriter(output / VISION_FILE, specs) as writer:
        for spec in specs:
            tensor = reader.get(spec.name)
            writer.write(spec.name, tensor)
            checksum = digest()
            checksum.update(tensor_bytes(tensor))
            sums[spec.name] = checksum.hexdigest()
            on_bytes(spec.nbytes)
    return {
        "file": VISION_FILE,
        "bytes": FileLayout.of(specs).nbytes,
        "tensors": {spec.name: {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape)} for spec in specs},
        "checksums": dict(sorted(sums.items())),
    }


def vision_layout(entry: dict[str, Any]) -> FileLayout:
    """Where the tensors of a manifest's entry lie in the file."""
    tensors = entry["tensors"].items()
    return FileLayout.of(TensorSpec(name, DTYPES[one["dtype"]], tuple(one["shape"])) for name, one in tensors)


def is_whole(output: Path, entry: dict[str, Any] | None) -> bool:
    """Whether the file is there with its size and header; True for a model without a tower."""
    return entry is None or vision_layout(entry).is_whole(output / VISION_FILE)
