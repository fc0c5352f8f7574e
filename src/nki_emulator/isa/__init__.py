"""`nki.isa`: instructions of NeuronCore-v3, one function each.

Contract: aws-neuron-sdk `nki/api/nki/isa/__init__.py` (NKI 0.7.0). Rules that it states are enforced, with the
operation, operand and rule in the error.
"""

from __future__ import annotations

from typing import Any

from nki_emulator.errors import NkiError as NkiValidationError
from nki_emulator.errors import UnsupportedError
from nki_emulator.isa.constants import (
    dge_mode,
    dma_engine,
    engine,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from nki_emulator.isa.copies import iota, memset, tensor_copy, tensor_copy_predicated
from nki_emulator.isa.cores import (
    core_barrier,
    get_nc_sub_version,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
    sendrecv,
)
from nki_emulator.isa.dma import dma_compute, dma_copy, dma_transpose
from nki_emulator.isa.elementwise import (
    activation,
    activation_reduce,
    affine_select,
    range_select,
    reciprocal,
    scalar_tensor_tensor,
    select_reduce,
    tensor_scalar,
    tensor_tensor,
)
from nki_emulator.isa.gathers import (
    local_gather,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_n_gather,
    nc_stream_shuffle,
    nonzero_with_count,
    sequence_bounds,
    topk,
)
from nki_emulator.isa.matmul import nc_matmul, nc_transpose
from nki_emulator.isa.reductions import (
    bn_aggr,
    bn_stats,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from nki_emulator.registers import VirtualRegister

# Of NeuronCore-v4 (Trainium3), or of random numbers.
ABSENT = (
    "activate2",
    "dropout",
    "exponential",
    "nc_matmul_mx",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "rng",
    "set_rng_seed",
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    where = "of Trainium3 or of random numbers" if name in ABSENT else "unknown"
    raise UnsupportedError(f"nki.isa.{name}", "operation", "one of Trainium2 that the emulator has (README.md)", where)


__all__ = [
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]
