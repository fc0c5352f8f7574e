"""Wrong kernels: each is refused by an error that names the operation, the operand and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_emulator.errors import (
    CapacityError,
    DeadlockError,
    DtypeError,
    NkiError,
    OverwrittenError,
    PlaceError,
    RaceError,
    ShapeError,
    UnsupportedError,
    UnwrittenError,
)
from nki_emulator.tensor import NkiTensor

RELEASE = None  # kernels that show what the emulator takes

Body = Callable[[NkiTensor], object]
Case = tuple[Body, str, str, str, type[NkiError]]  # kernel, operation, operand, part of the rule, class


def sbuf(*shape: int, dtype: str = "float32", value: float = 1) -> NkiTensor:
    tile = nl.ndarray(shape, dtype=dtype)
    nisa.memset(tile, value)
    return tile


def psum(*shape: int, dtype: str = "float32", value: float | None = None) -> NkiTensor:
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.psum)
    if value is not None:
        nisa.memset(tile, value)
    return tile


def too_much_alive(_: NkiTensor) -> None:
    tiles = [sbuf(128, 16384) for _ in range(4)]
    for tile in tiles:
        nisa.tensor_copy(tile, tile)


def read_of_partly_written(_: NkiTensor) -> None:
    tile = nl.ndarray((64, 8), dtype=nl.float32)
    nisa.memset(tile[:, 0:7], 0)
    nisa.tensor_copy(sbuf(64, 8), tile)


def read_of_overwritten(_: NkiTensor) -> None:
    first = nl.ndarray((64, 8), dtype=nl.float32, address=(0, 0))
    nisa.memset(first, 0)
    second = nl.ndarray((64, 8), dtype=nl.float32, address=(0, 16))
    nisa.memset(second, 1)
    nisa.tensor_copy(sbuf(64, 8), first)


WRONG: dict[str, Case] = {
    "too_many_partitions": (lambda _: nl.ndarray((129, 4), dtype=nl.float32),
        "language.ndarray", "shape", "128 partitions", ShapeError),
    "tile_larger_than_sbuf": (lambda _: nl.ndarray((128, 224 * 1024 // 4 + 1), dtype=nl.float32),
        "language.ndarray", "shape", "229376 bytes", CapacityError),
    "tile_larger_than_psum": (lambda _: psum(128, 4097), "language.ndarray", "shape", "16384 bytes", CapacityError),
    "too_much_alive": (too_much_alive, "isa.memset", "sbuf", "alive at once", CapacityError),
    "address_beyond_sbuf": (lambda _: nl.ndarray((128, 64), dtype=nl.float32, address=(0, 224 * 1024 - 128)),
        "language.ndarray", "address", "229376 bytes", CapacityError),
    "address_not_aligned": (lambda _: nl.ndarray((128, 64), dtype=nl.float32, address=(0, 2)),
        "language.ndarray", "address", "multiple of 4", PlaceError),
    "one_dimension_on_chip": (lambda _: nl.ndarray((128,), dtype=nl.float32),
        "language.ndarray", "shape", "free dimension", ShapeError),
    "start_partition": (lambda _: nisa.tensor_copy(sbuf(16, 8), sbuf(128, 8)[16:32]),
        "isa.tensor_copy", "src", "multiple of 32", PlaceError),
    "partition_step": (lambda _: nisa.tensor_copy(sbuf(64, 8), sbuf(128, 8)[0:128:2]),
        "isa.tensor_copy", "src", "neighbouring partitions", ShapeError),
    "partition_step_of_a_pattern": (lambda _: sbuf(16, 32).ap(pattern=[[64, 8], [1, 32]], offset=0),
        "language.NkiTensor.ap", "pattern", "whole row", ShapeError),
    "pattern_beyond_the_tile": (
        lambda _: nisa.tensor_copy(sbuf(16, 8), sbuf(16, 32).ap(pattern=[[32, 16], [4, 8]], offset=8)),
        "isa.tensor_copy", "src", "within the tile", ShapeError),
    "partitions_differ": (lambda _: nisa.tensor_tensor(sbuf(64, 8), sbuf(64, 8), sbuf(32, 8), nl.add),
        "isa.tensor_tensor", "data2", "64 partitions", ShapeError),
    "elements_differ": (lambda _: nisa.activation(sbuf(64, 8), nl.exp, sbuf(64, 9)),
        "isa.activation", "data", "8 elements", ShapeError),
    "contraction_differs": (lambda _: nisa.nc_matmul(psum(8, 8), sbuf(64, 8), sbuf(128, 8)),
        "isa.nc_matmul", "moving", "64 partitions", ShapeError),
    "moving_too_wide": (lambda _: nisa.nc_matmul(psum(8, 513), sbuf(64, 8), sbuf(64, 513)),
        "isa.nc_matmul", "moving", "at most 512 columns", ShapeError),
    "stationary_too_wide": (lambda _: nisa.nc_matmul(psum(128, 8), sbuf(64, 130), sbuf(64, 8)),
        "isa.nc_matmul", "stationary", "at most 128 columns", ShapeError),
    "matmul_into_sbuf": (lambda _: nisa.nc_matmul(sbuf(8, 8), sbuf(64, 8), sbuf(64, 8)),
        "isa.nc_matmul", "dst", "in psum", PlaceError),
    "matmul_from_psum": (lambda _: nisa.nc_matmul(psum(8, 8), psum(64, 8), sbuf(64, 8)),
        "isa.nc_matmul", "stationary", "in sbuf", PlaceError),
    "matmul_into_bfloat16": (lambda _: nisa.nc_matmul(psum(8, 8, dtype="bfloat16"), sbuf(64, 8), sbuf(64, 8)),
        "isa.nc_matmul", "dst", "float32", DtypeError),
    "matmul_over_two_banks": (lambda _: nisa.nc_matmul(psum(8, 1024)[:, 300:700], sbuf(64, 8), sbuf(64, 400)),
        "isa.nc_matmul", "dst", "one PSUM bank", ShapeError),
    "matmul_of_mixed_widths": (lambda _: nisa.nc_matmul(psum(8, 8), sbuf(64, 8), sbuf(64, 8, dtype="bfloat16")),
        "isa.nc_matmul", "moving", "32 bits wide", DtypeError),
    "matmul_of_integers": (lambda _: nisa.nc_matmul(psum(8, 8), sbuf(64, 8, dtype="int32"), sbuf(64, 8)),
        "isa.nc_matmul", "stationary", "bfloat16", DtypeError),
    "no_ones_and_zeros": (
        lambda _: nisa.nc_matmul(psum(8, 8), sbuf(64, 8), sbuf(64, 8, value=2),
            is_stationary_onezero=True, is_moving_onezero=True),
        "isa.nc_matmul", "moving", "ones and zeros", NkiError),
    "double_row_of_bfloat16": (
        lambda _: nisa.nc_matmul(psum(8, 8), *[sbuf(64, 2, 8, dtype="bfloat16")] * 2,
            perf_mode=nisa.matmul_perf_mode.double_row),
        "isa.nc_matmul", "stationary", "float8_e4m3", DtypeError),
    "accumulate_onto_memset": (lambda _: nisa.nc_matmul(psum(8, 8, value=0), sbuf(64, 8), sbuf(64, 8), accumulate=True),
        "isa.nc_matmul", "dst", "undefined on Trainium2", NkiError),
    "accumulate_onto_nothing": (lambda _: nisa.nc_matmul(psum(8, 8), sbuf(64, 8), sbuf(64, 8), accumulate=True),
        "isa.nc_matmul", "dst", "accumulate=False", UnwrittenError),
    "two_inputs_in_psum": (
        lambda _: nisa.tensor_tensor(sbuf(64, 8), psum(64, 8, value=0), psum(64, 8, value=0), nl.add),
        "isa.tensor_tensor", "data2", "both lie in PSUM", PlaceError),
    "gpsimd_reads_psum": (lambda _: nisa.tensor_copy(sbuf(64, 8), psum(64, 8, value=0), engine=nisa.engine.gpsimd),
        "isa.tensor_copy", "src", "in sbuf", PlaceError),
    "dma_from_psum": (lambda out: nisa.dma_copy(out[0:64, 0:8], psum(64, 8, value=0)),
        "isa.dma_copy", "src", "does not reach PSUM", PlaceError),
    "dma_of_other_size": (lambda out: nisa.dma_copy(out[0:64, 0:8], sbuf(64, 4)),
        "isa.dma_copy", "src", "512 elements", ShapeError),
    "compute_on_hbm": (lambda out: nisa.tensor_copy(sbuf(64, 8), out[0:64, 0:8]),
        "isa.tensor_copy", "src", "in sbuf or psum", PlaceError),
    "gather_out_of_bounds": (
        lambda out: nisa.dma_copy(sbuf(4, 64),
            out.ap([[64, 4], [1, 64]], vector_offset=sbuf(4, 1, dtype="int32", value=200), indirect_dim=0)),
        "isa.dma_copy", "src", "indices of 0 to 127", ShapeError),
    "select_out_of_bounds": (
        lambda out: nisa.dma_copy(sbuf(1, 64), out.select(0, sbuf(1, 1, dtype="int32", value=128))),
        "isa.dma_copy", "src", "an index below 128", ShapeError),
    "floats_into_integers": (lambda _: nisa.memset(sbuf(64, 8, dtype="int32"), 2.0),
        "isa.memset", "value", "a whole number", DtypeError),
    "dma_by_hardware_of_other_dtype": (
        lambda out: nisa.dma_copy(sbuf(128, 64, dtype="int32"), out, dge_mode=nisa.dge_mode.hwdge),
        "isa.dma_copy", "src", "dtype int32 of dst", DtypeError),
    "bitwise_on_floats": (lambda _: nisa.tensor_tensor(*[sbuf(64, 8)] * 3, nl.bitwise_and),
        "isa.tensor_tensor", "dst", "integer dtype", DtypeError),
    "mixed_operator_classes": (
        lambda _: nisa.tensor_scalar(*[sbuf(64, 8, dtype="int32")] * 2, nl.bitwise_and, 1, op1=nl.add, operand1=1.0),
        "isa.tensor_scalar", "op1", "bitvec or arithmetic", NkiError),
    "vector_operand_too_long": (lambda _: nisa.tensor_scalar(sbuf(64, 8), sbuf(64, 8), nl.add, sbuf(64, 2)),
        "isa.tensor_scalar", "operand0", "(64, 1)", ShapeError),
    "scale_of_bfloat16": (
        lambda _: nisa.activation(sbuf(64, 8), nl.exp, sbuf(64, 8), scale=sbuf(64, 1, dtype="bfloat16")),
        "isa.activation", "scale", "float32", DtypeError),
    "activation_that_is_none": (lambda _: nisa.activation(sbuf(64, 8), nl.add, sbuf(64, 8)),
        "isa.activation", "op", "activation function", NkiError),
    "sine_beyond_pi": (lambda _: nisa.activation(sbuf(64, 8), nl.sin, sbuf(64, 8, value=9)),
        "isa.activation", "data", "within [-3.142, 3.142]", NkiError),
    "reduce_the_partition": (lambda _: nisa.tensor_reduce(sbuf(1, 8), nl.add, sbuf(64, 8), axis=0),
        "isa.tensor_reduce", "axis", "last free dimensions", ShapeError),
    "reduce_a_middle_axis": (lambda _: nisa.tensor_reduce(sbuf(64, 4), nl.add, sbuf(64, 8, 4), axis=1),
        "isa.tensor_reduce", "axis", "last free dimensions", ShapeError),
    "transpose_too_large": (lambda _: nisa.nc_transpose(psum(128, 128), sbuf(128, 130)),
        "isa.nc_transpose", "data", "128 x 128", ShapeError),
    "transpose_on_vector_too_large": (
        lambda _: nisa.nc_transpose(sbuf(64, 64), sbuf(64, 64), engine=nisa.engine.vector),
        "isa.nc_transpose", "data", "32 x 32", ShapeError),
    "search_in_too_few": (lambda _: nisa.max8(sbuf(64, 8), sbuf(64, 7)), "isa.max8", "src", "8 to 16384", ShapeError),
    "bn_stats_too_wide": (lambda _: nisa.bn_stats(sbuf(64, 6), sbuf(64, 513)),
        "isa.bn_stats", "data", "at most 512", ShapeError),
    "shuffle_mask_too_short": (lambda _: nisa.nc_stream_shuffle(sbuf(32, 8), sbuf(32, 8), [0] * 31),
        "isa.nc_stream_shuffle", "shuffle_mask", "32 elements", ShapeError),
    "read_of_unwritten": (lambda _: nisa.tensor_copy(sbuf(64, 8), nl.ndarray((64, 8), dtype=nl.float32)),
        "isa.tensor_copy", "src", "written before it is read", UnwrittenError),
    "read_of_partly_written": (read_of_partly_written,
        "isa.tensor_copy", "src", "written before it is read", UnwrittenError),
    "read_of_overwritten": (read_of_overwritten, "isa.tensor_copy", "src", "overwritten", OverwrittenError),
    "barrier_on_one_core": (lambda out: nisa.core_barrier(out, (0, 1)), "isa.core_barrier", "cores", "LNC=2", NkiError),
    "instruction_of_trainium3": (lambda _: nisa.quantize_mx(sbuf(64, 8), sbuf(64, 8), sbuf(64, 8)),
        "isa.quantize_mx", "operation", "Trainium2", UnsupportedError),
    "register_without_a_value": (lambda _: nl.fori_loop(0, nisa.register_alloc(), print),
        "isa.VirtualRegister", "register", "written before", UnwrittenError),
}  # fmt: skip


def refused(case: Case, cores: int = 1) -> NkiError:
    """The error of a kernel, checked; `cores` that run it."""
    body, operation, operand, rule, kind = case
    with pytest.raises(NkiError) as caught:
        nki.jit(body)[cores](np.zeros((128, 64), np.float32))
    error = caught.value
    assert (error.operation, error.operand) == (f"nki.{operation}", operand)
    assert rule in error.rule
    assert type(error) is kind
    return error


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_is_named(name: str) -> None:
    error = refused(WRONG[name])
    assert str(error).startswith(f"{error.operation}: {error.operand}: ")


# Two cores (LNC=2).


def both_write(out: NkiTensor) -> None:
    tile = sbuf(128, 64)
    nisa.memset(tile, nl.program_id())
    nisa.dma_copy(out, tile)


def read_before_the_barrier(out: NkiTensor) -> None:
    core = nl.program_id()
    if core == 0:
        nisa.dma_copy(out, sbuf(128, 64))
    else:
        nl.load(out)
    nisa.core_barrier(out, (0, 1))


def barrier_over_another_tensor(out: NkiTensor) -> None:
    other = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        nisa.dma_copy(out, sbuf(128, 64))
    nisa.core_barrier(other, (0, 1))
    if nl.program_id() == 1:
        nl.load(out)


def only_one_sends(out: NkiTensor) -> None:
    tile = sbuf(128, 64)
    if nl.program_id() == 0:
        nisa.sendrecv(tile, tile, 1, 1, 0)


def shared_of_other_shape(out: NkiTensor) -> None:
    nl.ndarray((128, 64 + nl.program_id()), dtype=nl.float32, buffer=nl.shared_hbm)


WRONG_PAIRS: dict[str, Case] = {
    "both_write": (both_write, "isa.dma_copy", "dst", "core_barrier", RaceError),
    "read_before_the_barrier": (read_before_the_barrier, "isa.dma_copy", "src", "core_barrier", RaceError),
    "barrier_over_another_tensor": (barrier_over_another_tensor, "isa.dma_copy", "src", "core_barrier", RaceError),
    "only_one_sends": (only_one_sends, "isa.sendrecv", "core", "comes to the same sendrecv", DeadlockError),
    "shared_of_other_shape": (shared_of_other_shape, "language.ndarray()", "shape", "as on the other core", ShapeError),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_wrong_pair_of_cores_is_named(name: str) -> None:
    refused(WRONG_PAIRS[name], cores=2)


def test_python_may_not_branch_on_a_register() -> None:
    def kernel(out: NkiTensor) -> None:
        register: Any = nisa.register_alloc(1)
        if register:
            nisa.dma_copy(out, out)

    with pytest.raises(TypeError, match=r"nl\.fori_loop or nl\.while_loop"):
        nki.jit(kernel)(np.zeros((128, 64), np.float32))


def test_a_result_with_holes_is_refused() -> None:
    def kernel(data: NkiTensor) -> NkiTensor:
        out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out[0:64], data[0:64])
        return out

    with pytest.raises(UnwrittenError, match=r"every element of a result is written.*50.0% written"):
        nki.jit(kernel)(np.zeros((128, 64), np.float32))
