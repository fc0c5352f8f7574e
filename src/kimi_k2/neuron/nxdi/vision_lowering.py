"""HLO of the vision tower's graphs at real shapes; see `lowering`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kimi_k2.config import KimiK2Config

from .lowering import LoweredGraph, _graph, _place, _placeholder, mocked_ranks
from .vision import KimiK25VisionGraph, VisionBucket, input_shapes

STAGE = "vision_encoder_model"


def lower_vision(
    config: KimiK2Config, bucket: VisionBucket, tp_degree: int, dtype: torch.dtype = torch.bfloat16
) -> LoweredGraph:
    """Lower one bucket, without weights.

    Raises:
        ConfigError: the tower cannot be cut into `tp_degree`.
    """
    assert config.vision is not None
    neuron = SimpleNamespace(
        world_size=tp_degree, tp_degree=tp_degree, pp_degree=1, ep_degree=1, logical_nc_config=2,
        flash_decoding_enabled=False, num_cores_per_group=1,
    )  # fmt: skip
    vision, count = config.vision, bucket.patches
    with mocked_ranks(neuron):
        with torch.device("meta"):
            module = KimiK25VisionGraph(config, tp_degree, dtype).eval()
        placed = _place(module)
        shapes = input_shapes(vision, bucket, dtype)
        inputs = []
        for number, (shape, kind) in enumerate(shapes):
            placeholder = placed[f"input.{number}"] = _placeholder(torch.empty(shape, dtype=kind, device="meta"))
            inputs.append(placeholder)
        with torch.no_grad():
            outputs = [module(*inputs)]
        return _graph(STAGE, count, outputs, placed, {})
