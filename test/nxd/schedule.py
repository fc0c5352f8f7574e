"""Prompts and steps of an application in a given order, on gloo ranks and on executed graphs alike.

The steps of a script:

- ["prompts", rows]: a whole batch;
- ["prefill", line, tokens, cached]: one prompt into a cache line; its first `cached` tokens are in the cache already;
- ["share", line, other, tokens]: a line begins with the cache blocks of another's first tokens;
- ["decode", lines, tokens, positions]: a step of some lines in any order, with one token each or several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

Tokens = list[int]


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

    def __init__(self, app: Any) -> None:
        neuron = app.neuron_config
        self.app = app
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
        return prompts(self.app, rows)

    def share(self, line: int, other: int, tokens: int) -> None:
        """Begin a line with the blocks of another's first tokens."""
        self.tables[line] = self.tables[other][: tokens // self.size]

    def prefill(self, line: int, tokens: Tokens, cached: int) -> torch.Tensor:
        """Logits [1, vocab] of the last token."""
        more = line_options(self.app, [line]) | self._blocks([line], [cached], [len(tokens)])
        return prompts(self.app, [tokens], **more)

    def decode(self, lines: list[int], tokens: list[Tokens], positions: list[int]) -> torch.Tensor:
        """Logits [B * S, vocab] of a step."""
        ends = [at + len(tokens[0]) for at in positions]
        more = line_options(self.app, lines) | self._blocks(lines, positions, ends)
        logits: torch.Tensor = decode(self.app, tokens, positions, **more).logits
        return logits.flatten(0, 1)


@torch.inference_mode()
def run(app: Any, steps: list[list[Any]]) -> torch.Tensor:
    """Logits [rows, vocab] of a script's steps."""
    lines = Lines(app)
    found = [getattr(lines, name)(*arguments) for name, *arguments in steps]
    return torch.cat([one for one in found if one is not None])


@torch.inference_mode()
def expected(model: Any, of: list[Tokens]) -> torch.Tensor:
    """The plain model's logits [rows, vocab] of the last of each row's tokens."""
    passes: list[tuple[Tokens, torch.Tensor]] = []
    for tokens in sorted(of, key=len, reverse=True):
        if not any(longer[: len(tokens)] == tokens for longer, _ in passes):
            passes.append((tokens, model(torch.tensor([tokens]))[0]))
    return torch.stack([
        next(logits[len(tokens) - 1] for longer, logits in passes if longer[: len(tokens)] == tokens) for tokens in of
    ])  # fmt: skip


class Script(NamedTuple):
    """Steps, and of each row of their logits the tokens that it stands behind."""

    steps: list[list[Any]]
    of: list[Tokens]

    def decode(self, rows: list[Tokens], at: list[int], lines: list[int], drafts: int = 0, keep: int = 1) -> None:
        """Add a step of `lines`: `keep` tokens of their rows behind position `at`, and `drafts` others, refused."""
        step = [rows[line][at[line] : at[line] + keep] for line in lines]
        for tokens, line in zip(step, lines, strict=True):
            tokens += [(token + 1) % 512 for token in rows[line][at[line] + keep : at[line] + keep + drafts]]
        self.steps.append(["decode", lines, step, [at[line] for line in lines]])
        for tokens, line in zip(step, lines, strict=True):
            self.of.extend(rows[line][: at[line]] + tokens[: count + 1] for count in range(keep + drafts))
            at[line] += keep


def whole_batch(rows: list[Tokens], at: list[int], accepted: Iterable[int], width: int) -> Script:
    """Prompts of the lengths `at`; steps of all lines and `width` tokens, of which `accepted` are kept."""
    made, at = Script([["prompts", [row[:end] for row, end in zip(rows, at, strict=True)]]], []), list(at)
    made.of.extend(row[:end] for row, end in zip(rows, at, strict=True))
    for keep in accepted:
        made.decode(rows, at, list(range(len(rows))), width - keep, keep)
    return made


def some_lines(rows: list[Tokens], at: list[int]) -> Script:
    """Four prompts of the lengths `at`, one by one; then steps of some lines and of all, in several orders."""
    made, at = Script([], []), list(at)
    for line in (2, 0, 3, 1):
        made.steps.append(["prefill", line, rows[line][: at[line]], 0])
        made.of.append(rows[line][: at[line]])
    for lines in ([1], [1, 2], [3, 1], [0, 1, 2, 3], [0], [2, 0, 3], [3, 0, 2, 1], [2, 0], [0, 1, 2, 3]):
        made.decode(rows, at, lines)
    return made


def shared_prefixes(rows: list[Tokens], common: int) -> Script:
    """Four sequences of which the first `common` tokens are the same.

    Sequence 0 is prefilled whole, 1 and 2 behind its blocks, 3 in a call of one token and again in two,
    of which the last is longer than a prefill graph takes; then steps of all, and of some.
    """
    made = Script([], [])
    at = [common + 5, common + 3, common + 9, common + 21]

    def prefill(line: int, count: int, cached: int) -> None:
        made.steps.append(["prefill", line, rows[line][:count], cached])
        made.of.append(rows[line][:count])

    prefill(0, at[0], 0)
    for line in (1, 2):
        made.steps.append(["share", line, 0, common])
        prefill(line, at[line], common)
    for begin, end in ((0, 1), (0, 8), (8, at[3])):
        prefill(3, end, begin)
    for lines in ([0, 1, 2, 3], [2, 0], [3], [1, 3, 0, 2], [3, 1]):
        made.decode(rows, at, lines)
    return made
