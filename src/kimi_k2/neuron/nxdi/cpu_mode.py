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

from kimi_k2.errors import ConfigError


def load(app: Any, to_cpu: Callable[[], None]) -> None:
    """Run NxDI's `to_cpu` with steps of several tokens allowed, and in process groups that are there already.

    NxDI refuses `speculation_length` in CPU mode (models/application_base.py, to_cpu). What it lacks is in
    `copy_states`: its own names a token generation model, which such an application does not have. A model for each
    stage it makes for continuous batching alone; with sequence parallelism they differ, as decode has no sequence to
    cut.
    """
    kept, neuron = app.neuron_config, app.config.neuron_config
    app.neuron_config = copy.copy(kept)  # the models are made from app.config, which keeps the length
    app.neuron_config.speculation_length = 0
    continuous = neuron.is_continuous_batching
    neuron.is_continuous_batching = continuous or neuron.sequence_parallel_enabled
    try:
        with _ranks_once(kept.world_size):
            to_cpu()
    finally:
        app.neuron_config, neuron.is_continuous_batching = kept, continuous


@contextmanager
def _ranks_once(ranks: int) -> Iterator[None]:
    """Keep NxDI from making process groups twice: a draft and its target are two applications of one process.

    Raises:
        ConfigError: the groups that are there are of another number of ranks.
    """
    if not torch.distributed.is_initialized():
        if "WORLD_SIZE" in os.environ:
            yield
            return
        # NxDI would open a port for a group of one, which another process may have taken by now.
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
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


def models_of(wrappers: Sequence[Any]) -> list[Any]:
    """Their models, each once."""
    return list({id(wrapper.model): wrapper.model for wrapper in wrappers}.values())


def states(model: Any) -> list[torch.Tensor]:
    """What a pass of a submodel updates and returns last: caches, and the adapters in use."""
    lora = model.neuron_config.lora_config is not None
    adapters = model.lora_weight_manager.get_lora_tensors() if lora else ()
    return [*model.kv_mgr.past_key_values, *adapters]


def copy_states(wrappers: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    """Give every submodel the states that one of them returned; on a device they share them."""
    for model in models_of(wrappers):
        model_states = states(model)
        for state, new in zip(model_states, outputs[-len(model_states) :], strict=True):
            state.data = new


def follow_prefixes(models: Sequence[Any]) -> None:
    """With prefix caching, give the module the bucket of each pass, which a traced graph has from its bucket."""
    for model in models:
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
