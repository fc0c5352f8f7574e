"""Headers of safetensors files: read within limits, and written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kimi_k2.errors import CorruptHeaderError
from kimi_k2.files import check_regular, open_regular, parse_json
from kimi_k2.limits import SAFETENSORS_HEADER_BYTES
from kimi_k2.quantization.stored import TensorSpec

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


def open_tensors(path: Path) -> Any:
    """safetensors' `safe_open` of a regular file: it would wait for ever for a pipe's writer.

    Raises:
        OSError, SafetensorError: the file is not there, is not regular, or is damaged.
    """
    check_regular(path)
    return safe_open(path, framework="pt")


def header_bytes(path: Path) -> bytes:
    """Length prefix and JSON text of a file's header as they are stored.

    Raises:
        CorruptHeaderError: the file is shorter than it says, or the header is larger than safetensors allows.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if length > SAFETENSORS_HEADER_BYTES:
            raise CorruptHeaderError(
                f"claims a header of {length} bytes; at most {SAFETENSORS_HEADER_BYTES} are allowed", file=path
            )
        text = file.read(length)
    if len(prefix) < 8 or len(text) < length:
        raise CorruptHeaderError("ends within its header", file=path)
    return prefix + text


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The JSON header of a safetensors file: name -> dtype code, shape and data_offsets, in the order of the data.

    Raises:
        CorruptHeaderError: this is no such header.
        OSError: the file cannot be read.
    """
    try:
        entries = parse_json(header_bytes(path)[8:])
        entries.pop("__metadata__", None)
        return dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CorruptHeaderError(f"the safetensors header cannot be parsed ({error!r})", file=path) from None


def encode_header(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Length prefix and JSON header of a safetensors file, and each tensor's absolute file offset."""
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offsets: dict[str, int] = {}
    position = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": DTYPE_CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        offsets[spec.name] = position
        position += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + offset for name, offset in offsets.items()}
