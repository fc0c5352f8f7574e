"""What NxDI's CPU mode lacks: steps of several tokens, cached prefixes, and a second model beside the first."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed_inference.models import application_base
from neuronx_distributed_inference.models.model_wrapper import CONTEXT_ENCODING_MODEL_TAG, ModelWrapper

from kimi_k2.errors import ConfigError

_TENSORIZER = "--internal-hlo2tensorizer-options='"
_MODULAR_FLOW = "--modular-flow-mac-threshold=10"


def load(app: Any, to_cpu: Callable[[], None]) -> None:
    """Run NxDI's `to_cpu` with steps of several tokens allowed, and in process groups that are there already.

    NxDI refuses `speculation_length` in CPU mode (models/application_base.py, to_cpu). What it lacks is in
    `copy_states`: its own names a token generation model, which such an application does not have.
    """
    kept = app.neuron_config
    app.neuron_config = copy.copy(kept)  # the models are made from app.config, which keeps the length
    app.neuron_config.speculation_length = 0
    try:
        with _ranks_once(kept.world_size):
            to_cpu()
    finally:
        app.neuron_config = kept


@contextmanager
def _ranks_once(ranks: int) -> Iterator[None]:
    """Keep NxDI from making process groups twice: a draft and its target are two applications of one process.

    Raises:
        ConfigError: the groups that are there are of another number of ranks.
    """
    if not torch.distributed.is_initialized():
        yield
        return
    if torch.distributed.get_world_size() != ranks:
        raise ConfigError(
            f"this process is one of {torch.distributed.get_world_size()} ranks, got {ranks}", field="tp_degree"
        )
    world = os.environ.pop("WORLD_SIZE", None)
    initialize = application_base.initialize_model_parallel
    if parallel_state.model_parallel_is_initialized():
        application_base.initialize_model_parallel = lambda **_: None
    try:
        yield
    finally:
        application_base.initialize_model_parallel = initialize
        if world is not None:
            os.environ["WORLD_SIZE"] = world


def states(model: Any) -> list[torch.Tensor]:
    """What a pass of a submodel updates and returns last: caches, and the adapters in use."""
    lora = model.neuron_config.lora_config is not None
    adapters = model.lora_weight_manager.get_lora_tensors() if lora else ()
    return [*model.kv_mgr.past_key_values, *adapters]


def copy_states(wrappers: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    """Give every submodel the states that one of them returned; on a device they share them."""
    for model in {id(wrapper.model): wrapper.model for wrapper in wrappers}.values():
        model_states = states(model)
        for one, new in zip(model_states, outputs[-len(model_states) :], strict=True):
            one.data = new


def with_modular_flow(arguments: str) -> str:
    """Prefill's compiler arguments with the threshold that NxDI gives to models without arguments of their own.

    From so few multiplications on a graph is compiled module by module (models/model_wrapper.py).
    """
    if "--modular-flow-mac-threshold" in arguments:
        return arguments
    if _TENSORIZER in arguments:  # NxDI's, for FP8 weights: the option counts once
        return arguments.replace(_TENSORIZER, f"{_TENSORIZER}{_MODULAR_FLOW} ", 1)
    return f"{arguments} {_TENSORIZER}{_MODULAR_FLOW} --verify-hlo=true'"


class KimiK2ModelWrapper(ModelWrapper):
    """ModelWrapper for cache lines in any order, prompts of one token, and padded batches in CPU mode too.

    Its prefill is compiled with NxDI's threshold of the modular flow.
    """

    not_rows: tuple[int, ...] = ()  # places of arguments that are no rows of the batch, of whatever length

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tag == CONTEXT_ENCODING_MODEL_TAG:
            self.compiler_args: str = with_modular_flow(self.compiler_args)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """NxDI's, with the rows of a whole batch in the order of their lines, as NxDI puts those of a part of one.

        A graph reads line n of the cache for row n.

        Raises:
            ValueError: they are in another order, and steps are asynchronous.
        """
        lines = args[3]
        count, order = len(lines), lines.flatten().argsort()
        ordered = bool((order == torch.arange(count)).all())
        if ordered or self.is_prefix_caching or count < self.neuron_config.batch_size:
            return super().forward(*args, **kwargs)
        if self.async_mode:
            raise ValueError(f"seq_ids: expected ascending cache lines with async_mode, got {lines.flatten().tolist()}")

        def is_row(one: Any) -> bool:
            return isinstance(one, torch.Tensor) and one.dim() > 0 and len(one) == count

        def rows(tensors: Sequence[Any], order: torch.Tensor, but: Sequence[int] = ()) -> list[Any]:
            return [one[order] if is_row(one) and n not in but else one for n, one in enumerate(tensors)]

        outputs = super().forward(*rows(args, order, self.not_rows), **kwargs)
        back = order.argsort()
        if isinstance(outputs, torch.Tensor):
            return outputs[back]
        first = len(outputs) if self.is_neuron() else len(outputs) - len(states(self.model))
        return [*rows(outputs[:first], back), *outputs[first:]]

    def pad_inputs(self, *args: Any, pad_type: str = "first_fit") -> tuple[Any, ...]:
        """NxDI's; pads beside a single token, all of whose row is at position 0, are there too."""
        padded: tuple[Any, ...] = tuple(super().pad_inputs(*args, pad_type=pad_type))
        if self.tag != CONTEXT_ENCODING_MODEL_TAG:
            return padded
        return (*padded[:2], padded[2] * (args[2] > 0).any(dim=1, keepdim=True), *padded[3:])

    def _forward_with_pad(self, *args: Any) -> Any:
        # With block tables sequences lie in the batch as they come. On a device NxDI takes the first rows of the
        # output; in CPU mode it takes those of the sequences' numbers.
        if self.is_prefix_caching and not self.is_neuron():
            args = (*args[:3], torch.arange(args[3].shape[0], dtype=args[3].dtype), *args[4:])
        return super()._forward_with_pad(*args)


def follow_prefixes(wrappers: Sequence[Any]) -> None:
    """With prefix caching, give the module the bucket of each pass, which a traced graph has from its bucket."""
    for model in {id(wrapper.model): wrapper.model for wrapper in wrappers}.values():
        if model.is_prefix_caching:
            model.register_forward_pre_hook(_set_prefix)


def _set_prefix(model: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """As DecoderModelInstance.get: prefix, own tokens and positions, from the inputs' shapes."""
    ids, mask = inputs[:2]
    model.n_active_tokens = ids.shape[1]
    model.prefix_size = 0 if mask.dim() == 1 else mask.shape[1]
    model.n_positions = model.prefix_size
    if model.n_active_tokens > 1:
        longest = model.neuron_config.max_context_length
        model.n_positions = min(model.prefix_size + model.n_active_tokens, longest)
