"""Cut a checkpoint into one file a rank: `kimi-k2 convert` as a script."""

import typer

from kimi_k2.convert_cli import convert

if __name__ == "__main__":
    typer.run(convert)
