"""`python -m nki_emulator.check MODULE:KERNEL [RELEASE]`: exit status 1 where a release refuses the kernel."""

from __future__ import annotations

import importlib
import sys

from nki_emulator import install
from nki_emulator.check import ERROR, RELEASES, check


def main(target: str, *releases: str) -> int:
    """Print what is found."""
    install()
    module, _, name = target.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    refused = False
    for release in releases or RELEASES:
        for finding in check(kernel, release):
            print(f"NKI {release}: {finding}")  # noqa: T201 - what the command is for
            refused |= finding.level == ERROR
    return int(refused)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
