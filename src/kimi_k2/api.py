"""The family from Python: `KimiK2` loads a model and answers, `convert` cuts a checkpoint for ranks.

The commands `generate` and `chat` are these calls. `from kimi_k2 import KimiK2, convert, plan` imports nothing heavy
before the first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kimi_k2.checkpoint.hub import resolve_checkpoint
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import Reading
from kimi_k2.drafts.head import Eagle3Head
from kimi_k2.engine.defaults import GenerationDefaults, with_chosen
from kimi_k2.engine.device import check_device
from kimi_k2.engine.draft_length import DraftStats
from kimi_k2.engine.drafters import Drafter, HeadDrafter, NgramDrafter
from kimi_k2.engine.generate import Generator
from kimi_k2.engine.graphs import GraphRecorder
from kimi_k2.engine.reply import Reply
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.engine.vision import VisionEncoder
from kimi_k2.errors import ConfigError, GenerationError, MediaError
from kimi_k2.media.patches import Media
from kimi_k2.media.prompt import MediaProcessor, MediaPrompt, taken_out
from kimi_k2.model.cache import kv_cache_dtype as cache_dtype
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.turns import TIMEOUT
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.neuron.application import NeuronApplication, cpu_deployment
from kimi_k2.parallel.ranks import load_ranks
from kimi_k2.parallel.vision import data_parallel
from kimi_k2.plan.deployment import Deployment, OnDeviceSampling
from kimi_k2.plan.nxdi import draft_options
from kimi_k2.progress import ByteProgress
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import open_tower
from kimi_k2.tokenization.deltas import Delta
from kimi_k2.tokenization.message import opens_reasoning
from kimi_k2.tokenization.tokenizer import KimiTokenizer

Show = Callable[[int, Reply, list[Delta]], None]
Messages = Sequence[dict[str, Any]]


def stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """Several; GenerationError for a single one, whose every character would be taken for one, and for empty ones."""
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise GenerationError(f"stop: expected a list of strings of at least one character, got {stop!r}")
    return tuple(stop)


def compute_defaults(backend: str, dtype: str | None, keep_quantized: bool | None) -> tuple[str, bool]:
    """Compute dtype, and whether weights are held as stored: what our kernels take on a GPU, where it is not said."""
    on_gpu = backend == "cuda"
    chosen = dtype or ("bfloat16" if on_gpu else "float32")
    return chosen, on_gpu and chosen == "bfloat16" if keep_quantized is None else keep_quantized


def load_model(checkpoint: Path, **options: Any) -> KimiK2ForCausalLM:
    """`KimiK2ForCausalLM.from_pretrained` with a progress bar."""
    with CheckpointReader(checkpoint) as reader:
        total = reader.total_bytes
    try:
        with ByteProgress("loading", total) as bar:
            return KimiK2ForCausalLM.from_pretrained(
                checkpoint, on_tensor=lambda _, count: bar.advance(count), **options
            )
    except torch.OutOfMemoryError as error:
        error.add_note(f"the weights have {total / 1e9:.1f} GB as they are stored, more once they are dequantized")
        raise


NGRAM = "ngram"


def load_drafter(
    draft: str | Path,
    target: KimiK2ForCausalLM,
    checkpoint: Path | None = None,
    *,
    download: bool = False,
    layers: Reading = "auto",
) -> Drafter:
    """What proposes tokens to a target.

    Args:
        draft: `ngram`, or an Eagle3 head: a directory, or the name of one in the Hugging Face cache.
        target: the loaded model; on ranks each loads the whole head.
        checkpoint: of the target, to tell a head of another member.
        download: fetch what the cache lacks.
        layers: how a head's list of the target's layers is read, see `DraftConfig`.

    Raises:
        KimiK2Error: (subclasses) as `Eagle3Head.from_pretrained` does.
    """
    if str(draft) == NGRAM:
        return NgramDrafter()
    directory = resolve_checkpoint(draft, download=download)
    head = Eagle3Head.from_pretrained(directory, target, target_directory=checkpoint, reading=layers)
    return HeadDrafter(head, GraphRecorder)


def convert(checkpoint: str | Path, output: str | Path, preset: str) -> dict[str, Any]:
    """Cut a checkpoint into one file a rank of a deployment; the same call resumes an interrupted run.

    Args:
        checkpoint: directory, or the name of one in the Hugging Face cache.
        output: directory to write.
        preset: name of a file in configs/, or a path to one.

    Returns:
        The manifest: files with their bytes, checksums, and the error of the experts' conversion.

    Raises:
        KimiK2Error: (subclasses) as the command `convert` does.
    """
    source = resolve_checkpoint(checkpoint)
    layout: Layout = Deployment.load(preset).layout(KimiK2Config.load(source))
    return Presharder(source, Path(output), layout).run()


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
        """Seconds to the first token; NaN before it."""
        return self.seconds[0] if self.seconds else float("nan")

    @property
    def tpot(self) -> float:
        """Mean seconds a later token; 0 if there was none."""
        return sum(self.seconds[1:]) / max(len(self.seconds) - 1, 1)

    def __str__(self) -> str:
        return f"TTFT {self.ttft:.3f} s, TPOT {self.tpot:.4f} s, {len(self.seconds)} steps"


@dataclass(frozen=True)
class MediaReader:
    """A checkpoint's processor and vision tower, loaded when the first image comes.

    Attributes:
        ranks: output of `convert`, whose tower is read instead of the checkpoint's; ranks share the images.
        device: of the tower.
    """

    checkpoint: Path
    config: KimiK2Config
    tokenizer: KimiTokenizer
    dtype: torch.dtype
    device: str | torch.device = "cpu"
    ranks: Path | None = None

    @cached_property
    def processor(self) -> MediaProcessor:
        """Raises MediaError for a member without a tower."""
        return MediaProcessor.from_pretrained(self.checkpoint, self.tokenizer, self.config)

    @cached_property
    def encoder(self) -> VisionEncoder:
        """The tower, over all ranks if there are several."""
        if self.ranks is None:
            return VisionEncoder(VisionModel.from_pretrained(self.checkpoint, dtype=self.dtype, device=self.device))
        with open_tower(self.ranks) as read:
            model = VisionModel.loaded(self.config, read, dtype=self.dtype, device=self.device)
        return data_parallel(model) if dist.is_initialized() else VisionEncoder(model)


@dataclass(frozen=True)
class Neuron:
    """Which NxDI model to load.

    Attributes:
        preset: name or path of the deployment.
        compiled: what `compile` wrote; None only in CPU mode.
        on_cpu: NxD's CPU mode.
        length: tokens a sequence in CPU mode.
        batch_size: sequences at once in CPU mode.
    """

    preset: str
    compiled: Path | None = None
    on_cpu: bool = False
    length: int = 1024
    batch_size: int = 1

    def load(
        self, checkpoint: Path, dtype: str, draft: str | Path | None = None, draft_tokens: int = 3
    ) -> NeuronApplication:
        """The application.

        Args:
            checkpoint: directory.
            dtype: of CPU mode; compiled graphs have their own.
            draft: Eagle3 head that drafts in the graph; None without drafts.
            draft_tokens: that are drafted at a time, as many as were compiled.

        Raises:
            ConfigError: it is not said which, or both are; or drafts are n-grams, which NxDI has not.
        """
        if (self.compiled is not None) == self.on_cpu:
            raise ConfigError("the neuron backend needs either --compiled (from `kimi-k2 compile`) or --on-cpu")
        preset = Deployment.load(self.preset)
        if self.on_cpu:
            sampling = None if draft is None else OnDeviceSampling()
            preset = cpu_deployment(
                preset, length=self.length, batch_size=self.batch_size, dtype=dtype, sampling=sampling
            )
        if draft is None:
            return NeuronApplication.load(checkpoint, preset, self.compiled)
        if str(draft) == NGRAM:
            raise ConfigError("expected an Eagle3 head: NxDI's fused speculation has no n-grams", field="draft")
        head, options = resolve_checkpoint(draft), draft_options(draft_tokens)
        return NeuronApplication.load(checkpoint, preset, self.compiled, draft=head, **options)


@dataclass(frozen=True)
class Loading:
    """How `KimiK2.open` loads a checkpoint.

    Attributes:
        backend: `cpu`, `cuda` or `neuron`.
        dtype: of activations and float weights; bfloat16 on a GPU, else float32.
        keep_quantized: hold weights as they are stored; the default on a GPU in bfloat16.
        kv_cache_dtype: see `model.cache.kv_cache_dtype`.
        batch_invariant: a sequence's logits have the same bits in any batch and in any chunks.
        download: fetch what the Hugging Face cache lacks.
        style: chat format; None for what the checkpoint says.
        sampling: fields of SamplingParams that win over generation_config.json.
        otherwise: fields that hold where that file does not say them.
        stop, chunk_size: see KimiK2.
        ranks: output of `convert --target cuda`, of which this process takes its file.
        neuron: the NxDI model that the backend `neuron` loads.
        keep_cache: see `Generator`: for one conversation after another turn.
        draft: see `load_drafter`; None decodes token by token. What is generated stays the same.
        draft_tokens: tokens that are drafted at most before they are verified.
        draft_layers: how a head's list of the target's layers is read, see `DraftConfig`.

    Raises:
        ConfigError: options do not go together.
    """

    backend: str = "cpu"
    dtype: str | None = None
    keep_quantized: bool | None = None
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False
    download: bool = False
    style: str | None = None
    sampling: Mapping[str, Any] | None = None
    otherwise: Mapping[str, Any] | None = None
    stop: Sequence[str] = ()
    chunk_size: int | None = None
    ranks: Path | None = None
    neuron: Neuron | None = None
    keep_cache: bool = False
    draft: str | Path | None = None
    draft_tokens: int = 3
    draft_layers: Reading = "auto"

    def __post_init__(self) -> None:
        if self.backend == "neuron":
            if self.neuron is None:
                raise ConfigError("expected which NxDI model", field="neuron")
            plain = {"ranks": None, "keep_quantized": None, "kv_cache_dtype": "auto", "batch_invariant": False}
            for name, unsaid in {**plain, "draft_layers": "auto"}.items():
                if getattr(self, name) != unsaid:
                    raise ConfigError("of the plain model, not of the backend neuron", field=name)
        elif self.neuron is not None:
            raise ConfigError("goes with the backend neuron", field="neuron")
        elif self.ranks is not None and self.keep_quantized is False:
            raise ConfigError("ranks hold weights as they are stored", field="keep_quantized")
        if self.draft_tokens < 1:
            raise ConfigError(f"expected at least 1 token, got {self.draft_tokens}", field="draft_tokens")


@dataclass(frozen=True)
class KimiK2:
    """A loaded model that answers: text, conversations with tools, images and videos.

    Attributes:
        generator: makes the tokens.
        tokenizer, config: of the checkpoint.
        params: how tokens are chosen where a call does not say otherwise; its end tokens are the checkpoint's.
        defaults: what of generation_config.json depends on the prompt.
        stop: strings that end a reply.
        chunk_size: tokens of a prompt that are read at a time; None for what is best.
        rank: of this process; ranks above 0 make the same steps and show nothing.
        media_reader: what reads and encodes images; None where the backend takes none.
    """

    generator: Generator | NeuronApplication
    tokenizer: KimiTokenizer
    config: KimiK2Config
    params: SamplingParams
    stop: tuple[str, ...] = ()
    chunk_size: int | None = None
    rank: int = 0
    media_reader: MediaReader | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @classmethod
    def from_pretrained(cls, checkpoint: str | Path, **options: Any) -> KimiK2:
        """Load a checkpoint into this process.

        Args:
            checkpoint: directory, or a name such as `moonshotai/Kimi-K2-Instruct-0905` in the Hugging Face cache.
            options: see `Loading`.

        Raises:
            KimiK2Error: (subclasses) as loading does; `ranks` is refused, which `open` takes.
        """
        if options.get("ranks") is not None:
            raise ConfigError("several processes have an end together: use `with KimiK2.open(...)`", field="ranks")
        with cls.open(checkpoint, **options) as model:
            return model

    @classmethod
    @contextmanager
    def open(cls, checkpoint: str | Path, **options: Any) -> Iterator[KimiK2]:
        """Load the model, or this process's part of it.

        Args:
            checkpoint: directory or cached name; with `ranks` its configuration and tokenizer alone.
            options: see `Loading`.

        Raises:
            KimiK2Error: (subclasses) as loading does.
        """
        how = Loading(**options)
        directory = resolve_checkpoint(checkpoint, download=how.download)
        config = KimiK2Config.from_pretrained(directory)
        tokenizer = KimiTokenizer.from_pretrained(directory, style=how.style)
        defaults, sampling = GenerationDefaults.from_pretrained(directory, config), how.sampling or {}
        params = defaults.params(sampling, how.otherwise or {})
        name, stored = compute_defaults(how.backend, how.dtype, how.keep_quantized)
        compute: torch.dtype = getattr(torch, name)
        common: dict[str, Any] = {"stop": stop_strings(how.stop), "chunk_size": how.chunk_size}
        common["defaults"] = defaults.without(sampling)
        if how.neuron is not None:
            rank = int(os.environ.get("RANK", "0"))
            loaded = how.neuron.load(directory, name, how.draft, how.draft_tokens)
            yield cls(loaded, tokenizer, config, params, rank=rank, **common)
            return
        with ExitStack() as opened:
            if how.ranks is None:
                rank, device = 0, check_device(how.backend)
                model = load_model(directory, dtype=compute, device=how.backend, keep_quantized=stored)
                generator = Generator(model)
            else:
                loaded_rank = opened.enter_context(load_ranks(how.ranks, directory, config, compute, how.backend))
                rank, generator = loaded_rank.number, loaded_rank.generator
                device = generator.model.lm_head.weight.device
            model = generator.model
            model.kv_cache_dtype = cache_dtype(how.kv_cache_dtype, config)
            model.batch_invariant, generator.draft_tokens = how.batch_invariant, how.draft_tokens
            generator.keep = how.keep_cache
            if how.draft is not None:
                options = {"download": how.download, "layers": how.draft_layers}
                generator.drafter = load_drafter(how.draft, model, directory, **options)
            media_reader = MediaReader(directory, config, tokenizer, compute, device, how.ranks)
            yield cls(generator, tokenizer, config, params, rank=rank, media_reader=media_reader, **common)

    @property
    def drafts(self) -> DraftStats | None:
        """Of the last generation, what was drafted and accepted; None without drafts."""
        drafting = not isinstance(self.generator, Generator) or self.generator.drafter is not None
        return self.generator.stats if drafting else None

    def generate(
        self, prompts: str | Sequence[str], *, stop: Sequence[str] = (), timeout: float = TIMEOUT, **sampling: Any
    ) -> list[Reply]:
        """Continue texts as they are, without the chat template.

        Args:
            prompts: one text or several, which make a batch.
            stop: strings that end a reply, besides the model's own.
            timeout: seconds to wait at most for other callers, whom the model serves first come, first served.
            sampling: fields of SamplingParams: max_new_tokens, temperature, top_p, ...

        Returns:
            A Reply each: `text`, `finish_reason`, `tokens`.

        Raises:
            GenerationError: a field of sampling is unknown or out of range, or a prompt is empty or too long.
            BusyError: see `Generator.stream`: others' streams were open for all of the timeout, or this thread's is.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        return self._replies([self.bare(text) for text in texts], stop, timeout, sampling)

    def chat(
        self,
        messages: str | Messages,
        *,
        tools: Messages | None = None,
        thinking: bool = True,
        stop: Sequence[str] = (),
        timeout: float = TIMEOUT,
        **sampling: Any,
    ) -> Reply:
        """Answer a conversation; `reply.message` has content, reasoning and tool calls apart.

        Args:
            messages: OpenAI-style; a text is one message of the user.
            tools: OpenAI-style definitions.
            thinking: whether K2.5 and K2.6 reason before they answer.
            stop, timeout, sampling: as of `generate`, whose errors it raises too.
        """
        talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self._replies([self.prompt(talk, tools=tools, thinking=thinking)], stop, timeout, sampling)[0]

    def _replies(
        self, prompts: Sequence[Prompt], stop: Sequence[str], timeout: float, sampling: dict[str, Any]
    ) -> list[Reply]:
        params, defaults = with_chosen(self.params, sampling), self.defaults.without(sampling)
        call = replace(self, params=params, defaults=defaults, stop=(*self.stop, *stop_strings(stop)))
        return [reply for _, reply in sorted(call.answer(prompts, timeout=timeout), key=lambda pair: pair[0])]

    def prompt(self, messages: Messages, **options: Any) -> Prompt:
        """A conversation as tokens; options as for `ChatTemplate.render_segments` (tools, thinking).

        Raises:
            MediaError: it has images or videos that cannot be read, or the model takes none.
        """
        if taken_out(messages)[1]:
            if self.media_reader is None:
                raise MediaError("this backend takes text only")
            rendered = self.media_reader.processor(messages, **options)
        else:
            segments = self.tokenizer.render_segments(messages, **options)
            rendered = MediaPrompt(self.tokenizer.encode_segments(segments), (), tuple(segments))
        reply = {"tools": options.get("tools"), "prefilled": opens_reasoning(rendered.segments)}
        return Prompt(rendered.ids, reply, rendered.media)

    def bare(self, text: str) -> Prompt:
        """Text as it is, without the chat template."""
        return Prompt(self.tokenizer.encode(text), {"parse": False})

    def answer(
        self,
        prompts: Sequence[Prompt],
        show: Show = lambda *_: None,
        timing: Timing | None = None,
        timeout: float = TIMEOUT,
    ) -> Iterator[tuple[int, Reply]]:
        """Generate until every sequence has ended; replies come, with their rows, in the order in which they end.

        Args:
            prompts: of one batch.
            show: told of every token: its row, the reply, and what it adds.
            timing: gets every step's seconds; one without any so far.
            timeout: as of `generate`. The model is held from the first `next` until all have ended, or `close`.

        Raises:
            KimiK2Error: (subclasses) as `generate` does; MediaError where the backend takes no media.
        """
        ids = [prompt.ids for prompt in prompts]
        params = self.defaults.bounded(self.params, max(map(len, ids), default=0))
        own: dict[str, Any] = {"stop": self.stop, "min_tokens": params.min_tokens}
        replies = [Reply(self.tokenizer, params.eos_token_ids, **own, **prompt.options) for prompt in prompts]
        running = dict(enumerate(replies))
        options: dict[str, Any] = {"chunk_size": self.chunk_size, "timeout": timeout}
        if timing is not None and timing.seconds:
            raise GenerationError("timing: it holds another generation's steps")
        if any(prompt.media for prompt in prompts):
            if self.media_reader is None:
                raise MediaError("this backend takes text only")
            encoder, media = self.media_reader.encoder, [prompt.media for prompt in prompts]
            options["media"] = partial(encoder.rows, ids, media)
        with closing(self.generator.stream(ids, params, **options)) as steps:
            for step in steps:
                if timing is not None:
                    timing.seconds.append(step.seconds)
                for row, reply in list(running.items()):
                    token = step.tokens[row]
                    if token is not None:
                        if step.logprobs:
                            reply.logprobs.append((token, step.logprobs[row]))
                        show(row, reply, reply.feed(token))
                    if reply.finish_reason is not None:
                        yield row, running.pop(row)
                if not running:
                    return
        for row, reply in running.items():
            show(row, reply, reply.finish())
            yield row, reply
