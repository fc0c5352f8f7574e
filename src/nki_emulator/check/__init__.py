"""The language of NKI's releases, held to a kernel's source as NKI's compiler reads it.

The emulator runs a kernel as Python, which takes more than the compilers of NKI 0.3 to 0.6 parse. `check` reads the
kernel and all that it calls, and says what a release refuses: file, line, rule and the rule's document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nki_emulator.check.gather import gather
from nki_emulator.check.language import findings
from nki_emulator.check.rules import AGAINST, ERROR, RELEASES, RULES
from nki_emulator.errors import NkiError

__all__ = ["AGAINST", "ERROR", "RELEASES", "RULES", "Finding", "check"]


@dataclass(frozen=True)
class Finding:
    """One place of a kernel's source.

    Attributes:
        file, line: where.
        rule: name in `RULES`.
        what: the piece of source.
    """

    file: str
    line: int
    rule: str
    what: str

    @property
    def level(self) -> str:
        """ERROR or AGAINST."""
        return RULES[self.rule].level

    def __str__(self) -> str:
        rule = RULES[self.rule]
        return f"{self.file}:{self.line}: {rule.level}: {self.rule}: {self.what}: {rule.says} ({rule.source})"


def check(kernel: Callable[..., Any], release: str) -> list[Finding]:
    """What a kernel, and what it calls, breaks in a release of NKI.

    Args:
        kernel: a function, under `nki.jit` or not.
        release: one of RELEASES.

    Raises:
        NkiError: no such release, or the kernel's source cannot be read.
    """
    if release not in RELEASES:
        raise NkiError("nki_emulator.check", "release", f"one of {', '.join(RELEASES)}", release)
    parts = gather(kernel)
    if not parts:
        raise NkiError("nki_emulator.check", "kernel", "a Python function with its source", kernel)
    breaches = {
        Finding(part.file, getattr(node, "lineno", part.node.lineno), rule, what)
        for part in parts
        for rule, node, what in findings(part, release)
        if RULES[rule].holds(release)
    }
    return sorted(breaches, key=lambda finding: (finding.file, finding.line, finding.rule))
