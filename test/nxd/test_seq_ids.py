"""The order of a step's sequences between NxDI's callers and its graphs, without a graph; test_modes runs them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import environment
import pytest
import torch

LINES = 4


class Recorded:
    """Arguments of NxDI's `forward`, which gives each row's line back, and two caches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, device: bool, images: bool = False, **options: Any) -> None:
        from neuronx_distributed_inference.models.model_wrapper import ModelWrapper

        self.given: list[torch.Tensor] = []
        self.caches = [torch.zeros(LINES, 1), torch.ones(LINES, 1)]
        monkeypatch.setattr(ModelWrapper, "forward", self.forward)
        kind = environment.contrib("image_to_text").KimiK25TextWrapper if images else None
        kind = kind or environment.contrib("cpu_mode").KimiK2ModelWrapper
        self.wrapper = kind.__new__(kind)
        torch.nn.Module.__init__(self.wrapper)
        states = SimpleNamespace(past_key_values=self.caches)
        self.device = device
        settings = {"async_mode": False, "is_prefix_caching": False, **options}
        for name, value in settings.items():
            object.__setattr__(self.wrapper, name, value)
        object.__setattr__(self.wrapper, "is_neuron", lambda: device)
        neuron = SimpleNamespace(batch_size=LINES, lora_config=None)
        object.__setattr__(self.wrapper, "model", SimpleNamespace(kv_mgr=states, neuron_config=neuron))
        object.__setattr__(self.wrapper, "neuron_config", neuron)

    def forward(self, *args: Any, **_: Any) -> list[torch.Tensor]:
        self.given = list(args)
        outputs = [args[0] * 10, args[3]]
        return outputs if self.device else [*outputs, *self.caches]

    def __call__(self, lines: list[int]) -> list[torch.Tensor]:
        seq_ids = torch.tensor(lines)
        ids, mask, positions = seq_ids[:, None] + 100, torch.ones(len(lines), 3), seq_ids[:, None] + 7
        found: list[torch.Tensor] = self.wrapper(ids, mask, positions, seq_ids, torch.tensor(5.0), "as it is")
        return found


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("lines", [[0, 1, 2, 3], [3, 0, 2, 1], [1, 2, 3, 0]])
def test_a_full_batch_is_given_in_the_order_of_its_lines(
    monkeypatch: pytest.MonkeyPatch, lines: list[int], device: bool
) -> None:
    recorded = Recorded(monkeypatch, device=device)
    outputs = recorded(lines)
    ids, _, positions, seq_ids, *rest = recorded.given
    assert seq_ids.tolist() == [0, 1, 2, 3]
    assert (ids[:, 0] - 100).tolist() == (positions[:, 0] - 7).tolist() == seq_ids.tolist()
    assert rest == [torch.tensor(5.0), "as it is"]
    # Each row's outputs come back where its caller has it; caches stay in the order of the lines.
    assert [one.flatten().tolist() for one in outputs[:2]] == [[10 * (100 + line) for line in lines], lines]
    assert all(found is held for found, held in zip(outputs[2:], () if device else recorded.caches, strict=True))


@pytest.mark.parametrize(
    ("lines", "options"),
    [([2, 0], {}), ([3, 0, 2, 1], {"is_prefix_caching": True}), ([0, 1, 2, 3], {"async_mode": True})],
    ids=["a part, which NxDI puts in order", "block tables say where", "in order"],
)
def test_what_needs_no_order_is_handed_on(
    monkeypatch: pytest.MonkeyPatch, lines: list[int], options: dict[str, Any]
) -> None:
    recorded = Recorded(monkeypatch, device=True, **options)
    recorded(lines)
    assert recorded.given[3].tolist() == lines


def test_rows_of_images_stay_where_the_index_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows of images as sequences: their index is a row of the batch, they are not."""
    recorded = Recorded(monkeypatch, device=True, images=True)
    seq_ids = torch.tensor([3, 0, 2, 1])
    index, rows = seq_ids[:, None] * 3, torch.arange(LINES)[:, None]
    recorded.wrapper(seq_ids[:, None], seq_ids, seq_ids, seq_ids, *[torch.empty(0)] * 18, rows, index)
    assert recorded.given[22] is rows
    assert recorded.given[23].flatten().tolist() == [0, 3, 6, 9]


def test_asynchronous_steps_refuse_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"seq_ids: expected ascending cache lines.*\[3, 0, 2, 1\]"):
        Recorded(monkeypatch, device=True, async_mode=True)([3, 0, 2, 1])
