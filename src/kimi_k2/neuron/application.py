"""A loaded NeuronKimiK2ForCausalLM that generates: compiled graphs on Trainium, or NxD's CPU mode anywhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.draft_length import DraftStats
from kimi_k2.engine.generate import prompt_lengths, token_steps
from kimi_k2.engine.sampler import Sampler, SamplingParams, Step, Steps
from kimi_k2.engine.speculate import ended, steps_of, up_to_end
from kimi_k2.errors import ConfigError, GenerationError
from kimi_k2.model.turns import TIMEOUT, Turns, checked_timeout
from kimi_k2.neuron import contrib, cpu
from kimi_k2.neuron.compile import build_application, environment
from kimi_k2.plan.deployment import BlockwiseMatmul, Deployment, NeuronOptions, OnDeviceSampling
from kimi_k2.sharding.manifest import MANIFEST, check_source
from kimi_k2.sharding.whole_layers import slots_at_once

# Tokens a block of the routed experts in CPU mode: more would be mostly padding for short prompts.
CPU_BLOCK = 16


@dataclass(frozen=True)
class Output:
    """What a pass returned, on the host.

    Attributes:
        tokens: chosen on the device, int64 [B], or with a draft in the graph [B, S], -1 behind what was accepted; None
            without on-device sampling.
        logits: of each sequence's last token, [B, vocab_size]; None where the graphs return tokens alone.
        captured: outputs of the modules that the graphs capture, in their order, each [B, S, width].
    """

    tokens: Tensor | None
    logits: Tensor | None
    captured: tuple[Tensor, ...] = ()


def cpu_deployment(
    preset: Deployment,
    *,
    length: int,
    batch_size: int = 1,
    dtype: str = "float32",
    sampling: OnDeviceSampling | None = None,
) -> Deployment:
    """A preset brought down to CPU mode, on the ranks that torchrun started.

    Kept are its experts' format and NKI kernels (on the emulator), expert parallelism, and flash decoding where there
    are ranks to split the cache over. Left out is a vision tower: this takes text alone.

    Args:
        preset: what is brought down.
        length: cache slots a sequence, and the longest prompt; rounded up to what flash decoding can divide, or to the
            attention kernel's tiles.
        batch_size: sequences at once.
        dtype: `float32` or `bfloat16`.
        sampling: on-device sampling; None returns logits.

    Raises:
        ConfigError: BF16 on several ranks, which gloo cannot reduce.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if dtype != "float32" and ranks > 1:
        raise ConfigError(f"expected float32: CPU mode reduces nothing else over {ranks} ranks", field="torch_dtype")
    ep = preset.moe_ep_degree if ranks % preset.moe_ep_degree == 0 else 1
    cores = math.gcd(preset.cache_ranks, ranks)
    decode = preset.neuron_config.decode
    # Positions divide among the ranks of a group, and on kernels a rank's among the tiles of both cores.
    step = slots_at_once(preset.neuron_config.logical_nc_config, cores) if decode == "layers" else cores
    length = -(-length // step) * step
    options = NeuronOptions(
        flash_decoding_enabled=cores > 1,
        num_cores_per_group=cores if cores > 1 else None,
        logical_nc_config=preset.neuron_config.logical_nc_config,
        save_sharded_checkpoint=False,
        enable_bucketing=False,
        on_device_sampling_config=sampling,
        blockwise_matmul_config=BlockwiseMatmul(block_size=CPU_BLOCK),
        decode=decode,
    )
    changed = {
        "tp_degree": ranks, "moe_tp_degree": ranks // ep, "moe_ep_degree": ep, "torch_dtype": dtype,
        "batch_size": batch_size, "seq_len": length, "max_context_length": length, "neuron_config": options,
        "vision": None,
    }  # fmt: skip
    return preset.model_copy(update=changed)


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """NxDI's arguments for a prefill of prompts padded on the right, each [B, S]; position 1 marks a pad."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    slots = torch.arange(int(lengths.max()))
    ids = torch.tensor([[*prompt, *[0] * (len(slots) - len(prompt))] for prompt in prompts])
    mask = slots < lengths[:, None]
    positions = torch.where(mask, slots, torch.ones_like(ids))
    return {"input_ids": ids, "attention_mask": mask.to(torch.int32), "position_ids": positions}


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """NxD's logger and gloo report the process groups on standard output, where the generated text goes."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


class NeuronApplication:
    """Prefill, decode and generation of one loaded application, one after another: an open stream holds it.

    Args:
        app: NeuronKimiK2ForCausalLM, loaded.
        name: of its deployment, for messages.

    Attributes:
        stats: of the last generation's drafts; None where the graphs have no draft.
    """

    def __init__(self, app: Any, name: str) -> None:
        self.app, self.name = app, name
        self.options: Any = app.neuron_config
        self.on_device_sampling = self.options.on_device_sampling_config
        self.batch_size, self.length = self.options.batch_size, self.options.seq_len
        self.longest_prompt = self.options.max_context_length
        self.turns = Turns()
        self.stats: DraftStats | None = DraftStats() if self.options.enable_fused_speculation else None

    @classmethod
    def load(
        cls, checkpoint: str | Path, preset: Deployment, compiled: Path | None, **overrides: Any
    ) -> NeuronApplication:
        """Load what `compile` wrote, or the checkpoint in CPU mode.

        Args:
            checkpoint: Hugging Face checkpoint directory; beside compiled and pre-sharded files config.json is enough.
            preset: what was compiled; for CPU mode see `cpu_deployment`.
            compiled: directory that `compile` wrote; None is CPU mode.
            overrides: further arguments of KimiK2NeuronConfig, the same as when it was compiled.

        Raises:
            NeuronUnavailableError: NxD, NxDI or torch_xla is not importable.
            ConfigError: `compiled` holds no compiled model or weights of another checkpoint, or the preset's graphs
                take images.
        """
        if preset.vision is not None:
            raise ConfigError(
                f"expected none: {preset.name} takes images, which `build_application` runs from Python", field="vision"
            )
        if absent := contrib.missing():
            raise contrib.NeuronUnavailableError(
                f"the neuron backend needs the Neuron SDK, or NxD's source for CPU mode; missing: {', '.join(absent)}"
            )
        config = KimiK2Config.from_pretrained(checkpoint)
        if compiled is not None and not (compiled / "model.pt").is_file():
            raise ConfigError("no compiled model; `kimi-k2 compile` writes it", file=compiled / "model.pt")
        if compiled is not None and (compiled / MANIFEST).is_file():
            check_source(compiled, Path(checkpoint))
        with _stdout_to_stderr():
            if compiled is None:
                cpu.prepare()
                app = build_application(preset, config, str(checkpoint), on_cpu=True, **overrides)
                app.load("")
                return cls(app, f"{preset.name} in CPU mode")
            os.environ.update(environment(preset))
            app = build_application(preset, config, str(checkpoint), **overrides)
            app.load(str(compiled))
            return cls(app, preset.name)

    # -- passes ------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], sampling: Tensor | None = None) -> Output:
        """Run prompts of any lengths; the cache then holds them and nothing else.

        Args:
            prompts: token ids, as many as the batch size or fewer.
            sampling: see `sampling_params`.

        Raises:
            GenerationError: there are too many, or one is empty or too long.
            BusyError: a stream is open.
        """
        with self.turns.take():
            return self._prefill(prompts, sampling)

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[Sequence[int]], sampling: Tensor | None) -> Output:
        lengths = prompt_lengths(prompts)
        if len(prompts) > self.batch_size:
            raise GenerationError(f"{len(prompts)} prompts: {self.name} has a batch size of {self.batch_size}")
        if max(lengths) > self.longest_prompt:
            raise GenerationError(
                f"a prompt has {max(lengths)} tokens: {self.name} takes {self.longest_prompt} in one prefill"
            )
        self.app.reset()
        if self.options.ctx_batch_size == self.batch_size:
            # Every line of the batch is computed in any case; those without a prompt repeat the first one's.
            spare = self.batch_size - len(prompts)
            return self._pass(len(prompts), padded([*prompts, *[prompts[0]] * spare]), sampling)
        # Continuous batching prefills a sequence at a time, each into its own line of the cache.
        return _stacked(
            [self._pass(1, padded([row]), sampling, torch.tensor([line])) for line, row in enumerate(prompts)]
        )

    def decode(self, tokens: Tensor, positions: Tensor, sampling: Tensor | None = None) -> Output:
        """One token a sequence, each at its own position: int64 [B], int64 [B]; BusyError while a stream is open."""
        with self.turns.take():
            return self._decode(tokens, positions, sampling)

    @torch.inference_mode()
    def _decode(self, tokens: Tensor, positions: Tensor, sampling: Tensor | None) -> Output:
        count, spare = len(tokens), self.batch_size - len(tokens)
        tokens, positions = (torch.cat((values, values[:1].expand(spare))) for values in (tokens, positions))
        # NxDI's decode mask covers the cache only; the current token is not in it yet.
        mask = (torch.arange(int(positions.max())) < positions[:, None]).to(torch.int32)
        inputs = {"input_ids": tokens[:, None], "attention_mask": mask, "position_ids": positions[:, None]}
        return self._pass(count, inputs, sampling)

    def _pass(
        self, count: int, inputs: dict[str, Tensor], sampling: Tensor | None, lines: Tensor | None = None
    ) -> Output:
        ids = inputs["input_ids"]
        if sampling is not None:
            sampling = sampling[: len(ids)]
        # In CPU mode NxD also prints shapes from inside its expert-parallel layers.
        with _stdout_to_stderr() if self.options.on_cpu else nullcontext():
            out = self.app(**inputs, seq_ids=lines, sampling_params=sampling)
        tokens = None
        if self.stats is not None:
            accepted = out.fused_outputs  # in CPU mode the accepted tokens alone
            tokens = (accepted if isinstance(accepted, Tensor) else accepted[0])[:count].to("cpu", torch.int64)
        elif self.on_device_sampling is not None:
            tokens = torch.as_tensor(out.tokens).reshape(len(ids), -1)[:count, -1].to("cpu", torch.int64)
        # Without on-device sampling NxDI puts the logits into `tokens` as well.
        logits = None if out.logits is None else out.logits[:count, -1].to("cpu")
        captured = getattr(out, "captured_tensors", None) or ()  # NxDI 0.8 sets it only where tensors are captured
        return Output(tokens, logits, tuple(value[:count] for value in captured))

    # -- generation --------------------------------------------------------------------------------

    def sampling_params(self, params: SamplingParams) -> Tensor | None:
        """What on-device sampling is told, [B, 3]: top_k, top_p, temperature; None without on-device sampling.

        Raises:
            GenerationError: the graphs were compiled for one way of sampling, and this is another.
        """
        compiled = self.on_device_sampling
        if compiled is None:
            return None
        if params.penalizes or params.min_p or params.min_tokens or params.logprobs is not None:
            raise GenerationError(
                f"min_p, min_tokens, penalties, logprobs: {self.name} chooses tokens on the device, by top_k, top_p and"
                " temperature"
            )
        if compiled.dynamic:
            greedy = params.temperature == 0
            row = [
                1 if greedy else min(params.top_k or compiled.global_topk, compiled.global_topk),
                1.0 if greedy else params.top_p,
                1.0 if greedy else params.temperature,
            ]
        else:
            fixed = (compiled.top_k, compiled.top_p, compiled.temperature)
            asked = (params.top_k, params.top_p, params.temperature)
            if (params.temperature > 0) != compiled.do_sample or (compiled.do_sample and asked != fixed):
                what = f"top_k {fixed[0]}, top_p {fixed[1]}, temperature {fixed[2]}" if compiled.do_sample else "greedy"
                raise GenerationError(
                    f"{self.name} was compiled for one way of sampling ({what}); compile it with"
                    " on_device_sampling_config.dynamic, or without on-device sampling"
                )
            row = list(fixed)
        return torch.tensor([row], dtype=torch.float32).expand(self.batch_size, -1).contiguous()

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        chunk_size: int | None = None,
        timeout: float = TIMEOUT,
    ) -> Steps:
        """Generate step by step, as `engine.generate.stream`; on-device sampling takes no seed.

        Raises:
            GenerationError: prompt and new tokens exceed the compiled length, see also `prefill`; a chunk size.
            BusyError: (at the first `next`) others' streams were open for all of the timeout, or this thread's own is.
        """
        if chunk_size is not None:
            raise GenerationError(f"chunk_size: {self.name} prefills whole prompts")
        lengths = prompt_lengths(prompts)
        # NxDI's bucket holds a whole step, drafts that are behind the last token too.
        most = max(lengths) + params.max_new_tokens + max(self.options.speculation_length - 2, 0)
        if most > self.length:
            drafts = "" if self.stats is None else ", and the last step's drafts,"
            raise GenerationError(
                f"prompt of {max(lengths)} and {params.max_new_tokens} new tokens{drafts} exceed the {self.length}"
                f" tokens a sequence of {self.name}"
            )
        begin = partial(self._steps, prompts, params, self.sampling_params(params))
        return self.turns.stream(begin, checked_timeout(timeout))

    def _steps(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, sampling: Tensor | None
    ) -> Iterator[Step]:
        """The steps, of an application that is held."""
        if self.stats is not None:
            return self._fused(prompts, params, sampling)
        lengths, sampler = prompt_lengths(prompts), Sampler(params, prompts)

        def choose(output: Output) -> Tensor:
            if output.tokens is not None:
                return output.tokens
            assert output.logits is not None  # one of the two is always returned
            return sampler(output.logits)

        steps = token_steps(
            lengths,
            params,
            lambda: choose(self._prefill(prompts, sampling)),
            lambda tokens, positions: choose(self._decode(tokens, positions, sampling)),
        )
        return steps if params.logprobs is None else (replace(step, logprobs=sampler.logprobs) for step in steps)

    def _fused(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, sampling: Tensor | None
    ) -> Iterator[Step]:
        """Steps of graphs that draft and verify: several tokens a sequence of each pass."""
        self.stats = stats = DraftStats()
        began = time.perf_counter()
        new = [[int(row[0])] for row in _of_graph(self._prefill(prompts, sampling))]
        last, at = torch.tensor([own[0] for own in new]), torch.tensor(prompt_lengths(prompts))
        left = [params.max_new_tokens] * len(new)
        while True:
            new = [up_to_end(own, params)[:count] for own, count in zip(new, left, strict=True)]
            for row, own in enumerate(new):
                left[row] = 0 if ended(own, params) else left[row] - len(own)
            yield from steps_of(new, time.perf_counter() - began)
            if not any(left):
                return
            began = time.perf_counter()
            verified = _of_graph(self._decode(last, at, sampling))
            for row, tokens in enumerate(verified):
                new[row] = tokens[tokens >= 0].tolist() if left[row] else []
                # An ended sequence stays where it is: its row goes on being computed, and is ignored.
                if own := new[row]:
                    stats.add(verified.shape[1] - 1, len(own) - 1, len(up_to_end(own, params)[: left[row]]))
                    last[row] = own[-1]
                    at[row] += len(own)

    def close(self) -> None:
        """Nothing: the runtime frees the device when the process ends."""


def _of_graph(output: Output) -> Tensor:
    assert output.tokens is not None  # drafts are verified on the device
    return output.tokens


def _stacked(outputs: Sequence[Output]) -> Output:
    tokens = [output.tokens for output in outputs if output.tokens is not None]
    logits = [output.logits for output in outputs if output.logits is not None]
    return Output(torch.cat(tokens) if tokens else None, torch.cat(logits) if logits else None)
