"""A loaded model that answers: what `generate` and `chat` share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k2.cli.loading import Eyes, load_model
from kimi_k2.engine.device import check_device
from kimi_k2.engine.generator import Generator
from kimi_k2.engine.multimodal import encoded_rows
from kimi_k2.engine.reply import Reply
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import ConfigError, MediaError
from kimi_k2.media.patches import Media
from kimi_k2.media.prompt import media_parts
from kimi_k2.model.cache import kv_cache_dtype
from kimi_k2.parallel.ranks import load_ranks
from kimi_k2.tokenization.message import Delta, opens_reasoning
from kimi_k2.tokenization.tokenizer import KimiTokenizer

if TYPE_CHECKING:
    import torch

    from kimi_k2.config import KimiK2Config
    from kimi_k2.neuron.application import NeuronApplication

Show = Callable[[int, Reply, list[Delta]], None]


@dataclass(frozen=True)
class Prompt:
    """What a reply answers.

    Attributes:
        ids: token ids.
        options: of its Reply: the tools, whether <think> is open, whether there is anything to parse.
        media: its images and video chunks, in the order of their tokens.
    """

    ids: list[int]
    options: dict[str, Any]
    media: tuple[Media, ...] = ()


@dataclass
class Timing:
    """Seconds of each step; the first is the prefill."""

    seconds: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.seconds[0]

    @property
    def tpot(self) -> float:
        """Mean seconds a later token; 0 if there was none."""
        return sum(self.seconds[1:]) / max(len(self.seconds) - 1, 1)

    def __str__(self) -> str:
        return f"TTFT {self.ttft:.3f} s, TPOT {self.tpot:.4f} s, {len(self.seconds)} steps"


@dataclass(frozen=True)
class Session:
    """A model, its tokenizer and how to sample.

    Attributes:
        rank: of this process; ranks above 0 make the same steps and show nothing.
        eyes: what reads and encodes images; None where the backend takes none.
    """

    generator: Generator | NeuronApplication
    tokenizer: KimiTokenizer
    params: SamplingParams
    stop: tuple[str, ...] = ()
    chunk_size: int | None = None
    rank: int = 0
    eyes: Eyes | None = None

    def prompt(self, messages: Sequence[dict[str, Any]], **options: Any) -> Prompt:
        """A conversation; options as for `ChatTemplate.render_segments` (tools, thinking).

        Raises:
            MediaError: it has images or videos that cannot be read, or the model takes none.
        """
        if any(media_parts(messages)):
            if self.eyes is None:
                raise MediaError("this backend takes text only")
            made = self.eyes.processor(messages, **options)
            reply = {"tools": options.get("tools"), "prefilled": opens_reasoning(made.segments)}
            return Prompt(made.ids, reply, made.media)
        segments = self.tokenizer.render_segments(messages, **options)
        reply = {"tools": options.get("tools"), "prefilled": opens_reasoning(segments)}
        return Prompt(self.tokenizer.encode_segments(segments), reply)

    def bare(self, text: str) -> Prompt:
        """Text as it is, without the chat template."""
        return Prompt(self.tokenizer.encode(text), {"parse": False})

    def answer(self, prompts: Sequence[Prompt], show: Show, timing: Timing) -> Iterator[tuple[int, Reply]]:
        """Generate until every sequence has ended; replies come, with their rows, in the order in which they end."""
        end_ids = self.params.eos_token_ids
        replies = [Reply(self.tokenizer, end_ids, stop=self.stop, **prompt.options) for prompt in prompts]
        running = dict(enumerate(replies))
        ids = [prompt.ids for prompt in prompts]
        options: dict[str, Any] = {"chunk_size": self.chunk_size}
        if self.eyes is not None and any(prompt.media for prompt in prompts):
            options["media"] = encoded_rows(self.eyes.encoder, prompts)
        for step in self.generator.stream(ids, self.params, **options):
            timing.seconds.append(step.seconds)
            for row, reply in list(running.items()):
                token = step.tokens[row]
                if token is not None:
                    show(row, reply, reply.feed(token))
                if reply.finish_reason is not None:
                    yield row, running.pop(row)
            if not running:
                return
        for row, reply in running.items():
            show(row, reply, reply.finish())
            yield row, reply


@dataclass(frozen=True)
class Neuron:
    """Which NxDI model to load.

    Attributes:
        preset: name or path of the deployment.
        compiled: what `compile` wrote; None only in CPU mode.
        on_cpu: NxD's CPU mode.
        context: tokens a sequence in CPU mode.
        batch_size: sequences at once in CPU mode.
    """

    preset: str
    compiled: Path | None = None
    on_cpu: bool = False
    context: int = 1024
    batch_size: int = 1

    def load(self, checkpoint: Path, dtype: str) -> NeuronApplication:
        """The application; `dtype` is that of CPU mode, compiled graphs have their own.

        Raises:
            ConfigError: it is not said which, or both are.
        """
        from kimi_k2.neuron.application import NeuronApplication, cpu_deployment
        from kimi_k2.plan.deployment import Deployment

        if (self.compiled is not None) == self.on_cpu:
            raise ConfigError("the neuron backend needs either --compiled (from `kimi-k2 compile`) or --on-cpu")
        preset = Deployment.load(self.preset)
        if self.on_cpu:
            preset = cpu_deployment(preset, length=self.context, batch_size=self.batch_size, dtype=dtype)
        return NeuronApplication.load(checkpoint, preset, self.compiled)


@contextmanager
def open_session(
    checkpoint: Path,
    config: KimiK2Config,
    tokenizer: KimiTokenizer,
    params: SamplingParams,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    keep_quantized: bool = False,
    kv_cache: str = "auto",
    ranks: Path | None = None,
    stop: Sequence[str] = (),
    chunk_size: int | None = None,
    neuron: Neuron | None = None,
) -> Iterator[Session]:
    """Load the model, or this process's part of it.

    Args:
        checkpoint: directory of weights; with `ranks` the configuration is enough.
        config: of the checkpoint.
        tokenizer: of the checkpoint.
        params: how tokens are chosen, and when a reply ends.
        dtype: of activations and float weights.
        device: `cpu` or `cuda`.
        keep_quantized: keep weights as they are stored.
        kv_cache: dtype of the KV cache, see `kv_cache_dtype`.
        ranks: output of `convert --target cuda`, of which this process takes its file.
        stop: strings that end a reply.
        chunk_size: see `engine.generate.prefill`.
        neuron: the NxDI model instead of the plain one.

    Raises:
        KimiK2Error: (subclasses) as loading does.
    """
    options: dict[str, Any] = {"stop": tuple(stop), "chunk_size": chunk_size}
    if neuron is not None:
        application = neuron.load(checkpoint, str(dtype).removeprefix("torch."))
        yield Session(application, tokenizer, params, rank=int(os.environ.get("RANK", "0")), **options)
        return
    if ranks is None:
        check_device(device)
        model = load_model(checkpoint, dtype=dtype, device=device, keep_quantized=keep_quantized)
        model.kv_cache_dtype = kv_cache_dtype(kv_cache, config)
        eyes = Eyes(checkpoint, config, tokenizer, dtype, device)
        yield Session(Generator(model), tokenizer, params, eyes=eyes, **options)
        return
    with load_ranks(ranks, checkpoint, config, dtype, device) as part:
        part.generator.model.kv_cache_dtype = kv_cache_dtype(kv_cache, config)
        place = part.generator.model.lm_head.weight.device
        eyes = Eyes(checkpoint, config, tokenizer, dtype, place, ranks)
        yield Session(part.generator, tokenizer, params, rank=part.number, eyes=eyes, **options)
