"""Image files, read by Pillow within bounds: every file is either right or a MediaError."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from kimi_k2.errors import MediaError
from kimi_k2.files import read_bytes
from kimi_k2.limits import IMAGE_PIXELS, MEDIA_BYTES
from kimi_k2.media.config import MediaConfig
from kimi_k2.media.patches import Media, check_tokens, to_patches

# Raster formats with decoders of Pillow's own or of the libraries that it ships with. None runs another program
# (EPS does) and none is a stub that needs a plugin.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")
# Pillow's decoders raise any of these for damaged files.
_DAMAGED = (
    OSError, ValueError, SyntaxError, TypeError, IndexError, KeyError, AttributeError, EOFError, OverflowError,
    MemoryError, NotImplementedError, ZeroDivisionError, RuntimeError, struct.error, zlib.error,
)  # fmt: skip
_WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")


def process_image(source: Path | bytes | Image.Image, config: MediaConfig, *, name: str | None = None) -> Media:
    """One image as the tower takes it.

    Args:
        source: a file, its content, or an open image.
        name: what errors call it; a path by default.

    Raises:
        MediaError: the file cannot be read, is damaged, too large, animated, or of a kind that is not read.
    """
    image = source if isinstance(source, Image.Image) else open_image(source, name=name)
    check_tokens((image.height, image.width), config.max_patches, config, name)
    return Media(*to_patches(to_rgb(image, name=name), config.max_patches, config))


def read_bounded(path: Path) -> bytes:
    """The content of a regular file of at most MEDIA_BYTES.

    Raises:
        MediaError: it cannot be read, is empty or larger, or is a device, a pipe or a directory.
    """
    try:
        data = read_bytes(path, MEDIA_BYTES, MediaError)
    except FileNotFoundError:
        raise MediaError("no such file", file=path) from None
    if not data:
        raise MediaError("is empty", file=path)
    return data


def open_image(source: Path | bytes, *, name: str | None = None) -> Image.Image:
    """A decoded image, upright.

    Raises:
        MediaError: see `process_image`.
    """
    name = name or (str(source) if isinstance(source, Path) else None)
    data = read_bounded(source) if isinstance(source, Path) else source
    if not data:
        raise MediaError("is empty", file=name)
    with warnings.catch_warnings():
        # Bombs and damaged metadata are warnings of Pillow's; the first are refused below.
        warnings.simplefilter("ignore")
        try:
            Image.init()  # all of its formats; open() alone knows the commonest until it fails
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(image, name)
            # A camera's MPO is a JPEG with another view behind it.
            if image.format != "MPO" and getattr(image, "is_animated", False):
                raise MediaError("has several frames or pages; give an animation as a video", file=name)
            image.load()
            upright: Image.Image = ImageOps.exif_transpose(image)
        except MediaError:
            raise
        except UnidentifiedImageError:
            raise MediaError(f"no image of a kind that is read ({', '.join(FORMATS)})", file=name) from None
        except Image.DecompressionBombError:
            raise MediaError(f"expected at most {IMAGE_PIXELS} pixels, got far more", file=name) from None
        except _DAMAGED as error:
            raise MediaError(f"damaged: {error}", file=name) from None
    _check_size(upright, name)
    return upright


def _check_size(image: Image.Image, name: str | None) -> None:
    if image.width < 1 or image.height < 1:
        raise MediaError(f"expected at least one pixel, got {image.width} x {image.height}", file=name)
    if image.width * image.height > IMAGE_PIXELS:
        raise MediaError(f"expected at most {IMAGE_PIXELS} pixels, got {image.width} x {image.height}", file=name)


def to_rgb(image: Image.Image, *, name: str | None = None) -> Image.Image:
    """Eight bits of red, green and blue; transparency is dropped, as the processor published with the model does.

    Grey levels of 16 bits and more are scaled; Pillow's own conversion, which transformers uses, clips them at 255.

    Raises:
        MediaError: an image without pixels, or whose mode has no colours.
    """
    _check_size(image, name)
    try:
        if image.mode in _WIDE_MODES:
            return Image.fromarray(_scaled(np.asarray(image), image.mode)).convert("RGB")
        return image if image.mode == "RGB" else image.convert("RGB")
    except _DAMAGED as error:
        raise MediaError(f"mode {image.mode} cannot be converted to RGB: {error}", file=name) from None


def _scaled(values: npt.NDArray[Any], mode: str) -> npt.NDArray[np.uint8]:
    """Grey levels as bytes: 16 bits keep their upper eight; wider ones too, unless all of them fit a byte."""
    if mode == "F":
        if not np.isfinite(values).all():
            raise ValueError("holds NaN or Inf")
        if values.min() >= 0 and values.max() <= 1:
            return (values * 255 + 0.5).astype(np.uint8)
    if mode in ("I", "F") and values.max() <= 255:
        return values.clip(0, 255).astype(np.uint8)
    return (values.clip(0, 65535).astype(np.uint32) >> 8).astype(np.uint8)
