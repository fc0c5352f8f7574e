"""`nki.isa`: meetings of the two cores of LNC=2, registers, and which core this is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_emulator.access import Call
from nki_emulator.errors import NkiError, PlaceError
from nki_emulator.isa.constants import dma_engine as dma_engines
from nki_emulator.isa.constants import engine as engines
from nki_emulator.isa.constants import nc_version
from nki_emulator.isa.operands import instruction
from nki_emulator.registers import VirtualRegister
from nki_emulator.storage import Region
from nki_emulator.tensor import NkiTensor


@instruction("dma", like=("src", "dst"))
def sendrecv(
    call: Call,
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: Any = dma_engines.dma,
) -> None:
    """Exchange tiles with the other core."""
    for operand, tensor in (("src", src), ("dst", dst)):
        call.need_region(operand, tensor, Region.sbuf)
    call.need(src.shape[0] == dst.shape[0] and src.size == dst.size, "dst", f"shape {src.shape} of src", dst.shape)
    other = 1 - call.core.number
    if call.core.launch.cores != 2 or send_to_rank != other or recv_from_rank != other:
        raise call.fail("send_to_rank", f"the other core of LNC=2 ({other})", send_to_rank, NkiError)
    if dma_engine is dma_engines.gpsimd_dma:
        limit = {4: 1024, 2: 512, 1: 256}[src.itemsize]
        call.need(src.free_size * src.itemsize <= limit, "src", f"at most {limit} bytes a partition", src.shape)
    sent = np.array(call.read("src", src))
    received, _ = call.core.launch.meet(("sendrecv", pipe_id), sent)
    if received.dtype != sent.dtype or received.size != dst.size:
        raise call.fail("dst", "what the other core sends", f"{received.shape} {received.dtype}")
    call.write("dst", dst, received.reshape(dst.shape))


@instruction("sync", tiles=())
def core_barrier(call: Call, data: NkiTensor, cores: Sequence[int], engine: Any = engines.gpsimd) -> None:
    """Wait for the other core; orders accesses to `data`'s storage, and to no other."""
    if tuple(cores) != (0, 1):
        raise call.fail("cores", "(0, 1)", cores, NkiError)
    if call.core.launch.cores != 2:
        raise call.fail("cores", "LNC=2", call.core.launch.cores, NkiError)
    storages = []
    for tensor in data if isinstance(data, list | tuple) else (data,):
        if tensor.buffer is not Region.shared_hbm:
            raise call.fail("data", "in shared HBM", tensor.buffer.value, PlaceError)
        storages.append(tensor.storage)
    numbers = tuple(storage.number for storage in storages)
    other, last = call.core.launch.meet(("core_barrier",), numbers)
    if other != numbers:
        raise call.fail("data", "the tensor that the other core names", data, NkiError)
    if last:  # the first to come still waits: nothing has happened since
        for storage in storages:
            storage.touched.clear()


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A register, optionally with a value."""
    return VirtualRegister(x)


@instruction("sync", tiles=())
def register_load(call: Call, dst: VirtualRegister, src: NkiTensor) -> None:
    """Set a register from one element in memory."""
    call.need(src.size == 1, "src", "one element", src.shape)
    dst.value = int(call.read("src", src).reshape(-1)[0])


def get_nc_version() -> nc_version:
    """NeuronCore-v3: Trainium2."""
    return nc_version.gen3
