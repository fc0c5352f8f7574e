"""Prefills behind cached prefixes and steps through block tables, on gloo ranks and on executed graphs alike."""

from __future__ import annotations

from typing import Any

import torch


class Blocks:
    """Block tables as a scheduler holds them: any free block, in no order; shared blocks hold a common prefix."""

    def __init__(self, app: Any) -> None:
        neuron = app.neuron_config
        self.app, self.size = app, neuron.pa_block_size
        draw = torch.Generator().manual_seed(neuron.pa_num_blocks)
        self.free = torch.randperm(neuron.pa_num_blocks, generator=draw).tolist()
        self.tables: dict[int, list[int]] = {}

    def extend(self, row: int, length: int) -> None:
        """Blocks for `length` tokens of a sequence."""
        table = self.tables.setdefault(row, [])
        while len(table) * self.size < length:
            table.append(self.free.pop())

    def share(self, row: int, other: int, tokens: int) -> None:
        """Begin a sequence with the blocks of another's first tokens."""
        self.tables[row] = self.tables[other][: tokens // self.size]

    def slots(self, row: int, start: int, end: int) -> list[int]:
        """Cache slots of a sequence's positions."""
        return [self.tables[row][at // self.size] * self.size + at % self.size for at in range(start, end)]

    def table(self, rows: list[int]) -> torch.Tensor:
        """Block tables [B, longest], padded with block 0."""
        longest = max(len(self.tables[row]) for row in rows)
        return torch.tensor([self.tables[row] + [0] * (longest - len(self.tables[row])) for row in rows])

    def prefill(self, row: int, tokens: list[int], cached: int) -> torch.Tensor:
        """Logits [vocab] of the last token; the first `cached` tokens are in the cache already."""
        count = len(tokens)
        self.extend(row, count)
        ids = torch.tensor([tokens])
        out = self.app(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(count)[None],
            seq_ids=torch.tensor([row]),
            sampling_params=torch.ones(1, 3),
            slot_mapping=torch.tensor([self.slots(row, cached, count)]),
            block_table=self.table([row]),
            full_context_lens=torch.tensor([[count]]),
            computed_context_lens=torch.tensor([[cached]]),
        )
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def decode(self, rows: list[int], tokens: list[int], at: list[int]) -> torch.Tensor:
        """Logits [B, vocab] of one step of some sequences, in any order."""
        for row, position in zip(rows, at, strict=True):
            self.extend(row, position + 1)
        positions = torch.tensor(at)[:, None]
        mask = (torch.arange(int(positions.max())) < positions).to(torch.int32)
        out = self.app(
            input_ids=torch.tensor(tokens)[:, None],
            attention_mask=mask,
            position_ids=positions,
            seq_ids=torch.tensor(rows),
            sampling_params=torch.ones(len(rows), 3),
            slot_mapping=torch.tensor([self.slots(row, where, where + 1) for row, where in zip(rows, at, strict=True)]),
            block_table=self.table(rows),
            full_context_lens=positions + 1,
            computed_context_lens=positions,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


@torch.inference_mode()
def run(app: Any, script: list[list[Any]]) -> list[torch.Tensor]:
    """Logits of each step of a script, one row a sequence.

    Steps: ["share", row, other, tokens]; ["prefill", row, tokens, cached]; ["decode", rows, tokens, positions].
    """
    blocks = Blocks(app)
    found: list[torch.Tensor] = []
    for name, *arguments in script:
        result = getattr(blocks, name)(*arguments)
        if result is not None:
            found.extend(result if result.dim() == 2 else [result])
    return found


def script(rows: list[list[int]], common: int) -> tuple[list[list[Any]], list[list[int]]]:
    """A script over four sequences of which the first `common` tokens are the same, and what each logit row is of.

    Sequence 0 is prefilled whole, 1 and 2 behind its blocks, 3 in a call of one token and again in two,
    of which the last is longer than a prefill graph takes; then steps of all, and of some.
    """
    steps: list[list[Any]] = []
    of: list[list[int]] = []
    at = [common + 5, common + 3, common + 9, common + 21]

    def prefill(row: int, count: int, cached: int) -> None:
        steps.append(["prefill", row, rows[row][:count], cached])
        of.append(rows[row][:count])

    prefill(0, at[0], 0)
    for row in (1, 2):
        steps.append(["share", row, 0, common])
        prefill(row, at[row], common)
    for begin, end in ((0, 1), (0, 8), (8, at[3])):
        prefill(3, end, begin)
    for chosen in ([0, 1, 2, 3], [2, 0], [3], [1, 3, 0, 2], [3, 1]):
        steps.append(["decode", chosen, [rows[row][at[row]] for row in chosen], [at[row] for row in chosen]])
        for row in chosen:
            at[row] += 1
            of.append(rows[row][: at[row]])
    return steps, of
