"""`kimi-k2 plan` as a script."""

from kimi_k2.cli import run
from kimi_k2.tools_cli import plan

if __name__ == "__main__":
    run(plan)
