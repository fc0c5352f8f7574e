"""Runs a checkpoint on a backend by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.ranks import load_ranks
from kimi_k2.parity.backends import run_plain, run_transformers
from kimi_k2.parity.nxdi import run_nxdi
from kimi_k2.parity.ranks import combine
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.parity.trace import Inputs, ParityError, Trace
from kimi_k2.plan.deployment import Deployment

BACKENDS = ("cpu", "cuda", "transformers", "neuron")


def run(
    backend: str,
    checkpoint: str | Path,
    inputs: Inputs,
    dtype: str,
    *,
    greedy: bool = False,
    ranks: Path | None = None,
    preset: Deployment | None = None,
    compiled: Path | None = None,
) -> Trace:
    """The trace of a checkpoint on `backend`, computed in `dtype`.

    Args:
        backend: `cpu`, `cuda`, `transformers` or `neuron`.
        checkpoint: directory of the weights.
        inputs: tokens, and which points are kept.
        dtype: name of a float type.
        greedy: force the model's own choices, as many as `inputs.forced` has (plain model only).
        ranks: output of `convert --target cuda`, of which each process of torchrun takes its file (plain model only);
            all get the same trace, and have parted then.
        preset: of `neuron`, see `run_nxdi`.
        compiled: of `neuron`, see `run_nxdi`.

    Raises:
        ParityError: there is no such backend, or it cannot run here.
        NeuronUnavailableError: `neuron` without NxD and NxDI.
    """
    if backend != "neuron" and (preset is not None or compiled is not None):
        raise ParityError(f"backend {backend}: a preset and compiled graphs are of neuron")
    chosen: torch.dtype = getattr(torch, dtype)
    if backend in ("cpu", "cuda"):
        if backend == "cuda" and not torch.cuda.is_available():
            raise ParityError("backend cuda: there is no CUDA device here")
        if ranks is None:
            return _plain(KimiK2ForCausalLM.from_pretrained(checkpoint, dtype=chosen, device=backend), inputs, greedy)
        config = KimiK2Config.from_pretrained(checkpoint)
        with load_ranks(ranks, Path(checkpoint), config, chosen, backend) as part:
            return _plain(part.generator.model, inputs, greedy, combine)
    if ranks is not None:
        raise ParityError(f"backend {backend}: --ranks are of the plain model (cpu or cuda)")
    if greedy:
        raise ParityError(f"backend {backend}: greedy tokens come from the plain model (cpu or cuda)")
    if backend == "transformers":
        return run_transformers(load_transformers_model(checkpoint, chosen), inputs)
    if backend == "neuron":
        return run_nxdi(checkpoint, inputs, dtype, preset, compiled)
    raise ParityError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")


def _plain(
    model: KimiK2ForCausalLM, inputs: Inputs, greedy: bool, combine: Callable[[str, Tensor], Tensor] | None = None
) -> Trace:
    if greedy:
        sampling = SamplingParams(max_new_tokens=len(inputs.forced))
        inputs = replace(inputs, forced=generate(model, [list(inputs.prompt)], sampling).token_ids[0])
    return run_plain(model, inputs) if combine is None else run_plain(model, inputs, combine)
