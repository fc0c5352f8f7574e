"""Prefill in the decode step's arrangement, on a GPU replayed from CUDA graphs of padded sizes.

Launched one by one, a short prefill takes the host longer than the GPU. A graph has fixed sizes, so that a chunk is
padded to one of few widths and attends over one of few lengths; a size that comes a second time is captured. What is
captured follows from sizes and from how often they came, which are the same on all ranks (`graphs.on_all_ranks`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from kimi_k2.engine.batch import Batch, Chunk
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.graphs import Captured, give_up, on_all_ranks
from kimi_k2.engine.layer_step import through
from kimi_k2.errors import GenerationError
from kimi_k2.model.decoder import HiddenStates
from kimi_k2.ops.embedding import place_embeddings
from kimi_k2.ops.mla import token_places

# Tokens of all sequences up to which a graph is made: beyond, the GPU is busy while the host launches.
MAX_CAPTURED = 4096
# Graphs kept, the last used.
MAX_GRAPHS = 4
NARROWEST = 16


def padded_width(tokens: int) -> int:
    """The width that a chunk of so many tokens is padded to: a multiple of a quarter of the power of two below it."""
    step = max(NARROWEST, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


# Width of a chunk, slots to attend over, `whole` of `PromptStep.run`.
Size = tuple[int, int, bool]
Media = tuple[Tensor, Tensor]


class PromptStep:
    """Logits of one token of each prompt's chunk, whose entries go to the decode step's cache.

    Every rank must make the same calls. A size that one of them cannot capture is launched one by one on all.

    Args:
        step: gives model, cache, layers, the sums over ranks and `aux_layers`; its `record` says whether sizes are
            captured.

    Attributes:
        aux: the hidden states [B, S, layers * H] of the last chunk, which another call may overwrite; None without
            `aux_layers`.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.step, self.model, self.cache = step, step.model, step.cache
        self.aux: Tensor | None = None
        self._captured: OrderedDict[Size, Captured] = OrderedDict()
        self._seen: set[Size] = set()
        self._refused: set[Size] = set()

    @torch.inference_mode()
    def __call__(self, ids: Tensor, positions: Tensor, last: Tensor, media: Media | None = None) -> Tensor:
        """int64 [B, S], int64 [B, S] and int64 [B] to logits [B, vocab_size], which another call may overwrite.

        Args:
            ids: token ids.
            positions: of each in its sequence, negative for padding.
            last: the column of each sequence whose logits are wanted.
            media: embeddings of images and videos, as `place_embeddings` takes them; such a chunk is not captured.

        Raises:
            GenerationError: a position lies outside the cache, a token id outside the vocabulary.
        """
        batch, width = ids.shape
        length, vocabulary = int(positions.max()) + 1, self.model.config.vocab_size
        if length > self.cache.max_length:
            raise GenerationError(f"position {length - 1} is outside the cache of {self.cache.max_length} slots")
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise GenerationError(f"token ids must be in 0..{vocabulary - 1}")
        device = self.cache.data.device
        whole = bool((positions == torch.arange(length - width, length, device=positions.device)).all())
        if self.step.record is None or media is not None or batch * padded_width(width) > MAX_CAPTURED:
            return self.run(ids.to(device), positions.to(device), last.to(device), length, whole, media)
        wide, padded = padded_width(width), min(padded_width(length), self.cache.max_length)
        key = wide, padded, whole and (wide, padded) == (width, length)
        # Padding is routed too, and an expert's sums may follow how many tokens it has: it is the same in each call.
        ids, positions = pad(ids, (0, wide - width)), pad(positions, (0, wide - width), value=-1)
        if key not in self._captured:
            inputs = ids.to(device), positions.to(device), last.to(device)
            if key not in self._seen or key in self._refused or not self._capture(key, *inputs):
                self._seen.add(key)
                logits = self.run(*inputs, *key[1:])
                self.aux = None if self.aux is None else self.aux[:, :width]
                return logits
        self._captured.move_to_end(key)
        logits, *aux = self._captured[key](ids, positions, last)
        if aux:
            self.aux = aux[0][:, :width]
        return logits

    def _capture(self, size: Size, ids: Tensor, positions: Tensor, last: Tensor) -> bool:
        """Whether every rank holds a graph of this size now."""
        record, run = self.step.record, partial(self.run, ids, positions, last, *size[1:])
        assert record is not None
        run()  # builds and communicators are made outside the capture
        while len(self._captured) >= MAX_GRAPHS:
            self._captured.popitem(last=False)[1].graph.reset()

        def agree(here: bool) -> bool:
            return not int(self.step.reduce(torch.tensor([not here], dtype=torch.int32, device=ids.device)))

        made, reason = on_all_ranks(lambda: [record(lambda: (run(), *self._aux()))], agree)
        if not made:
            self._refused.add(size)
            warnings.warn(f"prompts of {size[0]} tokens are launched one by one, not captured: {reason}", stacklevel=3)
            return False
        self._captured[size] = Captured((ids, positions, last), made[0])
        return True

    def _aux(self) -> tuple[Tensor, ...]:
        return () if self.aux is None else (self.aux,)

    def run(
        self, ids: Tensor, positions: Tensor, last: Tensor, length: int, whole: bool = False, media: Media | None = None
    ) -> Tensor:
        """The chunk, launch by launch; arguments on the model's device.

        Args:
            length: cache slots to attend over, at least the largest position + 1.
            whole: the chunk's tokens are those of the last S slots, none of them padding.
        """
        with self.model.computing():
            x = self.model.model.embed_tokens(ids)
            if media is not None:
                x = place_embeddings(x, *media)
            batch = self.batch(positions, x.dtype, length, whole)
            states = HiddenStates(self.step.aux_layers)
            x, delta = through(self.step.layers, x.flatten(0, 1), batch, self.cache.data, states)
            if self.step.aux_layers:
                self.aux = states.joined().view(*ids.shape, -1)
            rows = last + torch.arange(len(last), device=last.device) * ids.shape[1]
            return self.step.head(x[rows], delta[rows])

    def batch(self, positions: Tensor, dtype: torch.dtype, length: int, whole: bool = False) -> Batch:
        """A chunk of each prompt at int64 [B, S] positions; cos and sin in `dtype`, the rest as `run` takes it."""
        cache, count = self.cache, positions.numel()
        _, slots = token_places(positions, cache.block_table, cache.page)
        rotation = self.model.model.rotary(positions.flatten(), dtype)
        chunk = Chunk(slice(0, count), slice(0, len(positions)), positions, length, whole)
        return Batch(count, 0, slots[:0], slots, cache.table, [chunk], rotation)

    def close(self) -> None:
        """Give the graphs up, as `DecodeStep.close`."""
        give_up(self._captured)
        self._refused.clear()
