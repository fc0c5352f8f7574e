"""Several callers of one model: each reply is the one that it is alone, or a typed error says who holds the model."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

import kimi_k2
from kimi_k2.api import KimiK2, Timing
from kimi_k2.engine.generate import Generator, generate, prefill
from kimi_k2.engine.sampler import SamplingParams, Step
from kimi_k2.errors import BusyError, ConfigError, GenerationError, MediaError, TokenizerError
from kimi_k2.model import turns
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.draft import write_synthetic_head
from kimi_k2.tokenization.message import MessageStream
from kimi_k2.tokenization.reasoning import ReasoningStream

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10], list(range(20, 50)), [3], [8, 8, 8, 8, 8, 8]]


def tokens(steps: Iterator[Step]) -> list[int | None]:
    return [step.tokens[0] for step in steps]


def elsewhere(run: Callable[[], Any]) -> Any:
    """What a call returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(timeout=60)


def test_streams_in_turn_on_one_thread(model: KimiK2ForCausalLM) -> None:
    generator = Generator(model)
    wanted = [generate(model, [prompt], PARAMS)[0] for prompt in PROMPTS[:2]]
    first, second = (generator.stream([prompt], PARAMS) for prompt in PROMPTS[:2])
    begun = next(first)
    for again in (
        lambda: next(second),
        lambda: next(Generator(model).stream([[4]], PARAMS)),  # another generator of the model
        lambda: generator.prepare(1, 8),
        generator.close,
    ):
        with pytest.raises(BusyError, match=r"this thread's own generation .*stream\.close\(\).*kimi-k2 serve"):
            again()
    assert [begun.tokens[0], *tokens(first)] == wanted[0]
    assert tokens(generator.stream([PROMPTS[1]], PARAMS)) == wanted[1]
    copied = copy.deepcopy(model)
    held = generator.stream([[4]], PARAMS)
    next(held)
    assert generate(copied, [PROMPTS[1]], PARAMS)[0] == wanted[1], "a copy is another model"
    assert isinstance(pickle.loads(pickle.dumps(model.turns)), turns.Turns)


@pytest.mark.parametrize("thread", ["own", "another"])
def test_what_frees_a_model(model: KimiK2ForCausalLM, thread: str) -> None:
    """Its stream's end, `close`, an exception in it, its last reference, also in a circle; from any thread."""
    generator = Generator(model)
    run = elsewhere if thread == "another" else lambda call: call()
    wanted = generate(model, [PROMPTS[0]], PARAMS)[0]

    def opened() -> Iterator[Step]:
        steps = generator.stream([PROMPTS[1]], PARAMS)
        for _ in range(3):
            next(steps)
        return steps

    def check() -> None:
        assert tokens(generator.stream([PROMPTS[0]], PARAMS, timeout=0)) == wanted

    frees: tuple[Callable[[list[Any]], Any], ...] = (
        lambda held: list(held[0]),
        lambda held: held[0].close(),
        list.clear,
    )
    for free in frees:
        held: list[Any] = [opened()]
        run(partial(free, held))
        check()
    circle: list[Any] = [opened()]
    circle.append(circle)
    del circle
    run(check)
    failing = generator.stream([PROMPTS[1]], PARAMS, media=lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        run(lambda: next(failing))
    check()


def test_first_come_first_served(model: KimiK2ForCausalLM) -> None:
    """Also after some have given up, and whatever threads advance the stream."""
    generator, order = Generator(model), []
    held = generator.stream([PROMPTS[2]], PARAMS)
    elsewhere(lambda: next(held))
    wanted = [generate(copy.deepcopy(model), [prompt], PARAMS)[0] for prompt in PROMPTS]
    found: dict[int, list[int | None]] = {}

    def ask(number: int) -> None:
        patient = number % 3 != 1
        try:
            steps = generator.stream([PROMPTS[number % 5]], PARAMS, timeout=60 if patient else 0.02)
            first = next(steps)
            order.append(number)
            found[number] = [first.tokens[0], *tokens(steps)]
        except BusyError as error:
            assert not patient and "after 0.02 s of waiting" in str(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(9)]
    for thread in threads:
        before = model.turns._last
        thread.start()
        while model.turns._last is before:  # it has not come yet
            time.sleep(0.001)
    time.sleep(0.1)
    next(held)
    with pytest.raises(BusyError, match="this thread's own"):
        next(generator.stream([PROMPTS[0]], PARAMS))
    assert len(list(held)) == 6
    for thread in threads:
        thread.join()
    assert order == [0, 2, 3, 5, 6, 8]
    assert all(found[number] == wanted[number % 5] for number in order)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), None, "5", True])
def test_a_timeout_is_finite(model: KimiK2ForCausalLM, timeout: Any) -> None:
    with pytest.raises(GenerationError, match="timeout: expected seconds from 0 to"):
        Generator(model).stream([[4]], PARAMS, timeout=timeout)


def test_ranks_are_asked_by_one_thread(model: KimiK2ForCausalLM) -> None:
    """Two threads of a process may come in another order than another process's."""
    generator = Generator(model, reduce=lambda part: part)
    wanted = generate(model, [[4, 5]], PARAMS)[0]
    with pytest.raises(GenerationError, match="main thread alone"):
        elsewhere(lambda: next(generator.stream([[4, 5]], PARAMS)))
    assert tokens(generator.stream([[4, 5]], PARAMS)) == wanted


@pytest.fixture(scope="module")
def seeing(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> KimiK2:
    """K2.5 with an Eagle3 head."""
    directory = checkpoints["k2.5"]
    head = tmp_path_factory.mktemp("head")
    write_synthetic_head(head, KimiK2.from_pretrained(directory).config, "llama")
    return KimiK2.from_pretrained(directory, draft=str(head), sampling={"max_new_tokens": 8, "ignore_eos": True})


def asked(folder: Path) -> list[list[dict[str, Any]] | str]:
    """Conversations with and without pictures, and bare texts."""
    questions: list[list[dict[str, Any]] | str] = ["Hello", "a b a b a b a b"]
    for number in range(3):
        picture = folder / f"{number}.png"
        Image.new("RGB", (56 + 28 * number, 56), (80 * number, 9, 200)).save(picture)
        content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": "What is it?"}]
        questions.append([{"role": "user", "content": content}])
        questions.append([{"role": "user", "content": f"Question {number}?"}])
    return questions


def odd(value: Any) -> Any:
    """A value of a type that its argument does not take."""
    return value


def reply_of(model: KimiK2, question: list[dict[str, Any]] | str, **options: Any) -> str:
    if isinstance(question, str):
        return model.generate(question, **options)[0].text
    return model.chat(question, **options).text


def test_five_hundred_requests(seeing: KimiK2, tmp_path: Path) -> None:
    """Chat and generate, with drafts and pictures, in two and in eight threads; streams are read to their end, handed
    to another thread in the middle, closed or left there.
    """
    seeing, questions = replace(seeing, params=replace(seeing.params, max_new_tokens=6)), asked(tmp_path)
    prompts = [
        seeing.bare(question) if isinstance(question, str) else seeing.prompt(question) for question in questions
    ]
    texts = [reply_of(seeing, question) for question in questions]
    wanted = [
        [] if prompt.media else tokens(seeing.generator.stream([prompt.ids], seeing.params)) for prompt in prompts
    ]
    handed: list[tuple[list[int | None], Iterator[Step]]] = []  # what is to come, and the stream
    results: list[str] = []

    def check(found: Any, right: Any) -> None:
        results.append("right" if found == right else f"{found!r} in place of {right!r}")

    def ask(draw: random.Random) -> None:
        if handed:
            with contextlib.suppress(IndexError):  # another thread took it
                rest, steps = handed.pop()
                check(tokens(steps), rest)
        number, kind = draw.randrange(len(questions)), draw.randrange(6)
        if kind < 3:
            check(reply_of(seeing, questions[number], timeout=20), texts[number])
        elif kind == 3 or prompts[number].media:
            ((_, reply),) = seeing.answer([prompts[number]], timeout=20)
            check(reply.text, texts[number])
        else:
            ids, count = prompts[number].ids, draw.randrange(1, 6)
            steps = seeing.generator.stream([ids], seeing.params, timeout=20)
            check([next(steps).tokens[0] for _ in range(count)], wanted[number][:count])
            if kind == 4:
                handed.append((wanted[number][count:], steps))
            elif draw.random() < 0.5:
                steps.close()

    def work(seed: int, requests: int) -> None:
        draw = random.Random(seed)
        for _ in range(requests):
            try:
                ask(draw)
            except BusyError:
                results.append("busy")

    def together(threads: int) -> int:
        """The process's memory in bytes after half of the requests."""
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads), [256 // threads] * threads))
        while handed:
            handed.pop()[1].close()  # type: ignore[attr-defined]
        gc.collect()
        return psutil.Process().memory_info().rss

    assert isinstance(seeing.generator, Generator)
    before, cache = together(8), seeing.generator.prepare(1, 8)[0].data.numel()
    grown = together(2) - before
    counts = Counter(results)
    print(f"\n{dict(counts)}, {grown / 2**20:.1f} MiB more after the second half")
    assert set(counts) <= {"right", "busy"} and counts["right"] > 450
    assert seeing.generator.prepare(1, 8)[0].data.numel() == cache
    assert sum(isinstance(one, turns._Turn) for one in gc.get_objects()) <= 16, "a queue keeps nobody who has ended"
    assert grown < 32 * 2**20


def test_what_comments_asked_for_is_checked(model: KimiK2ForCausalLM, seeing: KimiK2, tmp_path: Path) -> None:
    """Of the public objects: a call out of order, or an argument that would mean something else, is refused by name."""
    text = replace(seeing, media_reader=None)
    picture = next(seeing.prompt(one) for one in asked(tmp_path) if isinstance(one, list))
    finished = MessageStream()
    finished.finish("stop")
    reasoned = ReasoningStream()
    reasoned.feed("", last=True)
    used = Timing([0.1])
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: seeing.generate("a", stop="END"), GenerationError, "stop: expected a list of strings of at least one"),
        (lambda: seeing.generate("a", stop=["x", ""]), GenerationError, "one character, got ['x', '']"),
        (lambda: list(text.answer([picture])), MediaError, "text only"),
        (lambda: list(seeing.answer([seeing.bare("a")], timing=used)), GenerationError, "another generation's steps"),
        (lambda: Generator(model, draft_tokens=0), GenerationError, "draft_tokens: expected at least 1"),
        (lambda: prefill(model, [[1, 2]], model.new_cache(1, 8), cached=2), GenerationError, "cached: expected fewer"),
        (lambda: finished.feed("more"), TokenizerError, "a stream of its own"),
        (finished.finish, TokenizerError, "a stream of its own"),
        (lambda: MessageStream().finish(odd("end")), TokenizerError, "expected stop, length or None, got 'end'"),
        (lambda: reasoned.feed("more"), TokenizerError, "a stream of its own"),
        (lambda: kimi_k2.plan("kimi-k2-instruct-0905", batch_size=odd(1.5)), ConfigError, "expected an integer"),
        (lambda: kimi_k2.plan("kimi-k2-instruct-0905", max_model_len=odd("8")), ConfigError, "expected an integer"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=re.escape(message)):
            call()
    assert str(Timing()) == "TTFT nan s, TPOT 0.0000 s, 0 steps"


def test_a_models_modes_are_read_for_each_generation(checkpoints: dict[str, Path]) -> None:
    """A kept cache is of the dtype that the model had; another one is asked for, another cache is made."""
    model = KimiK2ForCausalLM.from_pretrained(checkpoints["fp8"])
    generator = Generator(model)
    first = generator.prepare(1, 8)[0].data
    assert generator.prepare(1, 8)[0].data is first
    model.kv_cache_dtype = torch.bfloat16
    assert generator.prepare(1, 8)[0].data.dtype is torch.bfloat16
