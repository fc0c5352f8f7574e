"""Prompts and steps of an application in a given order, on gloo ranks and on executed graphs alike.

The steps of a script:

- ["prompts", rows]: a whole batch;
- ["media", rows, media, lines]: prompts with images, a whole batch or into cache lines;
- ["prefill", line, tokens, cached]: one prompt into a cache line; its first `cached` tokens are in the cache already;
- ["share", line, other, tokens]: a line begins with the cache blocks of another's first tokens;
- ["decode", lines, tokens, positions]: a step of some lines in any order, with one token each or several.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Tokens = list[int]
EVERY = [0, 1, 2, 3]
DECODE_STEPS = 16
LENGTHS = {1: [24], 4: [24, 7, 1, 13]}


def prompts(app: Any, rows: list[Tokens], **more: Any) -> torch.Tensor:
    """Logits [B, vocab] of the last tokens of a batch; `more` goes to the call."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    slots = torch.arange(width)
    mask = (slots < lengths[:, None]).to(torch.int32)
    # NxDI's convention for right padding: position 1 marks a pad.
    positions = torch.where(mask.bool(), slots.expand_as(ids), torch.ones_like(ids))
    logits: torch.Tensor = app(input_ids=ids, attention_mask=mask, position_ids=positions, **more).logits[:, -1]
    return logits


def line_options(app: Any, lines: list[int]) -> dict[str, torch.Tensor]:
    """Arguments of a call for cache lines that are named."""
    if not app.neuron_config.is_continuous_batching:
        return {}
    return {"seq_ids": torch.tensor(lines), "sampling_params": torch.ones(len(lines), 3)}


def decode(app: Any, tokens: Any, positions: Sequence[int], **more: Any) -> Any:
    """NxDI's output of a step: tokens [B, S] whose first ones stand at `positions`; `more` goes to the call."""
    ids, first = torch.tensor(tokens), torch.tensor(positions)[:, None]
    mask = (torch.arange(int(first.max()) + 1) < first).to(torch.int32)
    return app(input_ids=ids, attention_mask=mask, position_ids=first + torch.arange(ids.shape[1]), **more)


