"""The machines that a deployment can name: ranks, memory and peak rates, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kimi_k2.plan.roofline import TRN2_LNC2, Machine
from kimi_k2.sharding.layout import Target

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """One rank's memory in bytes.

    Attributes:
        total: what the device has.
        usable: what programs were seen to get of it.
        source: of both figures.
    """

    total: int
    usable: int
    source: str


@dataclass(frozen=True)
class Instance:
    """One host.

    Attributes:
        target: whose names and layouts the weights have.
        ranks: at most; logical cores at LNC=2, or GPUs.
        machine, memory: of one rank.
    """

    target: Target
    ranks: int
    machine: Machine
    memory: Memory


# A bank is one of a chip's four HBM stacks. At LNC=2 one logical core has it to itself; at LNC=1 two share it.
TRN2_BANK = Memory(
    total=24 * GIB,
    usable=int(23.363 * GIB),
    source="AWS Neuron documentation: 96 GiB a chip, about 24 GiB a rank at LNC=2; 23.363 of it usable as reported in"
    " the README of the published Kimi-K2.5 port",
)
H100_MEMORY = Memory(total=80 * 10**9, usable=80 * 10**9, source="NVIDIA H100 specification: 80 GB HBM3")
H200_MEMORY = Memory(total=141 * 10**9, usable=141 * 10**9, source="NVIDIA H200 specification: 141 GB HBM3e")

# Peak rates of NVIDIA's H200 SXM specification: 4.8 TB/s, 989 BF16 TFLOP/s dense, NVLink 900 GB/s both ways together.
H200 = Machine(
    name="one NVIDIA H200 SXM",
    bytes_per_second=4.8e12,
    flops_per_second=989e12,
    link_bytes_per_second=450e9,
    collective_latency=2.5e-6,
    source="NVIDIA H200 specification (peak rates); a sum of a token over four H200s measured (docs/measurements.md)",
)
H100 = replace(
    H200, name="one NVIDIA H100 SXM", bytes_per_second=3.35e12, source=H200.source.replace("H200 spec", "H100 spec")
)

INSTANCES = {
    "trn2.48xlarge": Instance("neuron", 64, TRN2_LNC2, TRN2_BANK),
    "h200": Instance("cuda", 8, H200, H200_MEMORY),
    "h100": Instance("cuda", 8, H100, H100_MEMORY),
}
