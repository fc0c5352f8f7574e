"""NxDI's ModelWrapper for rows in any order and prompts of one token, with this model's compiler arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed_inference.models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
    ModelWrapper,
)

LONG_PROMPT = 2048
DGE = "--internal-enable-dge-levels"


def with_own_arguments(arguments: str, tag: str, neuron_config: Any) -> str:
    """NxDI's arguments for neuronx-cc, then this model's, then those of `neuron_config.compiler_args`.

    `--enable-saturate-infinity` is not among them: AWS documents no effect of it on trn2.
    """
    prefill = tag == CONTEXT_ENCODING_MODEL_TAG
    if not neuron_config.enable_long_context_mode:  # which asks for the opposite
        arguments += " --enable-mixed-precision-accumulation"  # float32 sums of BF16 values
    # DMA descriptors for gathers by a vector of numbers: chosen experts, as NxDI's qwen3_moe. The option counts once.
    spill = f"{DGE} spill_reload"
    arguments = arguments.replace(spill, "") + f" {DGE} vector_dynamic_offsets{' spill_reload' * (spill in arguments)}"
    if not prefill and neuron_config.moe_ep_degree > 1:  # as there: the lower levels' modular flow slows the graph
        arguments = arguments.replace(" -O2 ", " -O3 ")
    if prefill and neuron_config.max_context_length > LONG_PROMPT:
        # Matrix multiplies alone may be more than the compiler's 5 million instructions.
        arguments += " --internal-max-instruction-limit=15000000"
    stage = CONTEXT_ENCODING_MODEL_TAG if prefill else TOKEN_GENERATION_MODEL_TAG
    return " ".join([arguments, *neuron_config.compiler_args.get(stage, ())])


class KimiK2ModelWrapper(ModelWrapper):
    """ModelWrapper whose rows may come in any order and whose prompts may have a single token."""

    def __init__(self, config: Any, model_cls: Any, tag: str, compiler_args: str | None = None, **kwargs: Any) -> None:
        super().__init__(config, model_cls, tag, compiler_args, **kwargs)
        if compiler_args is None:
            self.compiler_args: str = with_own_arguments(self.compiler_args, tag, self.neuron_config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """NxDI's, with the rows of a whole batch in the order of their cache lines, as NxDI puts those of a part.

        A graph reads line n of the cache for row n.

        Raises:
            ValueError: they are in another order, and steps are asynchronous.
        """
        order = self.row_order(args[3])
        if order is None:
            return super().forward(*args, **kwargs)
        outputs = super().forward(*self.rows(args, order), **kwargs)
        back = order.argsort()
        return outputs[back] if isinstance(outputs, torch.Tensor) else self.reordered(outputs, back)

    def row_order(self, lines: torch.Tensor) -> torch.Tensor | None:
        """The order in which a whole batch's rows are those of their lines; None where they are, or it is a part."""
        order = lines.flatten().argsort()
        if len(order) < self.neuron_config.batch_size or bool((order == torch.arange(len(order))).all()):
            return None
        if self.async_mode:
            raise ValueError(f"seq_ids: expected ascending cache lines with async_mode, got {lines.flatten().tolist()}")
        return order

    def rows(self, tensors: Sequence[Any], order: torch.Tensor) -> list[Any]:
        """What has a row a sequence, in another order; all else as it is."""
        batched = [
            isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and len(tensor) == len(order) for tensor in tensors
        ]
        return [tensor[order] if is_batch else tensor for tensor, is_batch in zip(tensors, batched, strict=True)]

    def reordered(self, outputs: Any, back: torch.Tensor) -> list[Any]:
        """Tokens and logits in the order of the call; a device returns nothing else."""
        own = 2 if self.neuron_config.output_logits else 1
        return [*self.rows(outputs[:own], back), *outputs[own:]]

    def pad_inputs(self, *args: Any, pad_type: str = "first_fit") -> tuple[Any, ...]:
        """NxDI's, for prompts of one token too.

        NxDI marks pads with position 1 and takes a row's first highest position for its last token. Beside a prompt of
        one token, all of whose real positions are 0, that is a pad: there pads get position 0.
        """
        padded = tuple(super().pad_inputs(*args, pad_type=pad_type))
        if self.tag != CONTEXT_ENCODING_MODEL_TAG:
            return padded
        several = padded[1].sum(dim=1, keepdim=True) > 1
        return (*padded[:2], padded[2] * several.to(padded[2].dtype), *padded[3:])
