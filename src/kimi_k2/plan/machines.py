"""The machines that deployments name: peak rates, memory, and where each figure is from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kimi_k2.sharding.layout import Target


@dataclass(frozen=True)
class Machine:
    """Peak rates of one rank (a logical core), in SI units a second, and where they are from.

    Attributes:
        collective_latency: seconds of one small collective, assumed or as `source` says; no specification.
        collectives: measured seconds of all-reduces by bytes, ascending, in place of latency and links.
    """

    name: str
    bytes_per_second: float
    flops_per_second: float
    link_bytes_per_second: float
    collective_latency: float
    source: str
    collectives: tuple[tuple[int, float], ...] = ()

    def seconds_of(self, nbytes: float) -> float:
        """Of a collective, measured, linear between the sizes; beyond the largest in proportion."""
        (low, before), *others = self.collectives
        for high, after in others:
            if nbytes <= high:
                return before + (after - before) * max(nbytes - low, 0) / (high - low)
            low, before = high, after
        return before * max(nbytes / low, 1)


# AWS Neuron documentation, pages "Trn2 Architecture" and "Trainium2 Architecture": 16 chips, 46.4 TB/s of HBM and 10.7
# BF16 PFLOP/s an instance; NeuronLink 1.28 TB/s a chip. At LNC=2 an instance has 64 logical cores. The latency of a
# collective is our assumption.
TRN2_LNC2 = Machine(
    name="trn2.48xlarge, LNC=2, one of 64 logical cores",
    bytes_per_second=46.4e12 / 64,
    flops_per_second=10.7e15 / 64,
    link_bytes_per_second=1.28e12 / 4,
    collective_latency=15e-6,
    source="AWS Neuron documentation, Trn2 architecture (peak rates); collective latency assumed",
)


# The same documentation, "Trainium3 Architecture": 671 BF16 TFLOP/s, 4.9 TB/s of HBM and NeuronLink 2.56 TB/s a chip.
TRN3_LNC2 = Machine(
    name="a server of 16 Trainium3 chips, LNC=2, one of 64 logical cores",
    bytes_per_second=4.9e12 / 4,
    flops_per_second=671e12 / 4,
    link_bytes_per_second=2.56e12 / 4,
    collective_latency=15e-6,
    source="AWS Neuron documentation, Trainium3 architecture (peak rates); collective latency assumed",
)
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
        plan_only: why nothing here runs on it; empty of the others.
    """

    target: Target
    ranks: int
    machine: Machine
    memory: Memory
    plan_only: str = ""


# A bank is one of a chip's four HBM stacks. At LNC=2 one logical core has it to itself; at LNC=1 two share it.
TRN2_BANK = Memory(
    total=24 * GIB,
    usable=int(23.363 * GIB),
    source="AWS Neuron documentation: 96 GiB a chip, about 24 GiB a rank at LNC=2; 23.363 of it usable as reported in"
    " the README of the published Kimi-K2.5 port",
)
TRN3_BANK = Memory(
    total=36 * GIB,
    usable=int(36 * GIB * TRN2_BANK.usable / TRN2_BANK.total),
    source="AWS Neuron documentation: 144 GiB a Trainium3 chip; of it as much usable as was reported of a Trainium2",
)
# Of a GPU's memory, for the engine: vLLM's --gpu-memory-utilization as `kimi-k2 serve` sets it.
UTILIZATION = 0.95


def gpu_memory(total: int, source: str) -> Memory:
    """Of a GPU with so many bytes."""
    return Memory(total, int(UTILIZATION * total), f"{source}; {UTILIZATION:.0%} of it for the engine")


H100_MEMORY = gpu_memory(80 * 10**9, "NVIDIA H100 specification: 80 GB HBM3")
H200_MEMORY = gpu_memory(141 * 10**9, "NVIDIA H200 specification: 141 GB HBM3e")

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

B200 = replace(
    H200, name="one NVIDIA B200", bytes_per_second=8e12, flops_per_second=2.25e15, link_bytes_per_second=900e9,
    source="NVIDIA HGX B200 specification (peak rates); collectives as of four H200s",
)  # fmt: skip
GB300 = replace(
    B200, name="one GPU of an NVIDIA GB300 NVL72", flops_per_second=2.5e15,
    source=B200.source.replace("HGX B200", "GB300 NVL72"),
)  # fmt: skip
BLACKWELL = "our kernels are Hopper's; vLLM and SGLang serve there with their own"

INSTANCES = {
    "trn3": Instance(
        "neuron", 64, TRN3_LNC2, TRN3_BANK, "NxDI has no Trn3, and vllm-neuron's line was not run for it; plan only"
    ),
    "b200": Instance(
        "cuda", 8, B200, gpu_memory(180 * 10**9, "NVIDIA HGX B200 specification: 1.44 TB of 8"), BLACKWELL
    ),
    "gb300": Instance("cuda", 8, GB300, gpu_memory(20 * 10**12 // 72, "NVIDIA GB300 NVL72: 20 TB of 72"), BLACKWELL),
    "trn2.48xlarge": Instance("neuron", 64, TRN2_LNC2, TRN2_BANK),
    "h200": Instance("cuda", 8, H200, H200_MEMORY),
    "h100": Instance("cuda", 8, H100, H100_MEMORY),
}
