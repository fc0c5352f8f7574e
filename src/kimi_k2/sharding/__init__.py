"""Checkpoints cut into one file a rank: the plan, the conversion and its check."""
