"""Throughput and memory of conversion beside a plain copy and the straightforward method, in one run.

Rates are bytes of input a second. Each measurement is its own process: VmHWM is its memory, its processor time that
of all its threads. `slices` is the least that any conversion does. The straightforward
method loads a whole shard, dequantizes and requantizes expert after expert, stacks them and saves every rank's cut; it
is run on the second shard only (one MoE layer).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kimi_k2.bench.backend import peak_resident
from kimi_k2.bench.errors import SweepError
from kimi_k2.checkpoint.index import CheckpointIndex
from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import WEIGHTS, rank_file_name
from kimi_k2.sharding.presharder import Presharder


def straightforward(source: Path, work: Path, tp: int, ep: int) -> None:
    """The usual conversion of one shard to per-channel FP8, all in memory; flushed to the disk as ours is."""
    config = KimiK2Config.from_pretrained(source)
    state = load_file(source / CheckpointIndex.open(source).shards[1])
    layer = next(name.split(".")[2] for name in state if ".experts." in name)
    count = config.n_routed_experts
    root = f"model.layers.{layer}.mlp.experts"

    def quantized(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        scale = state[f"{name}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        plain = (state[f"{name}.weight"].float() * scale).T
        scale = plain.abs().amax(dim=0, keepdim=True).clamp(min=1e-12) / 240
        return (plain / scale).to(torch.float8_e4m3fn), scale

    stacked: dict[str, list[torch.Tensor]] = {}
    for expert in range(count):
        gate, up, down = (quantized(f"{root}.{expert}.{name}") for name in ("gate_proj", "up_proj", "down_proj"))
        for place, suffix in enumerate(("weight", "scale")):
            pair = torch.cat([gate[place].float(), up[place].float()], dim=1).to(gate[place].dtype)
            stacked.setdefault(f"gate_up_proj.{suffix}", []).append(pair)
            stacked.setdefault(f"down_proj.{suffix}", []).append(down[place])
    whole = {name: torch.stack(parts) for name, parts in stacked.items()}
    for rank in range(tp * ep):
        rank_experts = slice(rank // tp * count // ep, (rank // tp + 1) * count // ep)
        own = {}
        for name, tensor in whole.items():
            bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            mine = bits[rank_experts]
            if name.startswith("gate_up"):
                halves = [half.chunk(tp, dim=2)[rank % tp] for half in mine.chunk(2, dim=2)]
                mine = torch.cat(halves, dim=2)
            elif name.endswith("weight"):
                mine = mine.chunk(tp, dim=1)[rank % tp]
            own[name] = mine.contiguous().view(tensor.dtype)
        save_file(own, work / rank_file_name(rank))
        subprocess.run(["sync", str(work / rank_file_name(rank))], check=True)


def copy(source: Path, work: Path, tp: int, ep: int) -> None:
    """`cat` every shard into a file, flushed to the disk as conversion flushes."""
    for shard in CheckpointIndex.open(source).shards:
        with (work / shard).open("wb") as out:
            subprocess.run(["cat", str(source / shard)], stdout=out, check=True)
        subprocess.run(["sync", str(work / shard)], check=True)


def slices(source: Path, work: Path, tp: int, ep: int) -> None:
    """The least that cutting takes: every shard's tensors sliced among the ranks and saved, nothing rescaled or hashed.

    Experts are divided among `ep` groups, their projections and the other Linears among ranks; what does not divide is
    every rank's, as norms are. A file a shard and rank, flushed to the disk as ours are.
    """
    for shard in CheckpointIndex.open(source).shards:
        state = load_file(source / shard)
        count = 1 + max((int(name.split(".")[5]) for name in state if ".experts." in name), default=0)
        for rank in range(tp * ep):
            rank_experts = range(rank // tp * count // ep, (rank // tp + 1) * count // ep)
            own = {}
            for name, tensor in state.items():
                parts, part = tp * ep, rank
                if ".mlp.experts." in name:
                    if int(name.split(".")[5]) not in rank_experts:
                        continue
                    parts, part = tp, rank % tp
                dim = 1 if ".down_proj." in name or ".o_proj." in name else 0
                if tensor.dim() == 2 and ".mlp.gate." not in name and tensor.shape[dim] % parts == 0:
                    width = tensor.shape[dim] // parts
                    tensor = tensor.narrow(dim, part * width, width)
                own[name] = tensor.contiguous()
            path = work / f"{rank}-{shard}"
            save_file(own, path)
            subprocess.run(["sync", str(path)], check=True)


def load_ratio(work: Path) -> dict[str, float]:
    """Seconds to load rank 0 as NxDI does (`load_file`), every byte used, and to read its file; from the disk.

    Both end in one buffer that was there before, as a device's staging memory is.
    """
    path = work / WEIGHTS / rank_file_name(0)
    buffer = bytearray(path.stat().st_size)
    staging = torch.frombuffer(buffer, dtype=torch.uint8)

    def evict() -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def raw() -> None:
        with path.open("rb", buffering=0) as file:
            view, position = memoryview(buffer), 0
            while count := file.readinto(view[position:]):
                position += count

    def load() -> None:
        position = 0
        for tensor in load_file(path).values():
            flat = tensor.reshape(-1).view(torch.uint8)
            staging[position : position + len(flat)] = flat
            position += len(flat)

    times: dict[str, list[float]] = {"read": [], "load": []}
    for _ in range(10):
        for name, job in (("read", raw), ("load", load)):
            evict()
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return {name: min(taken) for name, taken in times.items()}  # a shared disk has slow moments


def run_job(job: str, source: Path, work: Path, tp: int, ep: int) -> dict[str, float]:
    """One measurement, in this process."""
    torch.set_num_threads(1)
    shards = CheckpointIndex.open(source).shards
    sizes = [(source / shard).stat().st_size for shard in shards]
    start = time.perf_counter()
    if job in OTHERS:
        OTHERS[job](source, work, tp, ep)
    else:
        experts = job.removesuffix("_report")
        Presharder(source, work, Layout(tp, ep, experts=experts), report=job.endswith("report")).run()
    seconds, busy = time.perf_counter() - start, time.process_time()
    peak, read = peak_resident() or 0, sum(sizes[1:2] if job == "straightforward" else sizes)
    extra = {} if job in OTHERS else load_ratio(work)
    return {"seconds": seconds, "rate": read / seconds / 1e6, "cpu_seconds": busy, "peak_gb": peak / 1e9, **extra}


# What conversion stands beside.
OTHERS: dict[str, Callable[[Path, Path, int, int], None]] = {
    "copy": copy, "slices": slices, "straightforward": straightforward,
}  # fmt: skip
JOBS = ("copy", "slices", "blockwise", "per_channel", "straightforward", "per_channel_report", "blockwise_report")


def compare(
    checkpoint: Path, workdir: Path, tp: int, ep: int, jobs: Sequence[str] | None, say: Callable[[str], None]
) -> None:
    """Measure, say a line a job and the ratios; the work directory is emptied after each.

    Raises:
        SweepError: there is no such job.
        ConfigError, CheckpointError: `checkpoint` is none.
    """
    if unknown := sorted(set(jobs or ()) - set(JOBS)):
        raise SweepError(f"jobs: {', '.join(unknown)} not among {', '.join(JOBS)}")
    KimiK2Config.from_pretrained(checkpoint)
    CheckpointIndex.open(checkpoint)
    results = {}
    for job in jobs or JOBS:
        work = workdir / job
        work.mkdir(parents=True)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            results[job] = pool.submit(run_job, job, checkpoint, work, tp, ep).result()
        shutil.rmtree(work)
        say(f"{job:20} " + " ".join(f"{name} {value:.3f}" for name, value in results[job].items()))
    rate = {job: result["rate"] for job, result in results.items()}
    if {"copy", "blockwise"} <= rate.keys():
        say(f"blockwise / copy {rate['blockwise'] / rate['copy']:.2f}")
    for job in rate.keys() & {"blockwise", "per_channel", "blockwise_report", "per_channel_report"}:
        if "slices" in rate:
            memory = results[job]["peak_gb"] / results["slices"]["peak_gb"]
            say(f"{job} / slices {rate[job] / rate['slices']:.2f}, memory {memory:.2f}")
    if {"per_channel", "straightforward"} <= rate.keys():
        say(f"per_channel / straightforward {rate['per_channel'] / rate['straightforward']:.2f}")
