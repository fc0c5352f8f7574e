"""A rank's model from the file that `convert --target cuda` wrote for it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from kimi_k2.checkpoint.header import open_tensors
from kimi_k2.checkpoint.writer import tensor_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, MissingShardError, MissingTensorError, TensorDtypeError, TensorShapeError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.apply import parallelize
from kimi_k2.sharding.checksum import FIRST_CHECKSUM, digest_maker
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import WEIGHTS, check_made_for, load_manifest, rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.rank_file import MEND


def load_rank(
    directory: str | Path,
    config: KimiK2Config,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    attention_form: str = "auto",
) -> KimiK2ForCausalLM:
    """The part of `rank`, loaded.

    Args:
        directory: output of `kimi-k2 convert --target cuda`.
        config: of the checkpoint that was converted.
        layout: that it was converted for.
        rank: which part.
        dtype: of activations and float weights.
        device: where the part lives.
        group: of all ranks; None for the default one.
        attention_form: see `KimiK2ForCausalLM`.

    Raises:
        ConfigError: converted from another model or for another layout.
        CheckpointError: (subclasses) the manifest or the rank's file is missing or damaged; every tensor's checksum is
            compared.
    """
    check_made_for(directory, config, layout)
    with torch.device("meta"):
        model = KimiK2ForCausalLM(
            config, dtype=dtype, keep_quantized=layout.experts == "stored", attention_form=attention_form
        )
    parallelize(model, layout, rank, device=device, group=group)
    path = Path(directory) / WEIGHTS / rank_file_name(rank)
    manifest = load_manifest(Path(directory))
    sums, make_digest = manifest["checksums"][path.name], digest_maker(manifest.get("checksum", FIRST_CHECKSUM), path)
    try:
        with open_tensors(path) as file:
            names = set(file.keys())
            for planned in make_plan(config, layout).tensors:
                if planned.name not in names:
                    raise MissingTensorError("not in the file", file=path, tensor=planned.name)
                stored = file.get_tensor(planned.name)
                module, _, name = planned.name.rpartition(".")
                target = getattr(model.get_submodule(module), name)
                if stored.shape != target.shape:
                    raise TensorShapeError(
                        f"is {list(stored.shape)}, expected {list(target.shape)}", file=path, tensor=planned.name
                    )
                if stored.dtype != planned.dtype:
                    raise TensorDtypeError(
                        f"is {stored.dtype}, expected {planned.dtype}", file=path, tensor=planned.name
                    )
                digest = make_digest()
                digest.update(tensor_bytes(stored))
                if digest.hexdigest() != sums[planned.name]:
                    raise CheckpointError(
                        f"the bytes differ from the manifest's checksum; {MEND}", file=path, tensor=planned.name
                    )
                target.copy_(stored)
    except (OSError, SafetensorError) as error:
        raise MissingShardError(f"cannot be read: {error}", file=path) from None
    model.prepare()
    return model.eval()
