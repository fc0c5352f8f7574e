"""Faults in steps of several tokens, prefix caching, LoRA, and continuous batching under sequence parallelism.

The cases are those of test_several_tokens, test_prefix_caching, test_lora and test_splits, executed.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import environment
import executed_worker
import test_lora
import test_prefix_caching
import test_several_tokens
import torch
from faults import Case, Fault, beyond, edited, too_far
from harness import plain_model
from split_worker import CASES

attention, block_kv_cache, experts, kv_cache, modeling = (
    environment.contrib(name) for name in ("attention", "block_kv_cache", "experts", "kv_cache", "modeling_kimi_k2")
)
A, B, M = attention.KimiK2Attention, block_kv_cache.LatentBlockKVCacheManager, modeling.NeuronKimiK2Model
SEVERAL, PREFIX, SPLIT_PREFIX = "test_several_tokens TP1", "test_prefix_caching TP1", "test_prefix_caching flash TP2"
GROUPS = "test_prefix_caching flash TP4 in groups of 2"
ADAPTERS, LINES, SEQUENCE = "test_lora EP2", "test_splits sequence part of the lines", "test_splits sequence TP4"
FAULTS: dict[str, Fault] = {
    "a step's tokens see those after them": (SEVERAL, lambda: edited(
        A, "forward", "present = self._masked(present, active_mask)", "pass")),
    "a step's tokens all at its first position": (SEVERAL, lambda: edited(
        A, "rotation", "angles = position_ids",
        "angles = (position_ids if position_ids.shape[1] > 8 else position_ids[:, :1] + 0 * position_ids)")),
    "a step's tokens at each other's experts": (SEVERAL, lambda: edited(
        experts.KimiK2ExpertMLPs, "forward_selective", "hidden_states.repeat_interleave(top_k, dim=0)",
        "hidden_states.repeat(top_k, 1)")),
    "a step's tokens see nothing of the cache": (SEVERAL, lambda: edited(
        A, "forward", "prior = self._masked(scores(keys, latents), attention_mask)",
        "prior = self._masked(scores(keys, latents), attention_mask & (length == 1))")),
    "padding of a cached prefix is seen": (PREFIX, lambda: edited(
        M, "_create_context_attn_mask", "return mask[:, None, None, :].to(torch.bool)",
        "return torch.ones_like(mask[:, None, None, :], dtype=torch.bool)")),
    "a cached prefix is not seen": (PREFIX, lambda: edited(
        A, "forward", "prior = self._masked(scores(keys, latents), attention_mask)",
        "prior = self._masked(scores(keys, latents), attention_mask & (length == 1))")),
    "tokens behind a prefix see those after them": (PREFIX, lambda: edited(
        A, "forward", "present = self._masked(present, active_mask)", "pass")),
    "positions start again behind a prefix": (PREFIX, lambda: edited(
        A, "rotation", "angles = position_ids", "angles = (position_ids - position_ids[:, :1])")),
    "blocks hold the latent in K": (PREFIX, lambda: edited(
        B, "_init_kv_shape_for_prefix_caching", "self.k_shape = (*blocks, config.hf.qk_rope_head_dim)",
        "self.k_shape = (*blocks, config.hf.kv_lora_rank)")),
    "every rank writes every slot": (SPLIT_PREFIX, lambda: edited(
        block_kv_cache, "own_block_slots",
        "torch.remainder(slots, ranks) == torch.remainder(rank, ranks).to(slots.dtype)", "slots >= 0")),
    "slots of whole blocks": (SPLIT_PREFIX, lambda: edited(
        block_kv_cache, "own_block_slots", "torch.div(slots, ranks, rounding_mode=\"floor\")", "slots")),
    "rank among all writes the slots": (GROUPS, lambda: edited(
        block_kv_cache, "own_block_slots", "torch.remainder(rank, ranks)", "rank")),
    "a rank masks another's positions of the prefix": (SPLIT_PREFIX, lambda: edited(
        M, "_create_context_attn_mask", "self._own(mask.shape[1])", "self._own(mask.shape[1]).flip(0)")),
    "a rank's tokens see those after them": (SPLIT_PREFIX, lambda: edited(
        attention, "own_tokens", "own <= tokens[:, None]", "own >= 0 * tokens[:, None]")),
    "every rank counts the part's tokens": (SPLIT_PREFIX, lambda: edited(
        A, "forward", "if own is not None:", "if False:")),
    "no adapter is applied": (ADAPTERS, lambda: edited(
        attention, "project", "projection(hidden_states, adapter_ids)", "projection.get_base_layer()(hidden_states)")),
    "o_proj without its adapter": (ADAPTERS, lambda: edited(
        A, "_output", "project(self.o_proj, values", "project(self.o_proj.get_base_layer(), values")),
    "q_b_proj without its adapter": (ADAPTERS, lambda: edited(
        A, "_queries", "q = project(self.q_b_proj, ", "q = project(self.q_b_proj.get_base_layer(), ")),
    "the adapter is given what is not normed": (ADAPTERS, lambda: edited(
        A, "forward", "self._queries(self.q_a_layernorm(q_down), adapter_ids)",
        "self._queries(q_down, adapter_ids)")),
    "lines that take no part are written": (LINES, lambda: edited(
        modeling.NeuronKimiK2ForCausalLM, "enable_context_encoding", "self.compile_tag = CONTEXT_ENCODING_MODEL_TAG",
        "self.neuron_config.apply_seq_ids_mask = self.config.neuron_config.apply_seq_ids_mask = False")),
    "a line's parts of the sequence out of order": (SEQUENCE, lambda: edited(
        A, "forward", "gather_from_sequence_parallel_region(hidden_states, 1)",
        "gather_from_sequence_parallel_region(hidden_states, 1).unflatten(1, (4, -1)).flip(1).flatten(1, 2)")),
    "a line's sum goes to other parts": (SEQUENCE, lambda: edited(
        modeling, "make_moe", "sequence_parallel_enabled=neuron.sequence_parallel_enabled",
        "sequence_parallel_enabled=False")),
}  # fmt: skip


def run(job: dict[str, Any], plain: torch.Tensor, name: str) -> list[str]:
    """One job on executed graphs; its name if logits differ."""
    job["neuron_config"]["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
    app = executed_worker.build(copy.deepcopy(job))
    executed_worker.load(app)
    (logits,) = executed_worker.results(app, job["cases"])
    return beyond(name, logits, plain)


def cases(checkpoint: Path) -> dict[str, Case]:
    """The tests' own executed cases, by module and layout."""
    adapters = test_lora.write_all(checkpoint.parent / "lora")
    model = plain_model(checkpoint)

    def of_splits(name: str) -> list[str]:
        return too_far(name, CASES[name](str(checkpoint), model))

    jobs = {SEVERAL: test_several_tokens.job(checkpoint, "TP1", 1), ADAPTERS: test_lora.job(adapters, "source", 1, 2)}
    for name in (PREFIX, SPLIT_PREFIX, GROUPS):
        jobs[name] = test_prefix_caching.job(checkpoint, name.removeprefix("test_prefix_caching "))
    table: dict[str, Case] = {name: partial(run, *job, name) for name, job in jobs.items()}
    for name in (LINES, SEQUENCE):
        table[name] = partial(of_splits, name.removeprefix("test_splits "))
    return table
