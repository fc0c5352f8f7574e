"""Wrong kernels: each is refused by an error that names the operation, the operand and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_emulator import errors
from nki_emulator.tensor import NkiTensor

RELEASE = None  # kernels that show what the emulator takes

Body = Callable[[NkiTensor], None]


def sbuf(*shape: int, dtype: str = "float32") -> NkiTensor:
    made = nl.ndarray(shape, dtype=dtype)
    nisa.memset(made, 1)
    return made


def psum(*shape: int, dtype: str = "float32") -> NkiTensor:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def too_many_partitions(_: NkiTensor) -> None:
    nl.ndarray((129, 4), dtype=nl.float32)


def tile_larger_than_sbuf(_: NkiTensor) -> None:
    nl.ndarray((128, 224 * 1024 // 4 + 1), dtype=nl.float32)


def tile_larger_than_psum(_: NkiTensor) -> None:
    psum(128, 4097)


def too_much_alive(_: NkiTensor) -> None:
    tiles = [sbuf(128, 16384) for _ in range(4)]
    for tile in tiles:
        nisa.tensor_copy(tile, tile)


def address_beyond_sbuf(_: NkiTensor) -> None:
    nl.ndarray((128, 64), dtype=nl.float32, address=(0, 224 * 1024 - 128))


def address_not_aligned(_: NkiTensor) -> None:
    nl.ndarray((128, 64), dtype=nl.float32, address=(0, 2))


def one_dimension_on_chip(_: NkiTensor) -> None:
    nl.ndarray((128,), dtype=nl.float32)


def start_partition(_: NkiTensor) -> None:
    nisa.tensor_copy(sbuf(16, 8), sbuf(128, 8)[16:32])


def partition_step(_: NkiTensor) -> None:
    nisa.tensor_copy(sbuf(64, 8), sbuf(128, 8)[0:128:2])


def partition_step_of_a_pattern(_: NkiTensor) -> None:
    sbuf(16, 32).ap(pattern=[[64, 8], [1, 32]], offset=0)


def pattern_beyond_the_tile(_: NkiTensor) -> None:
    nisa.tensor_copy(sbuf(16, 8), sbuf(16, 32).ap(pattern=[[32, 16], [4, 8]], offset=8))


def partitions_differ(_: NkiTensor) -> None:
    nisa.tensor_tensor(sbuf(64, 8), sbuf(64, 8), sbuf(32, 8), nl.add)


def elements_differ(_: NkiTensor) -> None:
    nisa.activation(sbuf(64, 8), nl.exp, sbuf(64, 9))


def contraction_differs(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(8, 8), sbuf(64, 8), sbuf(128, 8))


def moving_too_wide(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(8, 513), sbuf(64, 8), sbuf(64, 513))


def stationary_too_wide(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(128, 8), sbuf(64, 130), sbuf(64, 8))


def matmul_into_sbuf(_: NkiTensor) -> None:
    nisa.nc_matmul(sbuf(8, 8), sbuf(64, 8), sbuf(64, 8))


def matmul_from_psum(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(8, 8), psum(64, 8), sbuf(64, 8))


def matmul_into_bfloat16(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(8, 8, dtype="bfloat16"), sbuf(64, 8), sbuf(64, 8))


def matmul_over_two_banks(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(8, 1024)[:, 300:700], sbuf(64, 8), sbuf(64, 400))


def matmul_of_mixed_widths(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(8, 8), sbuf(64, 8), sbuf(64, 8, dtype="bfloat16"))


def matmul_of_integers(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(8, 8), sbuf(64, 8, dtype="int32"), sbuf(64, 8))


def no_ones_and_zeros(_: NkiTensor) -> None:
    tile = sbuf(64, 8)
    nisa.memset(tile[:, 3:4], 2.0)
    nisa.nc_matmul(psum(8, 8), sbuf(64, 8), tile, is_stationary_onezero=True, is_moving_onezero=True)


def double_row_of_bfloat16(_: NkiTensor) -> None:
    tile = sbuf(64, 2, 8, dtype="bfloat16")
    nisa.nc_matmul(psum(8, 8), tile, tile, perf_mode=nisa.matmul_perf_mode.double_row)


def accumulate_onto_memset(_: NkiTensor) -> None:
    total = psum(8, 8)
    nisa.memset(total, 0)
    nisa.nc_matmul(total, sbuf(64, 8), sbuf(64, 8), accumulate=True)


def accumulate_onto_nothing(_: NkiTensor) -> None:
    nisa.nc_matmul(psum(8, 8), sbuf(64, 8), sbuf(64, 8), accumulate=True)


def two_inputs_in_psum(_: NkiTensor) -> None:
    left, right = psum(64, 8), psum(64, 8)
    for tile in (left, right):
        nisa.memset(tile, 0)
    nisa.tensor_tensor(sbuf(64, 8), left, right, nl.add)


def gpsimd_reads_psum(_: NkiTensor) -> None:
    tile = psum(64, 8)
    nisa.memset(tile, 0)
    nisa.tensor_copy(sbuf(64, 8), tile, engine=nisa.engine.gpsimd)


def dma_from_psum(out: NkiTensor) -> None:
    tile = psum(64, 8)
    nisa.memset(tile, 0)
    nisa.dma_copy(out[0:64, 0:8], tile)


def dma_of_other_size(out: NkiTensor) -> None:
    nisa.dma_copy(out[0:64, 0:8], sbuf(64, 4))


def compute_on_hbm(out: NkiTensor) -> None:
    nisa.tensor_copy(sbuf(64, 8), out[0:64, 0:8])


def gather_out_of_bounds(out: NkiTensor) -> None:
    index = sbuf(4, 1, dtype="int32")
    nisa.memset(index, 200)
    nisa.dma_copy(sbuf(4, 64), out.ap([[64, 4], [1, 64]], vector_offset=index, indirect_dim=0))


def select_out_of_bounds(out: NkiTensor) -> None:
    index = sbuf(1, 1, dtype="int32")
    nisa.memset(index, 128)
    nisa.dma_copy(sbuf(1, 64), out.select(0, index))


def bitwise_on_floats(_: NkiTensor) -> None:
    tile = sbuf(64, 8)
    nisa.tensor_tensor(tile, tile, tile, nl.bitwise_and)


def mixed_operator_classes(_: NkiTensor) -> None:
    tile = sbuf(64, 8, dtype="int32")
    nisa.tensor_scalar(tile, tile, nl.bitwise_and, 1, op1=nl.add, operand1=1.0)


def vector_operand_too_long(_: NkiTensor) -> None:
    tile = sbuf(64, 8)
    nisa.tensor_scalar(tile, tile, nl.add, sbuf(64, 2))


def scale_of_bfloat16(_: NkiTensor) -> None:
    tile = sbuf(64, 8)
    nisa.activation(tile, nl.exp, tile, scale=sbuf(64, 1, dtype="bfloat16"))


def activation_that_is_none(_: NkiTensor) -> None:
    tile = sbuf(64, 8)
    nisa.activation(tile, nl.add, tile)


def sine_beyond_pi(_: NkiTensor) -> None:
    tile = sbuf(64, 8)
    nisa.memset(tile, 9.0)
    nisa.activation(tile, nl.sin, tile)


def reduce_the_partition(_: NkiTensor) -> None:
    nisa.tensor_reduce(sbuf(1, 8), nl.add, sbuf(64, 8), axis=0)


def reduce_a_middle_axis(_: NkiTensor) -> None:
    nisa.tensor_reduce(sbuf(64, 4), nl.add, sbuf(64, 8, 4), axis=1)


def transpose_too_large(_: NkiTensor) -> None:
    nisa.nc_transpose(psum(128, 128), sbuf(128, 130))


def transpose_on_vector_too_large(_: NkiTensor) -> None:
    nisa.nc_transpose(sbuf(64, 64), sbuf(64, 64), engine=nisa.engine.vector)


def search_in_too_few(_: NkiTensor) -> None:
    nisa.max8(sbuf(64, 8), sbuf(64, 7))


def bn_stats_too_wide(_: NkiTensor) -> None:
    nisa.bn_stats(sbuf(64, 6), sbuf(64, 513))


def shuffle_mask_too_short(_: NkiTensor) -> None:
    nisa.nc_stream_shuffle(sbuf(32, 8), sbuf(32, 8), [0] * 31)


def read_of_unwritten(_: NkiTensor) -> None:
    nisa.tensor_copy(sbuf(64, 8), nl.ndarray((64, 8), dtype=nl.float32))


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


def barrier_on_one_core(out: NkiTensor) -> None:
    nisa.core_barrier(out, (0, 1))


def instruction_of_trainium3(_: NkiTensor) -> None:
    nisa.quantize_mx(sbuf(64, 8), sbuf(64, 8), sbuf(64, 8))


def register_without_a_value(_: NkiTensor) -> None:
    nisa.register_store(sbuf(1, 1, dtype="int32"), nisa.register_alloc())


# kernel: (operation, operand, part of the rule, class)
WRONG: dict[Body, tuple[str, str, str, type[errors.NkiError]]] = {
    too_many_partitions: ("nki.language.ndarray", "shape", "128 partitions", errors.ShapeError),
    tile_larger_than_sbuf: ("nki.language.ndarray", "shape", "229376 bytes", errors.CapacityError),
    tile_larger_than_psum: ("nki.language.ndarray", "shape", "16384 bytes", errors.CapacityError),
    too_much_alive: ("nki.isa.memset", "sbuf", "alive at once", errors.CapacityError),
    address_beyond_sbuf: ("nki.language.ndarray", "address", "229376 bytes", errors.CapacityError),
    address_not_aligned: ("nki.language.ndarray", "address", "multiple of 4", errors.PlaceError),
    one_dimension_on_chip: ("nki.language.ndarray", "shape", "free dimension", errors.ShapeError),
    start_partition: ("nki.isa.tensor_copy", "src", "multiple of 32", errors.PlaceError),
    partition_step: ("nki.isa.tensor_copy", "src", "neighbouring partitions", errors.ShapeError),
    partition_step_of_a_pattern: ("nki.language.NkiTensor.ap", "pattern", "whole row", errors.ShapeError),
    pattern_beyond_the_tile: ("nki.isa.tensor_copy", "src", "within the tile", errors.ShapeError),
    partitions_differ: ("nki.isa.tensor_tensor", "data2", "64 partitions", errors.ShapeError),
    elements_differ: ("nki.isa.activation", "data", "8 elements", errors.ShapeError),
    contraction_differs: ("nki.isa.nc_matmul", "moving", "64 partitions", errors.ShapeError),
    moving_too_wide: ("nki.isa.nc_matmul", "moving", "at most 512 columns", errors.ShapeError),
    stationary_too_wide: ("nki.isa.nc_matmul", "stationary", "at most 128 columns", errors.ShapeError),
    matmul_into_sbuf: ("nki.isa.nc_matmul", "dst", "in psum", errors.PlaceError),
    matmul_from_psum: ("nki.isa.nc_matmul", "stationary", "in sbuf", errors.PlaceError),
    matmul_into_bfloat16: ("nki.isa.nc_matmul", "dst", "float32", errors.DtypeError),
    matmul_over_two_banks: ("nki.isa.nc_matmul", "dst", "one PSUM bank", errors.ShapeError),
    matmul_of_mixed_widths: ("nki.isa.nc_matmul", "moving", "32 bits wide", errors.DtypeError),
    matmul_of_integers: ("nki.isa.nc_matmul", "stationary", "bfloat16", errors.DtypeError),
    no_ones_and_zeros: ("nki.isa.nc_matmul", "moving", "ones and zeros", errors.NkiError),
    double_row_of_bfloat16: ("nki.isa.nc_matmul", "stationary", "float8_e4m3", errors.DtypeError),
    accumulate_onto_memset: ("nki.isa.nc_matmul", "dst", "undefined on Trainium2", errors.NkiError),
    accumulate_onto_nothing: ("nki.isa.nc_matmul", "dst", "accumulate=False", errors.UnwrittenError),
    two_inputs_in_psum: ("nki.isa.tensor_tensor", "data2", "both lie in PSUM", errors.PlaceError),
    gpsimd_reads_psum: ("nki.isa.tensor_copy", "src", "in sbuf", errors.PlaceError),
    dma_from_psum: ("nki.isa.dma_copy", "src", "does not reach PSUM", errors.PlaceError),
    dma_of_other_size: ("nki.isa.dma_copy", "src", "512 elements", errors.ShapeError),
    compute_on_hbm: ("nki.isa.tensor_copy", "src", "in sbuf or psum", errors.PlaceError),
    gather_out_of_bounds: ("nki.isa.dma_copy", "src", "indices of 0 to 127", errors.ShapeError),
    select_out_of_bounds: ("nki.isa.dma_copy", "src", "an index below 128", errors.ShapeError),
    bitwise_on_floats: ("nki.isa.tensor_tensor", "dst", "integer dtype", errors.DtypeError),
    mixed_operator_classes: ("nki.isa.tensor_scalar", "op1", "bitvec or arithmetic", errors.NkiError),
    vector_operand_too_long: ("nki.isa.tensor_scalar", "operand0", "(64, 1)", errors.ShapeError),
    scale_of_bfloat16: ("nki.isa.activation", "scale", "float32", errors.DtypeError),
    activation_that_is_none: ("nki.isa.activation", "op", "activation function", errors.NkiError),
    sine_beyond_pi: ("nki.isa.activation", "data", "within [-3.142, 3.142]", errors.NkiError),
    reduce_the_partition: ("nki.isa.tensor_reduce", "axis", "last free dimensions", errors.ShapeError),
    reduce_a_middle_axis: ("nki.isa.tensor_reduce", "axis", "last free dimensions", errors.ShapeError),
    transpose_too_large: ("nki.isa.nc_transpose", "data", "128 x 128", errors.ShapeError),
    transpose_on_vector_too_large: ("nki.isa.nc_transpose", "data", "32 x 32", errors.ShapeError),
    search_in_too_few: ("nki.isa.max8", "src", "8 to 16384", errors.ShapeError),
    bn_stats_too_wide: ("nki.isa.bn_stats", "data", "at most 512", errors.ShapeError),
    shuffle_mask_too_short: ("nki.isa.nc_stream_shuffle", "shuffle_mask", "32 elements", errors.ShapeError),
    read_of_unwritten: ("nki.isa.tensor_copy", "src", "written before it is read", errors.UnwrittenError),
    read_of_partly_written: ("nki.isa.tensor_copy", "src", "written before it is read", errors.UnwrittenError),
    read_of_overwritten: ("nki.isa.tensor_copy", "src", "overwritten", errors.OverwrittenError),
    barrier_on_one_core: ("nki.isa.core_barrier", "cores", "LNC=2", errors.NkiError),
    instruction_of_trainium3: ("nki.isa.quantize_mx", "operation", "Trainium2", errors.UnsupportedError),
    register_without_a_value: ("nki.isa.VirtualRegister", "register", "written before", errors.UnwrittenError),
}


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.__name__)
def test_wrong_kernel_is_named(body: Body) -> None:
    operation, operand, rule, kind = WRONG[body]
    with pytest.raises(errors.NkiError) as caught:
        nki.jit(body)(np.zeros((128, 64), np.float32))
    error = caught.value
    assert (error.operation, error.operand) == (operation, operand)
    assert rule in error.rule
    assert type(error) is kind
    assert str(error).startswith(f"{operation}: {operand}: ")


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


WRONG_PAIRS: dict[Body, tuple[str, str, str, type[errors.NkiError]]] = {
    both_write: ("nki.isa.dma_copy", "dst", "core_barrier", errors.RaceError),
    read_before_the_barrier: ("nki.isa.dma_copy", "src", "core_barrier", errors.RaceError),
    barrier_over_another_tensor: ("nki.isa.dma_copy", "src", "core_barrier", errors.RaceError),
    only_one_sends: ("nki.isa.sendrecv", "core", "comes to the same sendrecv", errors.DeadlockError),
    shared_of_other_shape: ("nki.language.ndarray()", "shape", "as on the other core", errors.ShapeError),
}


@pytest.mark.parametrize("body", WRONG_PAIRS, ids=lambda body: body.__name__)
def test_wrong_pair_of_cores_is_named(body: Body) -> None:
    operation, operand, rule, kind = WRONG_PAIRS[body]
    with pytest.raises(errors.NkiError) as caught:
        nki.jit(body)[2](np.zeros((128, 64), np.float32))
    assert (caught.value.operation, caught.value.operand) == (operation, operand)
    assert rule in caught.value.rule
    assert type(caught.value) is kind


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

    with pytest.raises(errors.UnwrittenError, match=r"every element of a result is written.*50.0% written"):
        nki.jit(kernel)(np.zeros((128, 64), np.float32))
