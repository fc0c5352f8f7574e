"""Golden files: a trace in `golden.safetensors`, and in `golden.json` what it was made from. Same run, same bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, PrivateAttr, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from kimi_k2 import __version__
from kimi_k2.checkpoint.index import CheckpointIndex
from kimi_k2.checkpoint.writer import write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.config_fields import first_fault
from kimi_k2.errors import ConfigError
from kimi_k2.files import Json, open_regular, read_data, replace_file
from kimi_k2.parity.trace import Inputs, ParityError, Trace, captured_bytes

SCHEMA = "kimi-k2-golden/2"
MAX_BYTES = 2 * 10**9
# Bytes at each end of a shard that tell one checkpoint from another; a whole read of 1 TB takes an hour.
IDENTITY_BYTES = 1 << 16
TENSORS, DESCRIPTION = "golden.safetensors", "golden.json"
# What two models must share for their activations to have the same shapes.
STRUCTURE = (
    "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "n_routed_experts", "num_experts_per_tok",
    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip


class Golden(BaseModel):
    """A golden run, described as golden.json describes it.

    Attributes:
        config: the model's configuration, as `KimiK2Config.model_dump`.
        backend, dtype: what made it.
        checkpoint: `checkpoint_identity` of the weights.
        version: of this package.
        sha256: of golden.safetensors.
    """

    version: str
    checkpoint: str
    backend: str
    dtype: str
    inputs: Inputs
    config: Json
    sha256: str
    _trace: Trace = PrivateAttr()

    @property
    def trace(self) -> Trace:
        """What was kept."""
        return self._trace


def checkpoint_identity(directory: str | Path) -> str:
    """SHA-256 of every shard's name, size, first and last bytes: the header and some weights, wherever the files lie.

    Raises:
        CheckpointError: there is no checkpoint, or a shard is missing.
    """
    digest = hashlib.sha256()
    for shard in CheckpointIndex.open(directory).shards:
        path = Path(directory) / shard
        size = path.stat().st_size
        digest.update(f"{shard}:{size}\n".encode())
        with open_regular(path) as file:
            digest.update(file.read(IDENTITY_BYTES))
            file.seek(max(0, size - IDENTITY_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def check_size(config: KimiK2Config, inputs: Inputs) -> int:
    """Bytes that a capture takes.

    Raises:
        ParityError: more than 2 GB; fewer layers or positions are needed.
    """
    size = captured_bytes(config, inputs)
    if size > MAX_BYTES:
        raise ParityError(f"the capture takes {size / 1e9:.1f} GB, the limit is 2; choose fewer layers or positions")
    return size


def save_golden(
    directory: str | Path, trace: Trace, config: KimiK2Config, backend: str, dtype: str, checkpoint: str | Path
) -> None:
    """Write both files, each under a temporary name first; the description last, so that it stands for a whole pair.

    Args:
        directory: where both files go.
        trace: what is kept.
        config: of the model.
        backend: name of what made the trace.
        dtype: name of what it computed in.
        checkpoint: the directory that the weights came from.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = save({name: value.contiguous() for name, value in sorted(trace.values.items())})
    replace_file(directory / TENSORS, tensors)
    description = Golden(
        version=__version__,
        checkpoint=checkpoint_identity(checkpoint),
        backend=backend,
        dtype=dtype,
        inputs=trace.inputs,
        config=config.model_dump(mode="json"),
        sha256=hashlib.sha256(tensors).hexdigest(),
    )
    write_json(directory / DESCRIPTION, {"schema": SCHEMA, **description.model_dump(mode="json")})


def load_golden(directory: str | Path) -> Golden:
    """Read a golden run.

    Raises:
        ParityError: a file is missing, truncated, of another schema, or not the other one's pair.
    """
    path, tensors = Path(directory) / DESCRIPTION, Path(directory) / TENSORS
    try:
        stored = read_data(path, ConfigError)
        if stored["schema"] != SCHEMA:
            raise ParityError(f"{path}: schema {stored['schema']!r}, expected {SCHEMA!r}")
        golden = Golden.model_validate(stored)
    except FileNotFoundError:
        raise ParityError(f"{path}: no such file; `kimi-k2 parity capture` writes it") from None
    except ValidationError as error:
        raise ParityError(f"not a golden description: {first_fault(error, path)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ParityError(f"{path}: not a golden description: {error}") from None
    try:
        with open_regular(tensors) as file:
            actual_digest = hashlib.file_digest(file, "sha256").hexdigest()
        golden._trace = Trace(golden.inputs, load_file(tensors))  # noqa: SLF001 -- set here alone
    except FileNotFoundError:
        raise ParityError(f"{tensors}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise ParityError(f"{tensors}: cannot be read: {error}") from None
    if actual_digest != golden.sha256:
        raise ParityError(f"{tensors}: not the file that {DESCRIPTION} describes (its SHA-256 is another)")
    return golden


def check_model(golden: Golden, config: KimiK2Config) -> list[str]:
    """Fields in which a model differs from the golden run's without being another model; they may explain a divergence.

    Raises:
        ParityError: it is another model.
    """
    own = config.model_dump(mode="json")
    for name in STRUCTURE:
        if own.get(name) != golden.config.get(name):
            raise ParityError(
                f"another model's golden run: {name} is {golden.config.get(name)} there, {own.get(name)} here"
            )
    return [
        f"{name}: {golden.config.get(name)} in the golden run, {value} here"
        for name, value in own.items()
        if value != golden.config.get(name) and name not in ("quantization", "tensor_prefix")
    ]
