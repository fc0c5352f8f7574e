"""Time of verifying drafted tokens and of drafting them at real sizes, beside a plain step's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from kimi_k2.bench.kernels.harness import event_times
from kimi_k2.bench.kernels.model import make_step
from kimi_k2.bench.kernels.routing import DrawnDecodeStep, Routing
from kimi_k2.drafts.config import DraftConfig, Form
from kimi_k2.drafts.head import Eagle3Head
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep, VerifyStep
from kimi_k2.engine.drafters import HeadDrafter
from kimi_k2.engine.graphs import GraphRecorder, Recorded
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.linear import Linear
from kimi_k2.synthetic.draft import PUBLISHED_VOCABULARY, draft_fields

FORMS: tuple[Form, ...] = ("llama", "mla")


def synthetic_head(target: KimiK2ForCausalLM, form: Form = "llama", parts: int = 1, seed: int = 0) -> Eagle3Head:
    """A head of the published sizes with random weights on the target's device, or one rank's part of it.

    Args:
        target: whole, or a rank's part.
        form: which attention.
        parts: ranks that its heads, MLP and lm_head are divided among; `fc` is whole on each, as in vLLM.
        seed: of the weights.
    """
    config, device = target.config, target.lm_head.weight.device
    sizes = {
        "intermediate_size": config.intermediate_size // parts,
        "num_attention_heads": config.num_attention_heads // parts,
        "num_key_value_heads": config.num_attention_heads // parts,
        "draft_vocab_size": min(PUBLISHED_VOCABULARY // parts, len(target.lm_head.weight)),
    }
    own_config = DraftConfig.from_dict(draft_fields(config, form, **sizes))
    with torch.device("meta"):
        head = Eagle3Head(own_config, target, target.dtype)
        plain = own_config.attention_config(config)
        head.lm_head = Linear(plain, "lm_head", own_config.draft_vocab_size, own_config.hidden_size, dtype=target.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(head.named_parameters()):
        if parameter.is_meta:
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            made = made.fill_(1.0) if made.dim() == 1 else made.normal_(0, made.shape[1] ** -0.5, generator=generator)
            module, _, leaf = name.rpartition(".")
            setattr(head.get_submodule(module), leaf, nn.Parameter(made, requires_grad=False))
    head.tokens = torch.arange(own_config.draft_vocab_size, device=device)
    return head.eval()


@torch.inference_mode()
def time_verify(
    model: KimiK2ForCausalLM, contexts: Sequence[int], width: int, *, routing: Routing | None = None
) -> float:
    """Median microseconds of a step of `width` tokens a sequence, replayed from its graph.

    Args:
        model: a rank's part on a GPU.
        contexts: cached tokens of each sequence behind the step.
        width: tokens.
        routing: to prescribe; None leaves the choice to the synthetic router.
    """
    cache = new_cache(model, len(contexts), max(contexts), contexts, paged=True)
    for layer in cache.data:
        layer.copy_(torch.randn(layer.shape, device=layer.device, dtype=torch.bfloat16))
    drawn = None if routing is None else DrawnDecodeStep(model, cache, routing, graph=True)
    made = drawn or DecodeStep(model, cache, graph=True)
    count = model.config.num_hidden_layers
    verify, device = VerifyStep(made, (2, count // 2, count - 3)), cache.data.device
    positions = torch.tensor(contexts, device=device)[:, None] - width + torch.arange(width, device=device)
    tokens = torch.zeros_like(positions) + torch.arange(len(contexts), device=device)[:, None]
    logits = verify(tokens, positions)[0]
    assert bool(logits.isfinite().all()), "the step's logits are not finite"
    return statistics.median(event_times(lambda: verify(tokens, positions), 20))


@torch.inference_mode()
def time_draft(head: Eagle3Head, target: KimiK2ForCausalLM, contexts: Sequence[int], width: int) -> tuple[float, float]:
    """Median microseconds of a head's first pass over `width` tokens a sequence, and of a later one over one token."""
    cache = new_cache(target, len(contexts), max(contexts), contexts, paged=True)
    drafter, device = HeadDrafter(head), cache.data.device
    drafter.start(cache, [])
    record, kept, medians = GraphRecorder(), list[Recorded](), list[float]()  # graphs that share memory live together
    for first, tokens in ((True, width), (False, 1)):
        ids = torch.zeros(len(contexts), tokens, dtype=torch.int64, device=device)
        positions = torch.tensor(contexts, device=device)[:, None] - tokens + torch.arange(tokens, device=device)
        states = len(head.aux_layers) * head.config.target_hidden_size if first else head.config.hidden_size
        hidden_states = torch.randn(len(contexts), tokens, states, device=device, dtype=head.dtype)
        at = torch.full((len(contexts),), tokens - 1, device=device)
        run = partial(drafter.run, first, max(contexts), ids, hidden_states, positions, at)
        run()
        kept.append(record(run))
        medians.append(statistics.median(event_times(kept[-1].replay, 20)))
    return medians[0], medians[1]


def lines(
    model: KimiK2ForCausalLM, batches: Sequence[int], context: int, width: int, routing: Routing | None
) -> Iterator[str]:
    """Passes of a rank's part of a head, and steps of one and of `width` tokens, as text.

    A plain step is the one that a sequence without drafts takes.
    """
    for form in FORMS:
        head = synthetic_head(model, form, parts=8)
        for batch in batches:
            first, later = time_draft(head, model, [context] * batch, width)
            passes = f"first pass {first:.1f} us, a later one {later:.1f} us"
            yield f"measured: {form} head, a part of 8, batch {batch}: {passes}"
        del head
    for batch in batches:
        plain_step = make_step(model, [context] * batch, communicate=False, routing=routing)
        plain = statistics.median(event_times(plain_step, 20))
        wide = time_verify(model, [context] * batch, width, routing=routing)
        yield (
            f"measured: batch {batch}, {model.config.num_hidden_layers} layers: plain step {plain / 1e3:.3f} ms,"
            f" step of {width} tokens {wide / 1e3:.3f} ms, {wide / plain:.2f} plain steps"
        )
