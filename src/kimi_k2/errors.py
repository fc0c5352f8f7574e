"""Typed errors: each names the file, tensor or field at fault and what was expected there."""

from __future__ import annotations

from pathlib import Path


class KimiK2Error(Exception):
    """Base of every error that this package raises on purpose."""


class KimiK2Warning(UserWarning):
    """Something that could not be checked; the command line shows its message alone."""


class PlacedError(KimiK2Error):
    """An error that names its place.

    Attributes:
        message: what was expected, without the place.
        file: path of the file at fault, if one is.
        field: dotted name of the field at fault in a configuration, or None when the whole file is.
        tensor: name of the tensor at fault in a checkpoint, if one is.
    """

    def __init__(
        self, message: str, *, file: str | Path | None = None, field: str | None = None, tensor: str | None = None
    ) -> None:
        self.message, self.field, self.tensor = message, field, tensor
        self.file = str(file) if file is not None else None
        where = (self.file, field and f"field '{field}'", tensor and f"tensor '{tensor}'")
        super().__init__(": ".join([*(part for part in where if part), message]))


class ConfigError(PlacedError, ValueError):
    """A configuration is missing a field, or a field is mistyped or inconsistent."""


class CheckpointError(PlacedError):
    """A checkpoint cannot be read or written as its index, headers and config promise."""


class MissingShardError(CheckpointError):
    """A shard that the index names is not there."""


class MissingTensorError(CheckpointError):
    """A tensor that the index, a shard or the model needs is not there."""


class UnexpectedTensorError(CheckpointError):
    """A tensor is present that the index or the configuration does not know."""


class TensorShapeError(CheckpointError):
    """A tensor's shape differs from what the configuration implies."""


class TensorDtypeError(CheckpointError):
    """A tensor's dtype differs from what its format implies."""


class TruncatedShardError(CheckpointError):
    """A shard is shorter (or longer) than its own header says."""


class CorruptHeaderError(CheckpointError):
    """A shard's safetensors header, or the index JSON, cannot be parsed."""


class NonfiniteError(CheckpointError):
    """A tensor holds NaN or Inf, or scales that no quantizer makes."""


class OrphanScaleError(CheckpointError):
    """A quantization scale without its weight, or a quantized weight without its scale."""


class TokenizerError(PlacedError, ValueError):
    """A vocabulary file, token id, chat message or tool definition is malformed."""


class MediaError(PlacedError, ValueError):
    """An image or a video is damaged, too large, of a kind that is not read, or does not fit its prompt."""


class KernelError(KimiK2Error, ValueError):
    """A kernel was given a shape, dtype, device or layout that it does not take."""


class GenerationError(KimiK2Error, ValueError):
    """A generation request is malformed (empty prompt, bad temperature, context overflow ...)."""


class BusyError(GenerationError):
    """Another generation holds the model: its stream is open."""


class DoesNotFitError(KimiK2Error):
    """A deployment needs more memory than its device has; the command line ends with a status of its own."""


class DeviceError(KimiK2Error, ValueError):
    """A device that this package does not run on, or that the machine lacks."""