class Lines:
    """An application's cache lines, with block tables as a scheduler holds them where it has prefix caching.

    A table has any free blocks, in no order; shared blocks hold a common prefix.
    """

    def __init__(self, app: Any, more: dict[str, Any]) -> None:
        neuron = app.neuron_config
        self.app, self.more = app, more
        self.size = neuron.pa_block_size if neuron.is_prefix_caching else 0
        if self.size:
            draw = torch.Generator().manual_seed(neuron.pa_num_blocks)
            self.free = torch.randperm(neuron.pa_num_blocks, generator=draw).tolist()
        self.tables: dict[int, list[int]] = {}

    def _blocks(self, lines: list[int], starts: list[int], ends: list[int]) -> dict[str, torch.Tensor]:
        """Arguments that say where tokens lie; blocks for them are added. Padding is block 0."""
        if not self.size:
            return {}
        slots = []
        for line, start, end in zip(lines, starts, ends, strict=True):
            table = self.tables.setdefault(line, [])
            while len(table) * self.size < end:
                table.append(self.free.pop())
            slots.append([table[at // self.size] * self.size + at % self.size for at in range(start, end)])
        tables = [self.tables[line] for line in lines]
        longest = max(map(len, tables))
        return {
            "slot_mapping": torch.tensor(slots),
            "block_table": torch.tensor([table + [0] * (longest - len(table)) for table in tables]),
            "full_context_lens": torch.tensor(ends)[:, None],
            "computed_context_lens": torch.tensor(starts)[:, None],
        }

    def prompts(self, rows: list[Tokens]) -> torch.Tensor:
        """Logits [B, vocab]."""
        return prompts(self.app, rows, **self.more)

    def media(self, rows: list[Tokens], media: list[Any], lines: list[int] | None) -> torch.Tensor:
        """Logits [B, vocab]; media are those of each row."""
        logits: torch.Tensor = self.app.prefill(rows, media, torch.tensor(lines) if lines else None).logits[:, -1]
        return logits

    def share(self, line: int, other: int, tokens: int) -> None:
        """Begin a line with the blocks of another's first tokens."""
        self.tables[line] = self.tables[other][: tokens // self.size]

    def prefill(self, line: int, tokens: Tokens, cached: int) -> torch.Tensor:
        """Logits [1, vocab] of the last token."""
        more = line_options(self.app, [line]) | self._blocks([line], [cached], [len(tokens)])
        return prompts(self.app, [tokens], **more, **self.more)

    def decode(self, lines: list[int], tokens: list[Tokens], positions: list[int]) -> torch.Tensor:
        """Logits [B * S, vocab] of a step; where tokens are chosen greedily on the device, they are the likeliest."""
        ends = [at + len(tokens[0]) for at in positions]
        more = line_options(self.app, lines) | self._blocks(lines, positions, ends)
        out = decode(self.app, tokens, positions, **more, **self.more)
        logits: torch.Tensor = out.logits.flatten(0, 1)
        sampling = self.app.neuron_config.on_device_sampling_config
        if sampling is not None and not sampling.do_sample:
            assert torch.equal(out.tokens.flatten(), logits.argmax(-1)), "tokens are not the likeliest"
        return logits


class Script(NamedTuple):
    """Steps, and of each row of their logits the tokens that it stands behind."""

    steps: list[list[Any]]
    of: list[Tokens]

    @torch.inference_mode()
    def run(self, app: Any, **more: Any) -> torch.Tensor:
        """The application's logits [rows, vocab]; `more` goes to every call."""
        lines = Lines(app, more)
        found = [getattr(lines, name)(*arguments) for name, *arguments in self.steps]
        return torch.cat([logits for logits in found if logits is not None])

    @torch.inference_mode()
    def expected(self, model: Any) -> torch.Tensor:
        """Logits [rows, vocab] of the plain or transformers' model, from uncached passes."""
        passes: list[tuple[Tokens, torch.Tensor]] = []
        for tokens in sorted(self.of, key=len, reverse=True):
            if not any(longer[: len(tokens)] == tokens for longer, _ in passes):
                out = model(torch.tensor([tokens]))
                passes.append((tokens, (out if isinstance(out, torch.Tensor) else out.logits)[0]))
        return torch.stack([
            next(logits[len(tokens) - 1] for longer, logits in passes if longer[: len(tokens)] == tokens)
            for tokens in self.of
        ])  # fmt: skip

    def prefill(self, line: int, tokens: Tokens, cached: int = 0) -> None:
        """Add a prompt into a cache line, whose first `cached` tokens are there already."""
        self.steps.append(["prefill", line, tokens, cached])
        self.of.append(tokens)

    def decode(self, rows: list[Tokens], at: list[int], lines: list[int], drafts: int = 0, keep: int = 1) -> None:
        """Add a step of `lines`: `keep` tokens of their rows behind position `at`, and `drafts` others, refused."""
        step = [rows[line][at[line] : at[line] + keep] for line in lines]
        for tokens, line in zip(step, lines, strict=True):
            tokens += [(token + 1) % 512 for token in rows[line][at[line] + keep : at[line] + keep + drafts]]
        self.steps.append(["decode", lines, step, [at[line] for line in lines]])
        for tokens, line in zip(step, lines, strict=True):
            self.of.extend(rows[line][: at[line]] + tokens[: count + 1] for count in range(keep + drafts))
            at[line] += keep


def drawn(count: int, length: int, seed: int = 3) -> list[Tokens]:
    """Random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(512) for _ in range(length)] for _ in range(count)]


def begun(rows: list[Tokens], at: list[int], arrival: list[int] | None = None) -> Script:
    """Prompts of the lengths `at`: a whole batch, or in the order of `arrival` each into its own cache line."""
    texts = [row[:end] for row, end in zip(rows, at, strict=True)]
    script = Script([["prompts", texts]], [*texts]) if arrival is None else Script([], [])
    for line in arrival or ():
        script.prefill(line, texts[line])
    return script


def sequences(
    batch: int, steps: int = DECODE_STEPS, arrival: list[int] | None = None, lengths: Sequence[int] = (), seed: int = 1
) -> Script:
    """Prompts of ragged length, and one-token steps of all lines."""
    at = list(lengths or LENGTHS[batch])
    rows = drawn(batch, max(at) + steps, seed)
    script = begun(rows, at, arrival)
    for _ in range(steps):
        script.decode(rows, at, list(range(batch)))
    return script


def with_drafts(batch: int) -> Script:
    """Steps of all lines and four tokens, of which a part is kept."""
    rows, at = drawn(batch, 48), [11, 7, 5, 13][:batch]
    script = begun(rows, at)
    for keep in (4, 3, 1, 2, 4, 1):
        script.decode(rows, at, list(range(batch)), 4 - keep, keep)
    return script


def some_lines(at: list[int]) -> Script:
    """Four prompts of the lengths `at`, one by one; then steps of some lines and of all, in several orders."""
    rows, at = drawn(4, max(at) + 40), list(at)
    script = begun(rows, at, [2, 0, 3, 1])
    for lines in ([1], [1, 2], [3, 1], EVERY, [0], [2, 0, 3], [3, 0, 2, 1], [2, 0], EVERY):
        script.decode(rows, at, lines)
    return script


def shared_prefixes(seed: int = 3) -> Script:
    """Four sequences of which the first 16 tokens are the same.

    Sequence 0 is prefilled whole, 1 and 2 behind its blocks, 3 in a call of one token and again in two,
    of which the last is longer than a prefill graph takes; then steps of all, and of some.
    """
    rows, script, common = drawn(4, 48, seed), Script([], []), 16
    rows = [rows[0][:common] + row[common:] for row in rows]
    at = [common + 5, common + 3, common + 9, common + 21]
    script.prefill(0, rows[0][: at[0]])
    for line in (1, 2):
        script.steps.append(["share", line, 0, common])
        script.prefill(line, rows[line][: at[line]], common)
    for begin, end in ((0, 1), (0, 8), (8, at[3])):
        script.prefill(3, rows[3][:end], begin)
    for lines in (EVERY, [2, 0], [3], [1, 3, 0, 2], [3, 1]):
        script.decode(rows, at, lines)
    return script


class Captured(NamedTuple):
    """A prompt of one sequence, and forced tokens, of an application that captures modules."""

    prompt: Tokens
    forced: Sequence[int] = ()

    @torch.inference_mode()
    def run(self, app: Any) -> list[torch.Tensor]:
        """What each captured module gave at every position, [S, width]."""
        ids = torch.tensor([self.prompt])
        out = app(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(ids.shape[1])[None])
        found = [[tensor.reshape(-1, tensor.shape[-1])[: ids.shape[1]] for tensor in out.captured_tensors]]
        for at, token in enumerate(self.forced, start=ids.shape[1]):
            out = decode(app, [[token]], [at])
            found.append([tensor.reshape(1, -1) for tensor in out.captured_tensors])
        return [torch.cat(parts) for parts in zip(*found, strict=True)]


class Filled(NamedTuple):
    """Forced tokens of one sequence behind `start`, where the caches of executed graphs are full to there."""

    caches: dict[str, list[torch.Tensor]]  # one tensor a rank, or one for all
    start: int
    forced: Tokens

    @torch.inference_mode()
    def run(self, app: Any) -> torch.Tensor:
        """Logits [steps, vocab]."""
        app.kv_cache_populated = True
        app.traced_model.nxd_model.fill(self.caches)
        steps = enumerate(self.forced, start=self.start)
        return torch.cat([decode(app, [[token]], [at]).logits[:, -1] for at, token in steps])
