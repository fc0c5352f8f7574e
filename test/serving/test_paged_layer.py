"""Layers over batches as engines make them: prompts in parts among decodes, whole prompts beside each other.

What a step's layers are told of several prompts, and the plain model's hidden states of each sequence.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from kimi_k2.engine import batch
from kimi_k2.engine.batch import Batch, RaggedChunk
from kimi_k2.engine.layer_step import LayerStep, through
from kimi_k2.model.decoder import DecoderLayer, KimiK2ForCausalLM
from kimi_k2.ops.linear import add_norm
from kimi_k2.serving.paged.heads import pad_heads

PAGE, PAGES = 4, 40
LENGTHS = (24, 12, 18)
# New tokens of each sequence in each step: whole prompts, parts of them, and single tokens, which come first.
STEPS: list[dict[int, int]] = [
    {0: 10, 1: 9},
    {1: 1, 0: 7, 2: 5},
    {1: 1, 0: 5, 2: 4},
    {0: 1, 1: 1, 2: 6},
    {2: 2},
    {0: 1, 2: 1},
]


@pytest.mark.parametrize(
    ("name", "heads", "together"),
    [
        ("bf16", None, True),
        ("thinking", None, True),
        ("thinking", None, False),  # prompts one by one
        ("bf16", 8, True),  # heads of zeros, in floats and in FP8 of whole blocks
        ("wide", 16, True),
    ],
)
@torch.inference_mode()
def test_prompts_in_parts(
    name: str, heads: int | None, together: bool, checkpoints: dict[str, Path], wide: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not together:
        monkeypatch.setattr(batch, "MOST_SLOTS", 0)
    torch.manual_seed(0)
    directory = {**checkpoints, "wide": wide}[name]
    whole, model = (
        KimiK2ForCausalLM.from_pretrained(directory, keep_quantized=True, dtype=torch.float32) for _ in range(2)
    )
    model.prepare()
    steps, config = list[LayerStep](), model.config
    caches = [torch.randn(PAGES, PAGE, config.cache_dim) for _ in model.model.layers]  # what others left
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        steps.append(LayerStep(layer, lambda x: x))
        if heads is not None:
            own = steps[-1].width
            pad_heads(steps[-1], heads)
            assert steps[-1].width == own // config.num_attention_heads * heads
    ids = [torch.randint(10, config.vocab_size, (length,)) for length in LENGTHS]
    table, done = torch.randperm(PAGES)[: len(LENGTHS) * 6].view(len(LENGTHS), 6), [0] * len(LENGTHS)
    found = [list[torch.Tensor]() for _ in LENGTHS]
    for padding, new in enumerate(STEPS):
        rows, counts, starts = list(new), list(new.values()), [0, *itertools.accumulate(new.values())]
        positions = [torch.arange(done[row], done[row] + count) for row, count in new.items()]
        slots = [table[row][at // PAGE] * PAGE + at % PAGE for row, at in zip(rows, positions, strict=True)]
        for row, count in new.items():
            done[row] += count
        lengths, decodes = [done[row] for row in rows], counts.count(1)
        step = Batch.of_sequences(
            starts, torch.tensor(starts).int(), torch.tensor(lengths).int(), lengths[decodes:], table[rows].int(),
            torch.cat((*slots, torch.full((padding,), -1))), PAGE, None,
        )  # fmt: skip
        for ragged in [side for chunk in step.chunks if isinstance(chunk, RaggedChunk) for side in chunk[1:3]]:
            # As kernels read them; the plain functions read the lengths.
            assert ragged.starts.tolist() == [0, *itertools.accumulate(ragged.lengths)]
            assert ragged.starts.dtype == torch.int32
        tokens = torch.cat([ids[row][at] for row, at in zip(rows, positions, strict=True)])
        x = model.model.embed_tokens(torch.cat((tokens, tokens.new_zeros(padding))))
        step.rotation = model.model.rotary(torch.cat((*positions, torch.zeros(padding, dtype=torch.int64))), x.dtype)
        norm = model.model.norm
        states = add_norm(*through(steps, x, step, caches, None), norm.weight, norm.eps)[1]
        for row, start, count in zip(rows, starts, counts, strict=False):
            found[row].append(states[start : start + count])
    for sequence, parts in zip(ids, found, strict=True):
        (wanted,) = whole.model(sequence.unsqueeze(0), torch.arange(len(sequence)).unsqueeze(0), None, len(sequence))
        torch.testing.assert_close(
            torch.cat(parts).float(), wanted.float(), rtol=0, atol=2e-5 * float(wanted.abs().max())
        )
