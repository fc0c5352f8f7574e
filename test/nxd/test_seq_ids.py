"""What a step's wrapper does that no case of cases.py shows; those run whole batches and parts in many orders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import environment
import pytest
import torch

ORDER = torch.tensor([3, 0, 2, 1])


def wrapper_of(kind: Any, *, asynchronous: bool = False) -> Any:
    """One without a model, for a whole batch of four."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    given = {"is_prefix_caching": False, "async_mode": asynchronous, "is_neuron": lambda: True}
    for name, value in {**given, "neuron_config": SimpleNamespace(batch_size=4)}.items():
        object.__setattr__(made, name, value)
    return made


def test_rows_of_images_stay_where_the_index_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows of images as sequences: their index is a row of the batch, they are not."""
    from neuronx_distributed_inference.models.model_wrapper import ModelWrapper

    rows, index = torch.arange(4)[:, None], ORDER[:, None] * 3
    handed: list[Any] = [ORDER[:, None], ORDER, ORDER, ORDER, *[torch.empty(0)] * 18, rows, index]
    seen = list[Any]()

    def forward(_: Any, *args: Any) -> list[Any]:
        seen.extend(args)
        return [args[0]]

    monkeypatch.setattr(ModelWrapper, "forward", forward)
    wrapper_of(environment.contrib("image_to_text").KimiK25TextWrapper)(*handed)
    assert seen[22] is rows
    assert seen[23].flatten().tolist() == [0, 3, 6, 9]


def test_asynchronous_steps_refuse_another_order() -> None:
    wrapper = wrapper_of(environment.contrib("model_wrapper").KimiK2ModelWrapper, asynchronous=True)
    with pytest.raises(ValueError, match=r"seq_ids: expected ascending cache lines.*\[3, 0, 2, 1\]"):
        wrapper(ORDER, ORDER, ORDER, ORDER)
