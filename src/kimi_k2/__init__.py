"""Kimi-K2 on AWS Trainium2 and CUDA: configuration, checkpoints, the plain model and everything around it."""

__version__ = "0.1.0"
