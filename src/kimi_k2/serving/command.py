"""vLLM's command line for a checkpoint on this machine: parsers, parallel sizes and length, by config and plan."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, DoesNotFitError
from kimi_k2.plan.deployment import Deployment, Target
from kimi_k2.plan.machines import H200, UTILIZATION, gpu_memory
from kimi_k2.plan.memory import cache_tokens, memory_plan
from kimi_k2.serving.paged.support import held_by_ranks
from kimi_k2.sharding.layout import SERVED_EXPERTS, STORED, Layout
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.tokenizer import KimiTokenizer

STEP = 1024  # a length that is not asked for is a multiple of this
# vllm-neuron's torch-native line (its docs/model-dev/cpu-development.md): graphs are made for trn2 and not run; then a
# graph that was not made is an error.
COMPILING = {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
COMPILED = {"NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND": "1", "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}


@dataclass(frozen=True)
class Command:
    """A process to become.

    Attributes:
        words: of the command line.
        environment: variables beside those of this process.
    """

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """As a shell takes it."""
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in self.environment.items()), shlex.join(self.words)]
        )

    def run(self) -> None:
        """Become it."""
        os.execvpe(self.words[0], self.words, {**os.environ, **self.environment})


def gpu_lengths(
    config: KimiK2Config, gpus: int, memory: int, asked: int | None, experts: str = STORED
) -> tuple[int, int]:
    """Ranks of tensor parallelism, the most that share the heads, and tokens a sequence.

    Args:
        config: of the checkpoint.
        gpus: that are there.
        memory: bytes of one.
        asked: tokens a sequence; None for as many as fit, at most the model's positions.
        experts: what routed experts are held in.

    Raises:
        DoesNotFitError: the weights, or as many tokens beside them, do not fit; how many such GPUs would hold them.
    """
    config, heads = held_by_ranks(config, Layout(1, 1, "cuda", STORED)), config.num_attention_heads
    divisors = [count for count in range(min(gpus, heads), 0, -1) if heads % count == 0]
    ranks, tokens = next(
        (divisor, room) for divisor in divisors if (room := _tokens(config, divisor, memory, experts)) is not None
    )
    wanted = asked or STEP
    if tokens < wanted:
        wider = (count for count in range(ranks + 1, heads + 1) if heads % count == 0)
        enough = next((count for count in wider if (_tokens(config, count, memory, experts) or 0) >= wanted), None)
        hint = f"{enough} such GPUs would hold them" if enough else "no number of such GPUs holds them"
        raise DoesNotFitError(
            f"{ranks} GPUs of {memory / 1e9:.0f} GB: weights and {wanted:,} tokens of cache do not fit; {hint}"
        )
    return ranks, asked or min(config.max_position_embeddings, tokens // STEP * STEP)


def _tokens(config: KimiK2Config, ranks: int, memory: int, experts: str) -> int | None:
    """Of cache, which every rank holds whole, beside a rank's weights; negative if not even these fit.

    None if so many ranks would cut a block of scales.
    """
    there = gpu_memory(memory, "as the device reports it")
    try:
        target = Target("", config, Layout(ranks, 1, "cuda", experts), H200, there, batch=1, context=STEP, prompt=STEP)
        return cache_tokens(memory_plan(target))
    except ConfigError:
        return None


def vllm_command(
    checkpoint: Path,
    backend: str,
    *,
    gpus: tuple[int, int] = (0, 0),
    max_model_len: int | None = None,
    preset: str = "trn2-tp32-ep2",
    compiled: Path | None = None,
    experts: str = STORED,
    extra: Sequence[str] = (),
) -> Command:
    """vLLM with the flags that Kimi needs.

    Args:
        checkpoint: directory.
        backend: `cpu`, `cuda` or `neuron`.
        gpus: how many, and bytes of one (cuda).
        max_model_len: tokens a sequence; None for what fits.
        preset: deployment (neuron).
        compiled: what `compile` wrote for it (neuron).
        experts: what routed experts are held in, `stored` or `w2_bf16` (not neuron).
        extra: flags of vLLM's own behind ours, of which the last of a name counts.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        DoesNotFitError: see `gpu_lengths`.
        ConfigError: there is no such preset, its buckets are of another length, or the experts cannot be held so.
    """
    config = KimiK2Config.from_pretrained(checkpoint)
    flags = ["--trust-remote-code", "--enable-auto-tool-choice", "--tool-call-parser", "kimi_k2_stream"]
    if KimiTokenizer.from_pretrained(checkpoint).chat_style is not ChatStyle.INSTRUCT:
        flags += ["--reasoning-parser", "kimi_k2_stream"]
    environment = {} if experts == STORED else {SERVED_EXPERTS: experts}
    if environment and backend == "neuron":
        raise ConfigError(f"expected {STORED} on Trainium, whose preset says the experts' format", field="experts")
    if environment:
        Layout(1, 1, "cuda", experts).held(config)
    if backend == "neuron":
        chosen = Deployment.load(preset)
        flags += ["--tensor-parallel-size", str(chosen.tp_degree), "--max-num-seqs", str(chosen.batch_size)]
        length, line = max_model_len or chosen.seq_len, chosen.torch_native
        prompt = length if chosen.on_nxdi else None  # for which vllm-neuron's older line has a graph
        chosen.with_lengths(length, None, prompt).check()
        flags += ["--max-model-len", str(length)]
        options = {"override_neuron_config": {"preset": preset}}
        if line is not None:
            options = {"neuron_config": line.neuron_config(chosen.experts, chosen.moe_ep_degree)}
            flags += ["--max-num-batched-tokens", str(chosen.max_context_length), "--block-size", str(line.block_size)]
            flags += ["--kv-cache-dtype", "fp8"] if line.kv_cache_dtype == "fp8" else []
            flags += ["--enable-expert-parallel"] if chosen.moe_ep_degree > 1 else []
            flags += ["--no-async-scheduling"] if line.on_device_sampling_config is None else []
        if line is None or line.kv_segment_size_buckets is None:
            flags += ["--no-enable-prefix-caching"]
        flags += ["--additional-config", json.dumps(options)]
        if compiled is not None:
            environment = {"NEURON_COMPILED_ARTIFACTS": str(compiled)}
            if line is not None:
                environment = {"NEURON_LIBTORCH_REMOTE_CACHE": str(compiled)} | COMPILED
    elif backend == "cuda":
        ranks, length = gpu_lengths(config, *gpus, max_model_len, experts)
        flags += ["--tensor-parallel-size", str(ranks), "--max-model-len", str(length)]
        flags += ["--gpu-memory-utilization", str(UTILIZATION)]
        if config.vision is not None and ranks > 1:
            flags += ["--mm-encoder-tp-mode", "data"]
    elif max_model_len is not None:
        flags += ["--max-model-len", str(max_model_len)]
    return Command([*_program(), str(checkpoint), *flags, *extra], environment)


def compile_command(checkpoint: Path, preset: str, out: Path) -> Command:
    """Likewise, to write `out` on a machine without a Neuron device, for a preset of the torch-native line."""
    command = vllm_command(checkpoint, "neuron", preset=preset, compiled=out)
    kept = {name: value for name, value in command.environment.items() if name not in COMPILED}
    return replace(command, environment=kept | COMPILING)


def _program() -> list[str]:
    """`vllm serve` of this Python; the server's module where vLLM has another distribution's name, as on a CPU."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec("vllm") is None:
            raise ModuleNotFoundError("vllm is not installed", name="vllm") from None
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
