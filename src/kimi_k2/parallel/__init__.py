"""Tensor and expert parallelism over torch.distributed, applied to the plain model from outside."""

import torch.distributed

if torch.distributed.is_available():
    # While there is no group yet: functions of this module keep the one that they find for a default, and dynamo
    # imports it when a model is made. Kept, gloo's threads outlive destroy_process_group, and a process that ends while
    # one of them lets go of a tensor aborts.
    import torch.distributed.nn.functional
