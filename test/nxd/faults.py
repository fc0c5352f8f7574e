"""Faults put into the NxDI class one at a time, by replacing a piece of a function's source; a row each."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import Any

import environment

Patch = tuple[Any, str, Any]
BASE = "kimi_k2.contrib_model"
BASE_ATTENTION, BASE_MODEL, BASE_MOE = f"{BASE}.attention", f"{BASE}.modeling_kimi_k2", f"{BASE}.moe"
BASE_WRAPPER = f"{BASE}.model_wrapper"

ARGUMENTS = "kimi_k2.neuron.layer_arguments"

# By table and by the job that sees them, of cases.CASES: name, module (of the class, unless it has a package), what is
# replaced, and by what.
FAULTS: dict[str, dict[str, list[tuple[str, str, str, str]]]] = {
    "class": {
        "one line EP2": [
            ("inv_freq is a buffer", BASE_ATTENTION,
                "self.inv_freq, self.rotary_multiplier = config.rotary()",
                "inv_freq, self.rotary_multiplier = config.rotary();"
                "self.register_buffer('inv_freq', torch.tensor(inv_freq), persistent=False)"),
            ("router bias is cast", BASE_MODEL, "n.endswith(self.kept) or ", ""),
            ("router bias ignored", BASE_MOE, "scores + self.e_score_correction_bias", "scores"),
            ("router weighs by the biased scores", BASE_MOE,
                "weights = scores.gather", "weights = (scores + self.e_score_correction_bias).gather"),
            ("bias before the sigmoid", BASE_MOE,
                "torch.sigmoid(logits)", "torch.sigmoid(logits + self.e_score_correction_bias)"),
            ("no scaling factor", BASE_MOE, "weights * self.routed_scaling_factor", "weights * 1.0"),
            ("no normalisation", BASE_MOE, "if self.norm_topk_prob:", "if False:"),
            ("router logits in the model's dtype", BASE_MOE,
                "dot_float32(tokens, self.linear_router.weight, ([1], [1]))",
                "torch.nn.functional.linear(tokens, self.linear_router.weight).float()"),
            ("one expert fewer", BASE_MOE, "self.top_k, dim=1", "self.top_k - 1, dim=1"),
            ("EP offset ignored", BASE_MOE,
                "rounding_mode=\"floor\") * self.num_local_experts", "rounding_mode=\"floor\") * 0"),
            ("other ranks' experts not masked", BASE_MOE, "weights * here.to(weights.dtype)", "weights"),
            ("every choice takes the first row of the blocks", BASE_MOE,
                "result[at[:, choice]]", "result[0 * at[:, choice]]"),
            ("expert weights not applied at prefill", BASE_MOE, "* weights[:, choice, None]", ""),
            ("softmax scale without mscale", BASE_ATTENTION,
                "* self.softmax_scale", "* (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5"),
            ("rotation halves swapped", BASE_ATTENTION, "return (angles.cos()", "return (angles.sin()"),
            ("key not rotated", BASE_ATTENTION, "key = rotated(key, cos_cache, sin_cache)", "pass"),
            ("query not rotated", BASE_ATTENTION,
                "rope = rotated(rope, cos_cache.unsqueeze(1), sin_cache.unsqueeze(1))", "pass"),
            ("latent not normed", BASE_ATTENTION, "latent = self.kv_a_layernorm(latent)", "pass"),
            ("query latent not normed", BASE_ATTENTION, "self.q_a_layernorm(q_down)", "q_down"),
            ("no causal mask", BASE_ATTENTION,
                "masked(scores * self.softmax_scale, masks[0])", "(scores * self.softmax_scale)"),
            ("cache not masked", BASE_ATTENTION, "masked(cached, masks[0])", "cached"),
            ("own token left out", BASE_ATTENTION, "masked(own, masks[1])", "masked(own, masks[1]) - 1e9"),
            ("latent and key caches swapped by a position", BASE_ATTENTION,
                "key.unsqueeze(1), latent.unsqueeze(1)", "key.roll(1, -1).unsqueeze(1), latent.unsqueeze(1)"),
            ("shared expert left out", BASE_MOE, "if self.shared_experts is not None:", "if False:"),
            ("residual left out", BASE_MODEL, "residual + attended", "attended"),
        ],
        "one line TP2": [
            ("blocks of experts lie over each other", BASE_MOE, "(end - needed) * size", "(end - needed) * (size - 1)"),
        ],
    },
    "modes": {
        "flash TP2": [
            ("ranks' sums not weighed", "attention", "(logsumexp - total).exp()", "1.0"),
            ("weighed by the rank's own scores", "attention",
                "_gathered(logsumexp, 3).logsumexp(dim=3, keepdim=True)", "logsumexp"),
            ("largest score for the log-sum-exp", "attention",
                "both.logsumexp(dim=-1, keepdim=True)", "both.amax(dim=-1, keepdim=True)"),
            ("every rank counts the step's own token", "attention",
                "masked(scores(*active), among_own)", "scores(*active)"),
            ("prompt cut into pieces, not round the ranks", "flash_decoding",
                "first + torch.remainder(rank, ranks).to(first.dtype)",
                "first // ranks + count // ranks * torch.remainder(rank, ranks).to(first.dtype)"),
            ("slot of the whole cache", "kv_cache",
                "torch.div(position_ids, ranks, rounding_mode=\"floor\")", "position_ids"),
            ("every rank writes the step's token", "kv_cache",
                "owned.to(torch.bool)", "torch.ones_like(owned, dtype=torch.bool)"),
            ("heads returned to other ranks", "attention", "_gathered(heads, 1)", "_gathered(heads, 1).flip(1)"),
            ("queries without their rotated part", "attention",
                "nope, w_uk), rope), dim=-1)", "nope, w_uk), 0 * rope), dim=-1)"),
        ],
        "flash TP4 in pairs": [
            ("rank among all for the rank in its group", "flash_decoding",
                "first + torch.remainder(rank, ranks)", "first + rank"),
        ],
        "some lines TP2": [
            ("a whole batch is not put in the order of its lines", BASE_WRAPPER,
                "if order is None:", "if True or order is None:"),
            ("outputs not in the order of the caller", BASE_WRAPPER, "back = order.argsort()", "back = order"),
        ],
        "some lines flash TP2": [
            ("lines that take no part are written", "kv_cache",
                "(seq_ids >= 0).reshape(-1, 1)", "(seq_ids >= -1).reshape(-1, 1)"),
            ("what is not written goes to the bucket's last slot", "kv_cache",
                "ranks, caches[0].shape[2]", "ranks, seq_len"),
        ],
        "sequence TP2xEP2": [
            ("experts within a rank's part", BASE_MOE,
                "hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)",
                "hidden_states = hidden_states.repeat(1, 4, 1)"),
            ("attention within a rank's part", BASE_ATTENTION,
                "gather_from_sequence_parallel_region(hidden_states, 1)",
                "hidden_states.repeat(1, position_ids.shape[1] // hidden_states.shape[1], 1)"),
            ("dense layer within a rank's part", f"{BASE}.layers",
                "gather_from_sequence_parallel_region(hidden_states, 1)", "hidden_states.repeat(1, 4, 1)"),
        ],
        "drafts TP1": [
            ("a step's tokens see those after them", BASE_ATTENTION,
                "masked(own, masks[1])", "own"),
            ("a step's tokens all at its first position", BASE_ATTENTION,
                "angles = position_ids",
                "angles = (position_ids if position_ids.shape[1] > 8 else position_ids[:, :1] + 0 * position_ids)"),
            ("a step's tokens see nothing of the cache", BASE_ATTENTION,
                "masked(cached, masks[0])", "masked(cached, masks[0] & (own.shape[-1] == 1))"),
        ],
        "prefixes TP1": [
            ("lines of a step at each other's experts", BASE_MOE,
                "tokens.repeat_interleave(slots.shape[1], dim=0)", "tokens.repeat(slots.shape[1], 1)"),
            ("padding of a cached prefix is seen", "modeling_kimi_k2",
                "return mask[:, None, None, :].to(torch.bool)",
                "return torch.ones_like(mask[:, None, None, :], dtype=torch.bool)"),
            ("a cached prefix is not seen", BASE_ATTENTION,
                "masked(cached, masks[0])", "masked(cached, masks[0] & (own.shape[-1] == 1))"),
            ("tokens behind a prefix see those after them", BASE_ATTENTION,
                "masked(own, masks[1])", "own"),
            ("positions start again behind a prefix", BASE_ATTENTION,
                "angles = position_ids", "angles = (position_ids - position_ids[:, :1])"),
            ("blocks hold the latent in K", "block_kv_cache",
                "self.k_shape = (*blocks, config.hf.qk_rope_head_dim)",
                "self.k_shape = (*blocks, config.hf.kv_lora_rank)"),
        ],
        "prefixes flash TP2": [
            ("every rank writes every slot", "block_kv_cache",
                "torch.remainder(slots, ranks) == torch.remainder(rank, ranks).to(slots.dtype)", "slots >= 0"),
            ("slots of whole blocks", "block_kv_cache", "torch.div(slots, ranks, rounding_mode=\"floor\")", "slots"),
            ("a rank masks another's positions of the prefix", "modeling_kimi_k2",
                "self._own(mask.shape[1])", "self._own(mask.shape[1]).flip(0)"),
            ("a rank's tokens see those after them", "attention",
                "own <= tokens[:, None]", "own >= 0 * tokens[:, None]"),
            ("every rank counts the part's tokens", "attention", "if own is not None:", "if False:"),
        ],
        "prefixes flash TP4 in pairs": [
            ("rank among all writes the slots", "block_kv_cache", "torch.remainder(rank, ranks)", "rank"),
        ],
        "adapters": [
            ("no adapter is applied", "attention",
                "projection(hidden_states, adapter_ids)", "projection.get_base_layer()(hidden_states)"),
            ("o_proj without its adapter", "attention",
                "project(self.o_proj, values", "project(self.o_proj.get_base_layer(), values"),
            ("q_b_proj without its adapter", "attention",
                "project(self.q_b_proj, ", "project(self.q_b_proj.get_base_layer(), "),
            ("the adapter is given what is not normed", BASE_ATTENTION,
                "self.queries(self.q_a_layernorm(q_down), **kwargs)", "self.queries(q_down, **kwargs)"),
        ],
        "sequence TP4": [
            ("a line's parts of the sequence out of order", BASE_ATTENTION,
                "gather_from_sequence_parallel_region(hidden_states, 1)",
                "gather_from_sequence_parallel_region(hidden_states, 1).unflatten(1, (4, -1)).flip(1).flatten(1, 2)"),
            ("a line's sum goes to other parts", BASE_MOE,
                "reduce_scatter_to_sequence_parallel_region(out, 1)",
                "reduce_scatter_to_sequence_parallel_region(out.unflatten(1, (4, -1)).flip(1).flatten(1, 2), 1)"),
        ],
    },
    # Of its arguments and its weights: test/nki/test_kernel_mutations.py.
    "whole layers": {
        "layers EP2": [
            ("a slot too many", "decode_layers", "sum(dim=1)", "sum(dim=1).add(1)"),
            ("every rank holds the first experts", "decode_layers",
                "experts.first_expert(rank)", "0 * experts.first_expert(rank)"),
            ("projections with the norm's scalar", ARGUMENTS, " * torch.sqrt(mean + eps)", ""),
            ("projections of what is not normed", "decode_layers",
                "first.input_layernorm(hidden_states)", "hidden_states"),
            ("rotary rows first", "kimi_k2.sharding.attention_tiles",
                "by_head[:, :, :p].flatten(1, 2), by_head[:, :, p:].flatten(1, 2)",
                "by_head[:, :, p:].flatten(1, 2), by_head[:, :, :p].flatten(1, 2)"),
            ("rotated for the position before", "decode_layers",
                "position_ids.reshape(tokens, 1)", "position_ids.reshape(tokens, 1) - 1"),
            ("residual of the layers before lost", "decode_layers",
                "hidden_states.flatten(0, 1)", "0 * hidden_states.flatten(0, 1)"),
            ("entries in the wrong order", "decode_layers", "latents.unbind(0)", "latents.flip(0).unbind(0)"),
            ("new latents lost", "decode_layers", " latent.unflatten(", " 0 * latent.unflatten("),
            ("new keys lost", "decode_layers", "(key.unflatten(", "(0 * key.unflatten("),
            ("caches of the layers before", "decode_layers",
                "zip(self.layers, self.caches,", "zip(self.layers, self.caches[1:] + self.caches[:1],"),
            ("a rank's summand lost", "nki_emulator.ranks",
                "brought for _, brought in gathered", "gathered[0][1] for _, brought in gathered"),
            ("every rank is the first", "decode_layers", "torch.distributed.get_rank()", "0"),
        ],
        "layers TP4 in pairs": [
            ("every rank counts the new entry", "decode_layers", "own.reshape(tokens, 1)", "torch.ones(tokens, 1)"),
            ("no rank counts the new entry", "decode_layers", "own.reshape(tokens, 1)", "torch.zeros(tokens, 1)"),
            ("ranks paired otherwise", "decode_layers",
                "tuple(range(first, first + self.group)) for first in firsts",
                "tuple(range(first, self.ranks, self.group)) for first in range(self.group)"),
            ("a slot too many (TP4 in pairs)", "decode_layers", "sum(dim=1)", "sum(dim=1).add(1)"),
        ],
    },
}  # fmt: skip


def edited(owner: Any, method: str, old: str, new: str) -> Patch:
    """A method with a piece of its source replaced."""
    function = inspect.unwrap(getattr(owner, method))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{method} no longer contains {old!r}"
    space: dict[str, Any] = {}
    if "super()" in source:
        source = source.replace("super()", "super(_owner, self)")
    exec(compile(source.replace(old, new), f"<{method}>", "exec"), {**function.__globals__, "_owner": owner}, space)
    method_ = space[method]
    return owner, method, staticmethod(method_) if isinstance(owner.__dict__.get(method), staticmethod) else method_


def patch(name: str, old: str, new: str) -> Patch:
    """The only function or method of a module that contains `old`, with `new` in its place."""
    module = importlib.import_module(name) if "." in name else environment.contrib(name)
    classes = (
        value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__
    )
    found = []
    for owner in (module, *classes):
        for method, one in vars(owner).items():
            function = inspect.unwrap(getattr(one, "__func__", one))
            written = inspect.isfunction(function) and function.__code__.co_filename.endswith(".py")
            if written and old in textwrap.dedent(inspect.getsource(function)):
                found.append((owner, method))
    assert len(found) == 1, f"{old!r} is in {len(found)} functions of {name}: {found}"
    return edited(*found[0], old, new)
