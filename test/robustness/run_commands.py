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
        """What is wrong with it for this kind, or None: a refusal is one line that names a file, tensor or field."""
        refused, errors = kind.refused_by(self.command), re.findall(r"^error: .*", self.said, re.MULTILINE)
        what = None
        if self.status == 0:
            what = "accepted" if refused else None
        elif refused is False:
            what = "refused what is right"
        elif self.status != EXPECTED or "Traceback" in self.said or len(errors) != 1:
            what = "no single error"
        elif not re.search(r"/|field '|tensor '", errors[0]):
            what = "names nothing"
        elif refused and kind.says not in " ".join(self.said.split()):
            what = f"does not name {kind.says!r}"
        return what and f"{self.command}: {what}: status {self.status}: {self.said[-300:]!r}"
