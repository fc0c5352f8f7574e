"""Stages of a pipeline as vLLM calls them: what they hand on makes the whole model's hidden states, to the bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import Batch, Chunk
from kimi_k2.errors import MissingTensorError
from kimi_k2.serving.paged.model import PagedModel
from kimi_k2.sharding.layout import STORED, Layout

needs.engine("vllm")

TOKENS, LAYERS = 6, 3


class Held:
    """A cache of one page, for one prompt."""

    def __init__(self, config: KimiK2Config) -> None:
        self.cache = torch.zeros(1, TOKENS, config.cache_dim)

    def batch(self) -> Batch:
        places = torch.arange(TOKENS)
        chunk = Chunk(slice(0, TOKENS), slice(0, 1), places.unsqueeze(0), TOKENS, whole=True)
        return Batch(TOKENS, 0, torch.tensor([TOKENS]).int(), places, torch.zeros(1, 1).int(), [chunk])


def stage(directory: Path, layers: range, first: bool, last: bool) -> Any:
    """What `forward` reads of our model in vLLM."""
    config, group = KimiK2Config.from_pretrained(directory), torch.distributed.GroupMember.WORLD
    held: Any = [Held(config) for _ in layers]
    given = Layout(1, target="cuda", experts=STORED), 0, group, held, TOKENS, torch.float32, torch.device("cpu")
    paged = PagedModel(config, *given, layers=layers)  # type: ignore[arg-type]
    for file in sorted(directory.glob("*.safetensors")):
        paged.load(load_file(file).items())
    paged.loader.check()
    return SimpleNamespace(
        paged=paged, plain=paged.plain, held=held, embed_input_ids=paged.embed, loras=None, _seen=(),
        _graphs_of=lambda *_: None, _record=lambda x: None,
        _pp=SimpleNamespace(is_first_rank=first, is_last_rank=last, world_size=2),
    )  # fmt: skip


@pytest.mark.parametrize("cut", [1, 2])
def test_two_stages(cut: int, checkpoints: dict[str, Path]) -> None:
    from kimi_k2.serving.vllm.model import KimiK2ForVllm

    forward, ids, places = KimiK2ForVllm.forward, torch.randint(10, 700, (TOKENS,)), torch.arange(TOKENS)
    whole = stage(checkpoints["thinking"], range(LAYERS), first=True, last=True)
    wanted: Tensor = forward(whole, ids, places)
    assert wanted.shape == (TOKENS, whole.paged.plain.config.hidden_size)
    front = stage(checkpoints["thinking"], range(cut), first=True, last=False)
    back = stage(checkpoints["thinking"], range(cut, LAYERS), first=False, last=True)
    handed = forward(front, ids, places)
    assert sorted(handed.tensors) == ["hidden_states", "residual"]
    assert torch.equal(forward(back, None, places, handed), wanted)
    assert torch.equal(back.paged.logits(wanted), whole.paged.logits(wanted))
    assert [len(one.paged.steps) for one in (front, back)] == [cut, LAYERS - cut]


def test_a_stage_whose_layer_has_not_come(checkpoints: dict[str, Path]) -> None:
    one = stage(checkpoints["thinking"], range(1, LAYERS), first=False, last=True)
    one.paged.loader.filled = {name: count * (".2." not in name) for name, count in one.paged.loader.filled.items()}
    with pytest.raises(MissingTensorError, match=r"model\.layers\.2\."):
        one.paged.loader.check()
