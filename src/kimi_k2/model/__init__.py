"""Kimi-K2 in plain PyTorch: the mathematics, written once, readable beside the paper."""
