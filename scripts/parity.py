#!/usr/bin/env python3
"""`kimi-k2 parity` as a script: capture golden activations, replay them on another backend."""

from kimi_k2.cli import main
from kimi_k2.parity_cli import parity

if __name__ == "__main__":
    main(parity)
