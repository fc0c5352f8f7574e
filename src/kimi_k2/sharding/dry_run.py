"""What a conversion would write, from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_k2.checkpoint.names import expected_tensors, vision_tensors
from kimi_k2.checkpoint.reader import RELEASE_BYTES
from kimi_k2.checkpoint.writer import FileLayout
from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.early_qkv_a import precedes_another
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import THREADS

READ_BYTES = 190e6  # of input a second, measured on two cores and a disk that copies 300 MB/s
FOLD_FLOPS = 9e10  # a second and core in float32, measured on an AMD EPYC
_PROCESS_BYTES = 300 * 2**20  # Python and torch, measured


@dataclass(frozen=True)
class DryRun:
    """Sizes in bytes.

    Attributes:
        input_bytes: tensor data read.
        rank_bytes: one rank's file, header included (all ranks' are of one size).
        ranks: number of files.
        peak_memory: estimate of the peak resident memory.
        tensors: tensors a rank.
        fold_flops: multiplications and additions of early down projections' folds.
    """

    input_bytes: int
    rank_bytes: int
    ranks: int
    peak_memory: int
    tensors: int
    fold_flops: int = 0

    @property
    def output_bytes(self) -> int:
        """All files."""
        return self.rank_bytes * self.ranks

    def seconds(self) -> float:
        """Extrapolated time at the measured rate of input bytes, and then of the folds by this machine."""
        return self.input_bytes / READ_BYTES + self.fold_flops / (FOLD_FLOPS * THREADS)


def dry_run(config: KimiK2Config, layout: Layout) -> DryRun:
    """Exact sizes and an estimate of the memory; reads no weights.

    Raises:
        ConfigError: sizes do not divide among the ranks.
    """
    plan = make_plan(config, layout)
    streamed = ("model.embed_tokens.weight", "lm_head.weight")
    largest = read = 0
    for spec in expected_tensors(config):
        read += (size := spec.nbytes)
        if size > largest and spec.name not in streamed:
            largest = size
    # Each module in flight is there as it is stored and as it is written; one more is being cut.
    working = (THREADS + 2) * largest * (1 + layout.dtype.itemsize)
    return DryRun(
        input_bytes=read + sum(spec.nbytes for spec in vision_tensors(config)),
        rank_bytes=FileLayout.of(tensor.spec() for tensor in plan.tensors).nbytes,
        ranks=layout.ranks,
        peak_memory=_PROCESS_BYTES + RELEASE_BYTES + working,
        tensors=len(plan.tensors),
        fold_flops=_fold_flops(config) if layout.layers else 0,
    )


def _fold_flops(config: KimiK2Config) -> int:
    layers = sum(precedes_another(config, layer) for layer in range(config.num_hidden_layers))
    width = (config.n_routed_experts + config.n_shared_experts) * config.moe_intermediate_size
    return 2 * config.qkv_a_dim * config.hidden_size * width * layers
