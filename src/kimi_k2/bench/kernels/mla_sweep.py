"""Every launch of MLA decode in CUDA C++ worth timing, beside Triton's: `python -m kimi_k2.bench.kernels.mla_sweep`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import typer
from torch import Tensor

from kimi_k2.bench.kernels.mla import HEADS, in_triton, time_mla
from kimi_k2.bench.kernels.mla_cases import reference, relative
from kimi_k2.bench.kernels.mla_inputs import SOFTMAX_SCALE, Inputs, random_inputs
from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention.mla_cuda import CudaLaunch, choose_launch, run
from kimi_k2.kernels.attention.mla_sizes import PAGE


def launches(batch: int, heads: int, context: int) -> Iterator[CudaLaunch]:
    """The chosen launch, then other numbers of parts."""
    chosen = choose_launch(batch, heads, context)
    yield chosen
    for splits in (max(1, chosen.splits // 2), 32, 43, 64, 128):
        if splits * PAGE <= context and (splits <= chosen.splits or batch == 1):
            yield CudaLaunch(splits)


def main() -> None:
    """Relative error against float64 and microseconds of each launch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[8192])
    given = parser.parse_args()
    for heads in given.heads:
        for batch in given.batch:
            for context in given.context:
                small = random_inputs(min(batch, 2), heads, context)
                rows = small.cache[small.block_table.long()].flatten(1, 2)
                wanted = reference(small.q, rows, small.seq_lens.tolist(), SOFTMAX_SCALE)
                floor = batch * context * 1152 / 4.5e6
                triton = time_mla(in_triton, batch, heads, context)
                typer.echo(f"{heads} heads, B={batch}, T={context}: floor {floor:.1f} us, triton {triton:.1f} us")
                for launch in dict.fromkeys(launches(batch, heads, context)):

                    def call(one: Inputs, launch: CudaLaunch = launch) -> Tensor:
                        return run(one.q, one.cache, one.seq_lens, SOFTMAX_SCALE, one.block_table, launch)

                    try:
                        error = relative(call(small), wanted)
                        torch.cuda.synchronize()
                    except KernelError as failure:
                        typer.echo(f"  {launch}: {failure}")
                        continue
                    typer.echo(f"  {time_mla(call, batch, heads, context):7.1f} us  error {error:.1e}  {launch}")


if __name__ == "__main__":
    main()
