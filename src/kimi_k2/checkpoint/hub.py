"""Checkpoints by their name on the Hugging Face Hub, from the local cache or, when asked to, downloaded into it."""

from __future__ import annotations

import re
from pathlib import Path

from kimi_k2.errors import CheckpointError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What loading needs; a repository also holds pictures, licences and remote code that is never run.
_DESCRIPTION = ["*.json", "*.jinja", "tiktoken.model"]
_WEIGHTS = ["*.safetensors"]


def resolve_checkpoint(name: str | Path, *, download: bool = False, weights: bool = True) -> Path:
    """The directory of a checkpoint.

    Args:
        name: a directory, or a repository such as `moonshotai/Kimi-K2-Instruct-0905`. A directory of that name comes
            first. Anything that is neither is given back as it is, for the reader to refuse.
        download: fetch what the cache lacks; a whole checkpoint is about 600 GB to 1 TB.
        weights: fetch them too, not only config.json, index and tokenizer.

    Raises:
        CheckpointError: a repository that is not in the cache, or that cannot be downloaded.
    """
    path = Path(name)
    repository = path.as_posix()
    if path.exists() or not _REPO_ID.fullmatch(repository):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=not download))
    except LocalEntryNotFoundError as error:
        if download:
            raise CheckpointError(f"cannot be downloaded: {str(error).splitlines()[0]}", file=repository) from None
        raise CheckpointError(
            "no such directory, and not in the Hugging Face cache; --download fetches it", file=repository
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"cannot be downloaded: {str(error).splitlines()[0]}", file=repository) from None
