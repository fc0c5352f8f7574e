"""What the sweep times: one small interface, and the plain model on CPU and GPU and the NxDI model behind it.

A backend yields once for each decode step, when the step's tokens have arrived on the host. The sweep holds the watch,
so that all backends are timed alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from kimi_k2.bench.errors import BackendUnavailableError, SweepError
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.decode_step import capturable
from kimi_k2.engine.device import check_device
from kimi_k2.engine.generate import Generator
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.cache import kv_cache_dtype
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.neuron import contrib
from kimi_k2.neuron.application import NeuronApplication
from kimi_k2.neuron.compile import compile_digest
from kimi_k2.plan.deployment import Deployment

Prompts = Sequence[Sequence[int]]


class Backend(Protocol):
    """Something that generates tokens.

    Attributes:
        name: cpu, cuda or neuron.
        vocab_size: prompts are drawn below it.
        details: for the result's environment: dtype, preset, compiler arguments ...
    """

    name: str
    vocab_size: int
    details: dict[str, Any]

    def generate(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        """Exactly `new_tokens` steps for prompts of one length, greedy, end tokens ignored; yields after each step."""
        ...

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the peak."""
        ...

    def peak_memory(self) -> tuple[int | None, str]:
        """Bytes since the last reset (None if unknown) and what they are of."""
        ...


def peak_resident() -> int | None:
    """Peak resident bytes of this process (ru_maxrss would remember the parent's); None without Linux's /proc."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


class TorchBackend:
    """The plain PyTorch model on one device; on a GPU its decode steps come from a graph where kernels allow.

    Args:
        generator: of the model.
        weights: how they are held, for the result's environment.
    """

    def __init__(self, generator: Generator, weights: str) -> None:
        self.generator, self.model = generator, generator.model
        self.device = str(self.model.lm_head.weight.device)
        self.name = self.device.partition(":")[0]
        self.vocab_size = self.model.config.vocab_size
        self.details: dict[str, Any] = {"dtype": str(self.model.dtype).removeprefix("torch."), "weights": weights}
        self.details["batch_invariant"] = self.model.batch_invariant
        cache = self.model.kv_cache_dtype or self.model.dtype
        self.details["kv_cache"] = str(cache).removeprefix("torch.")
        self.details["graph"] = capturable(self.model, 1)  # decode steps of one sequence are replayed

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        device: str,
        dtype: torch.dtype,
        keep_quantized: bool = False,
        kv_cache: str = "auto",
        batch_invariant: bool = False,
    ) -> TorchBackend:
        """A checkpoint on one device.

        Args:
            checkpoint: Hugging Face checkpoint directory.
            device: cpu, or cuda with an index if wanted.
            dtype: of weights and activations.
            keep_quantized: hold FP8 or INT4 weights as stored.
            kv_cache: dtype of the KV cache, see `kv_cache_dtype`.
            batch_invariant: the model's mode.

        Raises:
            DeviceError: cuda is asked for and there is none.
        """
        check_device(device)
        model = KimiK2ForCausalLM.from_pretrained(checkpoint, dtype=dtype, device=device, keep_quantized=keep_quantized)
        model.kv_cache_dtype, model.batch_invariant = kv_cache_dtype(kv_cache, model.config), batch_invariant
        return cls(Generator(model), "stored" if keep_quantized else "float")

    def generate(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        """See Backend; each step's token ids are on the host when it yields."""
        for _ in self.generator.stream(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)):
            yield

    def reset_peak_memory(self) -> None:
        """GPU: torch's counter. CPU: the kernel's high-water mark, where this process may reset it."""
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def peak_memory(self) -> tuple[int | None, str]:
        """Bytes that torch had allocated on the GPU, or the process's resident memory."""
        if self.name == "cuda":
            return torch.cuda.max_memory_allocated(self.device), "allocated by torch on the GPU"
        size = peak_resident()
        return size, "unknown" if size is None else "resident memory of the process"


class NeuronBackend:
    """NeuronKimiK2ForCausalLM: compiled artifacts on a Trainium machine, or NxD's CPU mode, whose times say nothing.

    Args:
        checkpoint: Hugging Face checkpoint directory (config.json is enough where weights are pre-sharded).
        preset: deployment; for CPU mode see `neuron.application.cpu_deployment`.
        compiled: directory that `compile` wrote; None is CPU mode.

    Raises:
        BackendUnavailableError: the Neuron SDK is not installed.
    """

    name = "neuron"

    def __init__(self, checkpoint: Path, preset: Deployment, compiled: Path | None) -> None:
        if absent := contrib.missing():
            raise BackendUnavailableError(f"the neuron backend needs the Neuron SDK; missing: {', '.join(absent)}")
        if compiled is not None and shutil.which("neuronx-cc") is None:
            raise BackendUnavailableError(
                "the neuron backend needs a Neuron machine (neuronx-cc is not on PATH), or --on-cpu for NxD's CPU mode"
            )
        self.app = NeuronApplication.load(checkpoint, preset, compiled)
        self.vocab_size = KimiK2Config.from_pretrained(checkpoint).vocab_size
        self.preset = preset
        arguments = {wrapper.tag: wrapper.compiler_args for wrapper in self.app.app.models}
        self.details = {"preset": self.app.name, "preset_digest": compile_digest(preset), "compiler_args": arguments}

    def generate(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        """See Backend.

        Raises:
            SweepError: the batch or the length is not what the graphs were compiled for.
        """
        if len(prompts) != self.app.batch_size:
            raise SweepError(f"{self.app.name} was compiled for a batch of {self.app.batch_size}")
        if len(prompts[0]) + new_tokens > self.app.length:
            raise SweepError(f"{self.app.name} was compiled for {self.app.length} tokens a sequence")
        for _ in self.app.stream(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)):
            yield

    def reset_peak_memory(self) -> None:
        """Nothing: the runtime tells no peak."""

    def peak_memory(self) -> tuple[int | None, str]:
        """Unknown; `kimi-k2 plan` computes what is resident."""
        return None, "unknown"
