"""Files that a user names: regular ones alone are read, up to a bound, and nothing is written through a link.

One writer a directory: it holds a lock that the kernel takes back when it dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any

from kimi_k2.errors import CheckpointError, CorruptHeaderError, KimiK2Error
from kimi_k2.limits import JSON_BYTES, JSON_NESTING, YAML_BYTES

Json = dict[str, Any]  # an object
# An error that takes `file`.
FileError = Callable[..., KimiK2Error]
PARTIAL_SUFFIX = ".partial"
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


@contextmanager
def errors_of(path: Path, does: str, more: str = "") -> Iterator[None]:
    """An OSError of calls on a descriptor, which know no name, as one that names the file.

    Args:
        path: of the file.
        does: what it cannot be, such as `read`.
        more: what the message ends with.

    Raises:
        CheckpointError: in place of an OSError.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot be {does}: {error.strerror or error}{more}", file=path) from error


def is_there(path: Path) -> bool:
    """Whether a directory has an entry of that name; a link that leads nowhere is one, which cannot be read."""
    return os.path.lexists(path)


def check_regular(path: Path) -> None:
    """Refuse what could give bytes, or wait, for ever. Links are followed: Hugging Face's cache is made of them.

    Raises:
        OSError: it is not there, or a pipe, a device, a socket or a directory; `strerror` says which.
    """
    _check_regular(path.stat(), path)


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"expected a regular file, got {kind}", str(path))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; errors as for `check_regular`, and those of opening."""
    check_regular(path)
    # It may have become a pipe since, and some files of /proc make their readers wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int, error: FileError) -> bytes:
    """The content of a regular file.

    Args:
        path: of the file.
        limit: bytes that it may have.
        error: raised where it has more or cannot be read.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            # None: a file of /proc that has nothing to say now.
            # Twice: what has no size, or has grown, is read on; memory is asked for as it is needed.
            data = b"" if size > limit else file.read(size + 1) or b""
            if size < len(data) <= limit:
                data += file.read(limit + 1 - len(data)) or b""
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as reason:  # ValueError: a name with a NUL
        raise error(f"cannot be read: {getattr(reason, 'strerror', None) or reason}", file=path) from None
    if max(size, len(data)) > limit:
        raise error(f"{max(size, len(data))} bytes; at most {limit} are read", file=path)
    return data


def read_text(path: Path, limit: int, error: FileError) -> str:
    """The content of a file in UTF-8; arguments and errors as for `read_bytes`."""
    try:
        return read_bytes(path, limit, error).decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(f"expected UTF-8: {reason}", file=path) from None


def parse_json(data: bytes) -> Any:
    """Parsed UTF-8 JSON.

    Raises:
        ValueError: it is none, is too deeply nested, or has a field twice, of which readers take one or the other.
    """

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_name = dict(pairs)
        if len(by_name) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r:.100} twice")
        return by_name

    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=fields)
    except RecursionError:
        raise ValueError(f"nested more than {JSON_NESTING} deep") from None
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(JSON_NESTING + 1):
        if not level:
            return content
        children = (child for value in level for child in (value.values() if isinstance(value, dict) else value))
        level = [child for child in children if isinstance(child, (dict, list))]
    raise ValueError(f"nested more than {JSON_NESTING} deep")


def parse_yaml(data: bytes) -> Any:
    """Parsed YAML of JSON's values: mappings by texts, lists, texts, numbers, true, false and null.

    Raises:
        ValueError: it is none, is too long or too deeply nested, has another value (a date), a field twice, or an
            alias, which a few lines can multiply without end; in one line.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="an alias", problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            mapping = super().construct_mapping(node, deep)
            if len(mapping) != len(node.value):
                raise yaml.MarkedYAMLError(problem="a field twice", problem_mark=node.start_mark)
            return mapping

    try:
        if len(data) > YAML_BYTES:
            raise ValueError(f"{len(data)} bytes; at most {YAML_BYTES} are read")
        content = yaml.load(data.decode("utf-8"), Loader)
        plain = json.dumps(content, allow_nan=False)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(where + " ".join(str(error.problem or error.context).split())) from None
    except RecursionError:
        raise ValueError(f"nested more than {JSON_NESTING} deep") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if parse_json(plain.encode()) != content:
        raise ValueError("expected texts as the names of fields")
    return content


def read_data(
    path: Path,
    error: FileError = CorruptHeaderError,
    limit: int = JSON_BYTES,
    parse: Callable[[bytes], Any] = parse_json,
) -> Any:
    """The content of a JSON or YAML file.

    Args:
        path: of the file.
        error: raised where the file is not what `parse` reads, or too large.
        limit: bytes that it may have.
        parse: `parse_json` or `parse_yaml`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    data = read_bytes(path, limit, error)
    try:
        return parse(data)
    except ValueError as reason:
        raise error(f"not valid {parse.__name__.removeprefix('parse_').upper()}: {reason}", file=path) from None


def read_fields(path: Path, error: FileError, limit: int = JSON_BYTES) -> Mapping[str, Any]:
    """The fields of a JSON object in a file that may be left out: none then. A link that leads nowhere is an error."""
    if not is_there(path):
        return {}
    try:
        raw = read_data(path, error, limit)
    except FileNotFoundError:
        raise error("a link to a file that is not there", file=path) from None
    if not isinstance(raw, Mapping):
        raise error(f"expected a JSON object, got {type(raw).__name__}", file=path)
    return raw


def open_output(path: Path, *, truncate: bool = False) -> int:
    """Descriptor, for reading and writing, of a file that belongs to this name alone; made if it is not there.

    Args:
        path: of the file.
        truncate: drop what it holds.

    Raises:
        OSError: it cannot be made, or it is a link (a hard one too), a pipe or a device: what is written to it would
            reach another file. `strerror` says which.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link to another file, which is not overwritten", str(path)) from None
        raise
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, "has another name (a hard link), which is not overwritten", str(path))
        if truncate:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_output(directory: Path) -> None:
    """Make a directory, and see that files can be made in it, before work is spent on them.

    Raises:
        OSError: they cannot.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, then rename, so that neither a reader nor a kill finds half a file.

    Raises:
        OSError: the disk is full, or the temporary name is a link, see `open_output`.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with os.fdopen(open_output(partial, truncate=True), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # of a descriptor, which knows no name
        error.filename = error.filename or str(partial)
        raise
    partial.replace(path)


LOCK = ".kimi-k2.lock"


class DirectoryLock:
    """Held from `__enter__` to `__exit__`; the file names its holder and is removed at the end.

    Raises:
        CheckpointError: another process holds it (which, and since when), or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK
        self._fd = -1

    def __enter__(self) -> DirectoryLock:
        while True:
            with errors_of(self.path, "written"):
                self._fd = open_output(self.path)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = self._holder()
                os.close(self._fd)
                raise CheckpointError(f"another process is writing here: {holder}", file=self.path.parent) from None
            if self._is_current():
                break
            os.close(self._fd)  # its holder removed it in between
        mine = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            with errors_of(self.path, "written"):
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, json.dumps(mine).encode(), 0)
        except CheckpointError:
            self.__exit__(None, None, None)
            raise
        return self

    def _is_current(self) -> bool:
        try:
            return self.path.stat().st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {owner['process']} on {owner['host']} since {owner['since']}"
        except (ValueError, KeyError, TypeError):
            return "it has not given its name yet"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
