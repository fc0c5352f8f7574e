"""Constants of `nki.isa`: enumerations under NKI's names."""

from __future__ import annotations

from enum import Enum, IntEnum

# Engines of a NeuronCore.
engine = Enum("engine", "unknown tensor scalar gpsimd dma vector sync", start=0)
# What an instruction does with its engine's accumulators.
reduce_cmd = Enum("reduce_cmd", "idle reset reduce reset_reduce load_reduce", start=0)
# Who generates DMA descriptors.
dge_mode = Enum("dge_mode", "unknown swdge hwdge none", start=0)
# What an index out of bounds does.
oob_mode = Enum("oob_mode", "error skip", start=0)
matmul_perf_mode = Enum("matmul_perf_mode", {"none": "none", "double_row": "double_row"})
# Generation of NeuronCore.
nc_version = IntEnum("nc_version", {"gen2": 2, "gen3": 3, "gen4": 4})
# Which DMA engines `sendrecv` uses.
dma_engine = Enum("dma_engine", "dma gpsimd_dma")

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown
