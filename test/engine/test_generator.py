"""Generations one after another over kept caches give what a fresh one gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kimi_k2.api import KimiK2
from kimi_k2.engine import generate as module
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep, capturable
from kimi_k2.engine.generate import Generator, generate, prefill
from kimi_k2.engine.graphs import Captured, Recorded
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import GenerationError, KernelError
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel import ranks
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder

PROMPTS = [[5, 6, 7, 8], [9, 10]]


@pytest.mark.parametrize("how", ["eager", "captured", "ranks"])
def test_a_next_turn_reads_what_is_new(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Tokens are those of a fresh cache; the model is given only what neither the prompt before nor its reply had."""
    monkeypatch.setattr(module, "capturable", lambda model, batch: how == "captured")
    monkeypatch.setattr(module, "SLOTS", 64)
    read: list[int] = []
    params, prompt, original = SamplingParams(max_new_tokens=6), list(range(5, 25)), prefill
    options: dict[str, Any] = {"keep_quantized": True}
    if how == "ranks":
        Presharder(wide, tmp_path, Layout(1, 1, "cuda", "stored")).run()
        options = {"ranks": tmp_path}

    def counted(model: KimiK2ForCausalLM, prompts: list[list[int]], *rest: object) -> torch.Tensor:
        read.append(len(prompts[0]) - cast(int, rest[-1]))
        return original(model, prompts, *rest)  # type: ignore[arg-type]

    def both(prompt: list[int]) -> tuple[list[int | None], list[int]]:
        monkeypatch.setattr(module, "prefill", counted)
        reply = [step.tokens[0] for step in generator.stream([prompt], params)]
        monkeypatch.setattr(module, "prefill", original)
        return reply, generate(generator.model, [prompt], params)[0]

    with KimiK2.open(wide, keep_cache=True, **options) as session:
        generator = cast(Generator, session.generator)
        for turn in range(3):
            reply, alone = both(prompt)
            assert reply == alone
            prompt = [*prompt, *alone, 7, 8, turn]
        assert read == [20, 4, 4]  # the reply's last token was chosen, not computed
        reply, alone = both([*prompt[:10], 3, 2])
        assert reply == alone
        assert read[-1] == 2
        again = [*prompt[:10], 3, 2]
        reply, alone = both(again)
        assert (reply, read[-1]) == (alone, 1)  # the last token's logits are wanted

        def fails(*given: Any) -> torch.Tensor:
            original(*given)
            raise GenerationError("behind what it wrote")

        monkeypatch.setattr(module, "prefill", fails)
        with pytest.raises(GenerationError, match="behind"):
            next(generator.stream([[1] * 15], params))
        reply, alone = both(again)
        assert (reply, read[-1]) == (alone, 12)


RAGGED = [list(range(5, 165)), [9, 10], [7], [3, 4, 5, 6], [8]]
EVEN = [*PROMPTS, *PROMPTS, [7]]


def test_prompts_of_unlike_lengths_share_pages(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a cache in one piece, in less than half its memory; the next generation gets other pages."""
    monkeypatch.setattr(module, "capturable", lambda model, batch: True)
    monkeypatch.setattr(module, "SLOTS", 64)
    model = KimiK2ForCausalLM.from_pretrained(wide, keep_quantized=True)
    generator, params = Generator(model), SamplingParams(max_new_tokens=6, ignore_eos=True)
    wanted, even = generate(model, RAGGED, params), generate(model, EVEN, params)

    def tokens(prompts: list[list[int]]) -> list[list[int | None]]:
        steps = generator.stream(prompts, params, chunk_size=50)
        return [list(row) for row in zip(*(step.tokens for step in steps), strict=True)]

    assert tokens(RAGGED) == wanted
    assert generator._step is not None
    cache = generator._step.cache
    assert (cache.pages, cache.max_length) == (7, 192)
    first = cache.block_table.tolist()
    assert sorted(page for row in first for page in row if page) == list(range(1, 8))
    assert tokens(RAGGED[::-1]) == wanted[::-1]
    assert generator._step.cache is cache and cache.block_table.tolist() != first
    assert tokens(EVEN) == even and generator._step.cache is cache
    longer = [RAGGED[0]] * 5
    assert tokens(longer) == [wanted[0]] * 5
    assert generator._step.cache.pages is None, "and all of one length lie in one piece"


def test_pages_that_are_too_few(wide: Path) -> None:
    config = KimiK2ForCausalLM.from_pretrained(wide).config
    cache = LatentCache(config, 2, 128, 3)
    assert not cache.fits([128]) and not cache.fits([129, 1])
    assert not LatentCache(config, 2, 64, 3).fits([65, 1])  # though so many pages are there
    with pytest.raises(GenerationError, match="4 pages, do not fit 2 sequences of 128 slots and 3 pages"):
        cache.assign([128, 65])
    with pytest.raises(GenerationError, match="exceeds max_position_embeddings"):
        LatentCache(config, 1, 10**9, 1)


def test_graphs_go_before_the_ranks_part(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends a group only when no graph holds launches of it; after an error nobody waits for the others."""
    done: list[str] = []

    monkeypatch.setattr(module, "capturable", lambda model, batch: True)
    monkeypatch.setattr(ranks, "leave_ranks", lambda: done.append("left"))
    generator = Generator(KimiK2ForCausalLM.from_pretrained(wide))

    def capture() -> None:
        step = generator.prepare(1, 4)[1]
        assert isinstance(step, DecodeStep)
        step._captured[torch.Size([1])] = Captured((), Recorded(print, (), lambda: done.append("reset")))

    with ranks.Rank(0, generator, Layout(1)):
        capture()
    assert done == ["reset", "left"]
    with pytest.raises(RuntimeError, match="lost"), ranks.Rank(0, generator, Layout(1)):
        capture()
        raise RuntimeError("lost")
    assert done == ["reset", "left", "reset"]


def test_on_a_cpu_nothing_is_captured(wide: Path) -> None:
    model = KimiK2ForCausalLM.from_pretrained(wide)
    assert not capturable(model, 1)
    with pytest.raises(KernelError, match="a graph needs a GPU"):
        DecodeStep(model, new_cache(model, 1, 4), graph=True)
    generator = Generator(model)
    assert generator.prepare(1, 5)[0].max_length == 5, "what is kept on a CPU is no larger than needed"
