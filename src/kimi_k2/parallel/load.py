"""A rank's model from the file that `convert --target cuda` wrote for it."""

from __future__ import annotations

from pathlib import Path

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import TensorDtypeError, TensorShapeError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.apply import parallelize
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import WEIGHTS, check_made_for, rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.verify import open_rank_file


def load_rank(
    directory: str | Path,
    config: KimiK2Config,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> KimiK2ForCausalLM:
    """The part of `rank`, loaded.

    Args:
        directory: output of `kimi-k2 convert --target cuda`.
        config: of the checkpoint that was converted.
        layout: that it was converted for.
        rank: which part.
        dtype: of activations and float weights.
        device: where the part lives.

    Raises:
        ConfigError: converted from another model or for another layout.
        CheckpointError: (subclasses) the manifest or the rank's file is missing or damaged; every tensor's checksum is
            compared.
    """
    check_made_for(directory, config, layout)
    with torch.device("meta"):
        model = KimiK2ForCausalLM(layout.held(config), dtype=dtype, keep_quantized=layout.keeps)
    parallelize(model, layout, rank, device=device)
    path = Path(directory) / WEIGHTS / rank_file_name(rank)
    with open_rank_file(Path(directory), rank) as read:
        for planned in make_plan(config, layout).tensors:
            stored = read(planned.name)
            module, _, name = planned.name.rpartition(".")
            target = getattr(model.get_submodule(module), name)
            if stored.shape != target.shape:
                raise TensorShapeError(
                    f"is {list(stored.shape)}, expected {list(target.shape)}", file=path, tensor=planned.name
                )
            if stored.dtype != planned.dtype:
                raise TensorDtypeError(f"is {stored.dtype}, expected {planned.dtype}", file=path, tensor=planned.name)
            target.copy_(stored)
    model.prepare()
    return model.eval()
