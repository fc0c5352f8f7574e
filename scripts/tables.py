"""Render the measured tables of the documents from docs/measured.json: `python scripts/tables.py` rewrites them.

A table has `made` (card, date, the commit that recorded it, and the command if one prints it), `columns` and `rows`; it
stands in a document behind a line `<!-- measured: NAME -->`, with a line that says how it was made.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from kimi_k2.bench.render import markdown_table

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"<!-- measured: ([\w-]+) -->\n.*\n\n(?:\|.*\n)+")


def rendered(text: str) -> str:
    """A document with its tables as they are recorded.

    Raises:
        KeyError: a table is not recorded.
    """
    recorded = json.loads((DOCS / "measured.json").read_text(encoding="utf-8"))

    def block(match: re.Match[str]) -> str:
        name = match[1]
        made, table = recorded[name]["made"], markdown_table(recorded[name]["columns"], recorded[name]["rows"])
        command = f": `{made['command']}`" if "command" in made else ""
        caption = f"*{made['card']}, {made['date']}, recorded by {made['commit']}{command}*"
        return f"<!-- measured: {name} -->\n{caption}\n\n{table}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for path in DOCS.glob("*.md"):
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
