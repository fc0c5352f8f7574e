"""`kimi-k2 bench` as a script."""

from kimi_k2.cli import run
from kimi_k2.tools_cli import bench

if __name__ == "__main__":
    run(bench)
