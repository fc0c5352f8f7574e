"""The one place where an exception becomes what the user sees: a line on standard error and an exit status."""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packaging.requirements import Requirement

from kimi_k2.errors import DoesNotFitError, KimiK2Error, KimiK2Warning
from kimi_k2.terminal import printable, say

EXPECTED, DOES_NOT_FIT, BUG = 1, 3, 70  # 70 is EX_SOFTWARE of sysexits.h


@contextmanager
def errors_handled() -> Iterator[None]:
    """Leave the process with one line for an expected error, and with a file for a bug.

    Exit status 3 for a `DoesNotFitError`; 1 for another `KimiK2Error`, an error of the file system, missing memory of
    the machine or a GPU, a file that is cut short while it is mapped, and a package of an extra that is not installed;
    70 for anything else, whose traceback goes to a file that the message names. typer itself ends usage errors with 2
    and an interrupt with 130.
    """
    warnings.showwarning = _show_warning
    logging.setLogRecordFactory(_Record)
    before = _on_bus_error(_ACTION) if sys.platform == "linux" else None
    try:
        yield
    except DoesNotFitError as error:
        _leave(str(error), DOES_NOT_FIT)
    except KimiK2Error as error:
        _leave(str(error))
    except OSError as error:
        if error.strerror is None:
            _report(error)
        names = (str(name) for name in (error.filename, error.filename2) if name is not None)
        _leave(": ".join((*names, error.strerror or "")))
    except MemoryError as error:
        _leave(f"out of memory: {error}" if str(error) else "out of memory")
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module == "kimi_k2":
            _leave(f"{error.name} is missing: copy the whole repository, as src/ has links into it, or pip install it")
        extra = _extra_with(module)
        if extra is None:
            _report(error)
        _leave(f"needs {module}, which is not installed: pip install 'kimi-k2[{extra}]'")
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for its sake
            _leave(_gpu_memory(error))
        _report(error)
    finally:
        if before is not None:
            _on_bus_error(before)


@contextmanager
def resumable() -> Iterator[None]:
    """Say of a job that was interrupted that the same command goes on with it."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted: run it again to resume", err=True)
        raise


def _gpu_memory(error: Exception) -> str:
    """What was asked for and what is there, of torch's message, and the notes of who knows what it was for."""
    there = r"GPU \d+ has a total capacity of \S+ \w+ of which \S+ \w+ is free"
    facts = re.findall(rf"Tried to allocate \S+ \w+|{there}", str(error))
    notes = getattr(error, "__notes__", [])
    return f"out of memory on a GPU: {'; '.join([*(facts or [str(error).splitlines()[0]]), *notes])}"


def _extra_with(module: str) -> str | None:
    """The first optional part of this project that brings a module; None where none does."""
    try:
        project = importlib.metadata.metadata("kimi-k2")
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return None
    requirements = list(map(Requirement, project.get_all("Requires-Dist") or ()))
    extras: list[str] = project.get_all("Provides-Extra") or []
    for extra in extras:
        for requirement in requirements:
            marker, name = requirement.marker, requirement.name.replace("-", "_")
            if name == module and marker and marker.evaluate({"extra": extra}):
                return extra
    return None


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    own = issubclass(category, KimiK2Warning)
    text = f"warning: {message}" if own else warnings.formatwarning(message, category, filename, lineno, line).rstrip()
    say(text, err=True)


class _Record(logging.LogRecord):
    """What any library logs, which may name tensors, files and text of a model; what it prints is past us."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        if self.exc_info:
            self.exc_text = printable("".join(traceback.format_exception(*self.exc_info)).rstrip())

    def getMessage(self) -> str:  # noqa: N802 -- logging's name
        return printable(super().getMessage())


def _leave(message: str, status: int = EXPECTED) -> None:
    say(f"error: {message}", err=True)
    sys.exit(status)


def _report(error: Exception) -> None:
    told = f"{sys.argv}\n{''.join(traceback.format_exception(error))}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="kimi-k2-bug-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(told)
        told = f"the traceback is in {file.name}"
    except OSError:  # the disk may be full
        pass
    say(f"error: a bug in kimi-k2: {type(error).__name__}: {error}; {told}", err=True)
    sys.exit(BUG)


# Checkpoints are mapped. Pages beyond the end of a file that another process cuts short give a signal, which Python
# can neither raise as an exception nor return from: whoever gets it names the file and ends.
def _cut_short(number: int, info: int, context: int) -> None:
    address, file = ctypes.c_void_p.from_address(info + 16).value or 0, ""  # siginfo_t.si_addr
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123 (little is safe here)
        for line in maps:
            low, high = (int(word, 16) for word in line.partition(" ")[0].split("-"))
            if low <= address < high:
                file = "".join(line.split(maxsplit=5)[5:]).strip()
    os.write(2, f"error: {printable(file) or 'memory'}: a mapped page is not there: the file was cut short\n".encode())
    os._exit(EXPECTED)


class _SigAction(ctypes.Structure):
    """glibc's struct sigaction of 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p), ("mask", ctypes.c_byte * 128), ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )  # fmt: skip


_SA_SIGINFO = 4
_CALLED = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_cut_short)
_ACTION = _SigAction(ctypes.cast(_CALLED, ctypes.c_void_p), flags=_SA_SIGINFO)


def _on_bus_error(action: _SigAction) -> _SigAction:
    """Set what a bus error does and give what it did before."""
    before = _SigAction()
    ctypes.CDLL(None).sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(before))
    return before
