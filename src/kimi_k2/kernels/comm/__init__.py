"""Sums over GPUs."""
