"""Streams a checkpoint into the plain model, one stored tensor group at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from kimi_k2.checkpoint.names import EXPERT
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.model.linear import Linear
from kimi_k2.model.moe import Experts

if TYPE_CHECKING:
    from kimi_k2.model.decoder import KimiK2ForCausalLM


def load_checkpoint(
    model: KimiK2ForCausalLM,
    reader: CheckpointReader,
    *,
    on_tensor: Callable[[str, int], None] | None = None,
) -> None:
    """Fill `model` from a checkpoint that was opened for its configuration; each stored tensor is read once.

    A weight waits for its scales (which usually lie beside it), so that no more than a few Linears are held at a time.

    Raises:
        CheckpointError: (subclasses) see `CheckpointReader`.
    """
    with reader:
        sizes = Counter(name.rpartition(".")[0] for name in reader.names())
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in reader.stream():
            module, _, suffix = name.rpartition(".")
            group = waiting.setdefault(module, {})
            group[suffix] = tensor
            if len(group) == sizes[module]:
                _assign(model, module, waiting.pop(module), reader)
            else:
                # A view would keep its whole shard mapped while the other half may lie in another shard.
                group[suffix] = tensor.clone()
            if on_tensor:
                on_tensor(name, tensor.nbytes)


def _assign(model: KimiK2ForCausalLM, module: str, stored: dict[str, Tensor], reader: CheckpointReader) -> None:
    reader.check_module(module, stored, values=False)
    if match := EXPERT.match(f"{module}.weight"):
        experts = model.get_submodule(match["moe"] + ".experts")
        assert isinstance(experts, Experts)
        experts.load(int(match["expert"]), match["proj"], stored)
        return
    target: nn.Module = model.get_submodule(module)
    if isinstance(target, Linear):
        target.load(stored)
        return
    for suffix, tensor in stored.items():
        getattr(target, suffix).copy_(tensor)
