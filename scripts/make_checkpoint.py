#!/usr/bin/env python3
"""Write a synthetic Kimi-K2 checkpoint; the same as `kimi-k2 make-checkpoint`."""

from kimi_k2.cli import make_checkpoint, run

if __name__ == "__main__":
    run(make_checkpoint)
