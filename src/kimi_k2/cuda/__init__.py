"""Kimi-K2's decode step arranged for CUDA graphs, over the plain model's own weights."""
