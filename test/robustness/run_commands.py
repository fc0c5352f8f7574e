"""A command on a malformed checkpoint, and what is wrong with how it ends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from damage import Kind

from kimi_k2.cli import main
from kimi_k2.cli.errors import EXPECTED

COMMANDS = {
    "inspect": ["inspect", "{checkpoint}"],
    "convert": ["convert", "{checkpoint}", "{out}", "--tp", "2"],
    "generate": ["generate", "{checkpoint}", "-p", "Hi", "--max-new-tokens", "1"],
}
# By the letters of `mechanisms.READ_BY`.
SIX = COMMANDS | {
    "plan": ["plan", "{checkpoint}", "--preset", "h200-tp1"],
    "dialogue": ["chat", "{checkpoint}", "--max-new-tokens", "1"],
    "a capture": ["parity", "capture", "{checkpoint}", "{out}", "--prompt-length", "4", "--steps", "1"],
}


def run(command: str, checkpoint: Path, out: Path) -> int:
    """Exit status of a command, run in this process."""
    words = [word.format(checkpoint=checkpoint, out=out) for word in SIX[command]]
    try:
        main(arguments=words)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


@dataclass(frozen=True)
class Ending:
    """How a command ended."""

    command: str
    status: int
    said: str

    def fault(self, kind: Kind) -> str | None:
        """What is wrong with it for this kind, or None."""
        if self.command[0] not in kind.refused:
            return self._unless(self.status == 0, "refused what is right")
        if self.status == 0:
            return self._unless(False, "accepted")
        return self.unclean() or self._unless(kind.says in " ".join(self.said.split()), f"does not name {kind.says!r}")

    def unclean(self) -> str | None:
        """What is wrong with a refusal, whatever it refuses: not one line, a traceback, no file, tensor or field."""
        errors = re.findall(r"^error: .*", self.said, re.MULTILINE)
        if self.status != EXPECTED or "Traceback" in self.said or len(errors) != 1:
            return self._unless(False, "no single error")
        return self._unless(bool(re.search(r"/|field '|tensor '", errors[0])), "names nothing")

    def _unless(self, right: bool, what: str) -> str | None:
        return None if right else f"{self.command}: {what}: status {self.status}: {self.said[-300:]!r}"
