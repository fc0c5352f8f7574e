"""Prompts that NxDI's prefill does not take with prefix caching: of one token, and those longer than a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def of_one_token(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments in which prompts of one token are prompts, and pads behind them at position 0.

    NxDI marks pads with position 1, and takes the first highest position for the last token's: a pad's. With block
    tables it takes a single column for a step, which would read a cache that holds nothing: here it has a pad beside.
    """
    positions, lengths = arguments["position_ids"], arguments["full_context_lens"].reshape(-1, 1)
    changed = {**arguments, "position_ids": torch.where((positions[:, :1] == 0) & (lengths == 1), 0, positions)}
    if positions.shape[1] == 1 and not positions.any():
        columns = ("input_ids", "position_ids", "attention_mask")
        changed |= {name: F.pad(changed[name], (0, 1)) for name in columns if changed[name] is not None}
    return changed


def parts(neuron_config: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The passes of one call.

    Args:
        neuron_config: whose largest context encoding bucket is what one pass takes.
        arguments: NxDI's, by name. With prefix caching a prompt is whole in input_ids and position_ids [1, S]; the
            first `computed_context_lens` of its `full_context_lens` tokens are cached, the others have their slots in
            slot_mapping [1, .].

    Yields:
        The arguments of each pass, `of_one_token`; the last one's result is the call's. One pass of what fits.

    Raises:
        ValueError: a prompt that does not fit comes together with others.
    """
    if not neuron_config.is_prefix_caching or arguments.get("full_context_lens") is None:
        yield arguments
        return
    arguments = of_one_token(arguments)
    most = max(neuron_config.context_encoding_buckets or [neuron_config.max_context_length])
    computed: Tensor = arguments["computed_context_lens"]
    full: Tensor = arguments["full_context_lens"]
    if int((full - computed).max()) <= most:
        yield arguments
        return
    if len(full) > 1:
        raise ValueError(f"expected prompts of more than {most} tokens one at a time, got {len(full)} prompts")
    start, end = int(computed), int(full)
    slots: Tensor = arguments["slot_mapping"]
    for first in range(start, end, most):
        last = min(first + most, end)
        whole = ("input_ids", "position_ids", "attention_mask")
        cut = {name: arguments[name][:, :last] for name in whole if arguments[name] is not None}
        yield {
            **arguments,
            **cut,
            "slot_mapping": slots[:, first - start : last - start],
            "full_context_lens": full.new_full(full.shape, last),
            "computed_context_lens": full.new_full(full.shape, first),
        }
