"""Kimi-K2's kernels in NKI, and what a decode step on them costs by the emulator's model (docs/nki.md)."""
