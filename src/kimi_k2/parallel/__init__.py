"""Tensor and expert parallelism over torch.distributed, applied to the plain model from outside."""
