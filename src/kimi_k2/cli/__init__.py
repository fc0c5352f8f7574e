"""The `kimi-k2` command: one file a command, shared options in `options.py`, one error handler in `errors.py`.

No module here imports torch at its top: `kimi-k2 --help` and completion answer at once, and a command imports what it
needs when it runs.
"""

from kimi_k2.cli.app import app, main

__all__ = ["app", "main"]
