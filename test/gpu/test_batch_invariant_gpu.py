"""Batch-invariant mode on a Hopper GPU: every row has the bits that it has alone.

`KIMI_K2_DRAWS` is the number of drawn batches of a case of the model's tests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from exact import distance, normed
from machines import Machine
from on_hopper import NEEDS_HOPPER
from stored_experts import drawn
from torch import Tensor

from kimi_k2.bench.kernels.model import synthetic_rank
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.generate import prefill
from kimi_k2.engine.prompt_step import PromptStep
from kimi_k2.kernels.experts.entries import prepare_w4a16_experts
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops import registry
from kimi_k2.ops.experts import routed_experts, routed_experts_with_shared
from kimi_k2.ops.linear import Weight, add_project, dequantize
from kimi_k2.ops.mla import absorb_and_store, attend_values, attention_plan
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.config import with_format

pytestmark = [*NEEDS_HOPPER, pytest.mark.memory(7)]
DRAWN = int(os.environ.get("KIMI_K2_DRAWS", "12"))
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN, TOP_K = 7168, 8
BATCHES = (1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 129, 200, 256)
# Decode steps' tokens, and prompts'.
PHASES = [*((True, count) for count in BATCHES), *((False, count) for count in (1, 3, 16, 17, 100, 300, 1500))]


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    torch.manual_seed(0)
    registry.pin("")
    with registry.computing(batch_invariant=True):
        yield
    registry.pin("")


normal = Machine("gpu").normal


def assert_rows_alone(operation: Callable[..., Tensor | tuple[Tensor, ...]], *given: Tensor, rows: int = 6) -> None:
    """Rows of a call's results, and those of calls with one row each and with a few in another order."""
    count = len(given[0])
    whole = operation(*given)
    whole = whole if isinstance(whole, tuple) else (whole,)
    some = random.Random(count).sample(range(count), min(rows, count))
    for chosen in [*([one] for one in some), some[::-1]]:
        part = operation(*(tensor[chosen].contiguous() for tensor in given))
        for index, (found, wanted) in enumerate(zip(part if isinstance(part, tuple) else (part,), whole, strict=True)):
            assert torch.equal(found, wanted[chosen]), (count, chosen, index)


@pytest.mark.parametrize(("rows", "columns"), [(2112, 7168), (1536, 1536), (7168, 256), (576, 7168)])
@pytest.mark.parametrize("stored", ["fp8", "bf16", "e4m3"])
def test_linears(rows: int, columns: int, stored: str) -> None:
    """And near float64: few tokens and many, the norm's quotient in the tokens' scales or in the sums."""
    registry.pin("fp8_linear=e4m3" if stored == "e4m3" else "")
    weight = Weight({"weight": normal(rows, columns, scale=0.02)})
    if stored != "bf16":
        weight = drawn("fp8", 1, columns, rows).down.expert(0)
    norm, matrix = normal(columns), dequantize(weight, torch.float32).double().T
    for decoding, count in PHASES:
        x, delta = normal(count, columns), normal(count, columns)
        with registry.computing(decoding=decoding):
            assert_rows_alone(lambda x, delta: add_project(x, delta, weight, norm, 1e-6), x, delta)
            found, total = add_project(x, delta, weight, norm, 1e-6)
        assert torch.equal(total, x + delta)
        assert stored == "e4m3" or distance(found, normed(total, norm) @ matrix) < 5e-3, count


# Stored form, width, whether there is a shared expert, and tokens; of long prompts tiles whose operands change sides.
EXPERTS = [
    *product(("fp8", "int4", "int4 w2_bf16", "mxfp4-packed", "nvfp4-packed", "bf16"), (256, 512), (False,), (PHASES,)),
    *(("fp8", inter, False, [(False, 5000), (False, 9000)]) for inter in (256, 512)),
    *product(("fp8", "int4"), (128, 256, 512, 1024), (True,), (PHASES[: len(BATCHES)],)),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "inter", "together", "steps"), EXPERTS)
def test_experts(stored: str, inter: int, together: bool, steps: list[tuple[bool, int]]) -> None:
    """Even and skewed choices: how many tokens share an expert changes from call to call; some pairs do not count."""
    count = 48 if together else 96
    experts = drawn(stored, count, inter, HIDDEN, draw_on="cuda")
    experts, model = prepare_w4a16_experts(experts, BF16) or experts, count
    if inter == 512:  # every third expert of the model is not held
        model = count * 3 // 2
        expert_map = torch.full((model,), -1, dtype=torch.int32, device="cuda")
        expert_map[torch.arange(count, device="cuda") * 3 // 2] = torch.arange(count, dtype=torch.int32, device="cuda")
        experts = replace(experts, expert_map=expert_map)
    one = drawn("fp8" if stored == "fp8" else "bf16", 1, inter, HIDDEN)
    shared = one.gate_up.expert(0), one.down.expert(0)

    def operation(x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        if together:
            return routed_experts_with_shared(x, experts, chosen, scores, *shared)
        return routed_experts(x, experts, chosen, scores)

    for (decoding, tokens), favourites in product(steps, (model, 9)):
        chosen = torch.rand(tokens, favourites, device="cuda").argsort(1)[:, :TOP_K].contiguous()
        scores = torch.rand(tokens, TOP_K, device="cuda")
        chosen[::3, 2], scores[1::2, 5] = -1, 0
        with registry.computing(decoding=decoding):
            assert_rows_alone(operation, normal(tokens, HIDDEN), chosen, scores, rows=4)


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("cached", [BF16, E4M3])
def test_decode_attention(heads: int, cached: torch.dtype) -> None:
    """From q to values, over lengths of every kind, each in caches of several capacities, and in pages."""
    w_uk, w_uv, norm = normal(heads, 128, 512, scale=0.05), normal(heads, 128, 512, scale=0.05), normal(512)

    def attend(q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, at: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache = cache.clone().view(cached)  # as bytes: PyTorch indexes no FP8
        slots = at + torch.arange(0, len(at) * cache.shape[1], cache.shape[1], device="cuda")
        query = absorb_and_store(q, kv, norm, cos, sin, slots, w_uk, cache, 1e-6)
        lengths = (at + 1).int()
        plan = attention_plan(lengths, cache, heads)
        values = attend_values(query, cache, lengths, w_uv, 0.1, plan)
        wider = torch.cat((cache.view(torch.uint8), cache.view(torch.uint8)), dim=1).view(cached)
        assert torch.equal(values, attend_values(query, wider, lengths, w_uv, 0.1))
        whole = torch.nn.functional.pad(cache.view(torch.uint8), (0, 0, 0, -cache.shape[1] % 64))
        pages, order = whole.view(-1, 64, whole.shape[2]), torch.randperm(whole.shape[1] // 64 * len(at), device="cuda")
        shuffled = torch.empty_like(pages)
        shuffled[order] = pages
        shuffled, table = shuffled.view(cached), order.view(len(at), -1).int()
        for plan in (None, attention_plan(lengths, shuffled, heads, table)):
            assert torch.equal(values, attend_values(query, shuffled, lengths, w_uv, 0.1, plan, table))
        return query, values

    with registry.computing(decoding=True):
        for count in BATCHES:
            most = 9000 if count <= 8 else 1300 if count <= 64 else 200
            cache = normal(count, most, 576).to(cached).view(torch.uint8)
            at = (torch.rand(count, device="cuda").pow(2) * most).long()
            at[0] = most - 1
            given = normal(count, heads * 192), normal(count, 576), normal(count, 32), normal(count, 32), at, cache
            assert_rows_alone(attend, *given)


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_tokens_of_a_sequence_over_the_end_of_a_page(heads: int) -> None:
    """Each sees the tokens before it that the same step stores, also where they lie in the page before its own."""
    sequences, new, pages = 6, 4, 6
    w_uk, w_uv, norm = normal(heads, 128, 512, scale=0.05), normal(heads, 128, 512, scale=0.05), normal(512)
    at = (
        torch.arange(61, 61 + sequences, device="cuda")[:, None] + 64 * 4 + torch.arange(new, device="cuda")
    ).flatten()
    table = torch.randperm(sequences * pages, device="cuda").view(sequences, pages).repeat_interleave(new, dim=0)
    slots = table.gather(1, at[:, None] // 64)[:, 0] * 64 + at % 64
    lengths, table = (at + 1).int(), table.int()
    with registry.computing(decoding=True):
        for _ in range(100):
            q, kv, cos, sin = (normal(len(at), size) for size in (heads * 192, 576, 32, 32))
            cache = normal(sequences * pages, 64, 576)
            plan, found = attention_plan(lengths, cache, heads, table), list[Tensor]()
            for _ in range(2):  # the second time all have been stored before
                query = absorb_and_store(q, kv, norm, cos, sin, slots, w_uk, cache, 1e-6)
                found.append(attend_values(query, cache, lengths, w_uv, 0.1, plan, table))
            assert torch.equal(*found)


FP8, INT4 = "kimi-k2-instruct-0905", "kimi-k2-thinking"
MODELS = [
    (FP8, "fp8", 8, "stored"), (INT4, "int4", 8, "stored"), (FP8, "bf16", 8, "stored"), (INT4, "int4", 8, "w2_bf16"),
    pytest.param((FP8, "fp8", 4, "stored"), marks=pytest.mark.memory(12)),
]  # fmt: skip


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request: pytest.FixtureRequest) -> KimiK2ForCausalLM:
    """A dense and a MoE layer of a rank at the real sizes."""
    preset, stored, ranks, experts = request.param
    config = with_format(KimiK2Config.load(preset), stored).model_copy(update={"num_hidden_layers": 2})
    model = synthetic_rank(config, Layout(ranks, target="cuda", experts=experts), 0, communicate=False)
    model.batch_invariant = True
    return model


class Pool:
    """Sequences with cached contexts, the token that follows, and its logits alone."""

    def __init__(self, model: KimiK2ForCausalLM, cached: torch.dtype, count: int = 24) -> None:
        rng = random.Random(2)
        self.lengths = [rng.choice([1, 63, 64, 200, 500, 1000, 1023, 1800]) + rng.randint(0, 9) for _ in range(count)]
        layers = model.config.num_hidden_layers
        self.contexts = [normal(layers, length, 576).to(cached).view(torch.uint8) for length in self.lengths]
        self.tokens = torch.randint(0, model.lm_head.weight.shape[0], (count,), device="cuda")
        self.step = DecodeStep(model, new_cache(model, 1, 2560, dtype=cached), graph=True)
        self.alone = torch.cat([self.logits(self.step, [one]).clone() for one in range(count)])

    def logits(self, step: DecodeStep, chosen: list[int]) -> Tensor:
        """Of these sequences, in this order."""
        for place, one in enumerate(chosen):
            step.cache.data.view(torch.uint8)[:, place, : self.lengths[one]] = self.contexts[one]
        return step(self.tokens[chosen], torch.tensor([self.lengths[one] for one in chosen], device="cuda"))

    def drawn(self, rng: random.Random, step: DecodeStep) -> bool:
        """Whether all logits of a drawn batch are those of the sequences alone."""
        chosen = [rng.randrange(len(self.lengths)) for _ in range(step.cache.data.shape[1])]
        return torch.equal(self.logits(step, chosen), self.alone[chosen])


@torch.inference_mode()
@pytest.mark.parametrize("cached", [BF16, E4M3])
def test_decode_steps_of_drawn_batches(model: KimiK2ForCausalLM, cached: torch.dtype) -> None:
    """Graphs of several batch sizes and capacities, replayed over drawn sequences at drawn places."""
    pool, rng = Pool(model, cached), random.Random(3)
    batches = BATCHES if DRAWN > 50 else (2, 9, 64, 200)
    drawn = 0
    for number, batch in enumerate(batches):
        step = DecodeStep(model, new_cache(model, batch, rng.choice([1900, 2560]), dtype=cached), graph=True)
        for _ in range(-(-DRAWN // len(batches)) if number or DRAWN <= 50 else 4):
            assert pool.drawn(rng, step), batch
            drawn += 1
        step.close()
    print(f"{drawn} drawn decode steps: every logit bit-equal")
    assert "plain" not in registry.explain().split("routed_experts: ")[1].split(";")[0]


@torch.inference_mode()
def test_the_normal_mode_fails_the_test(model: KimiK2ForCausalLM) -> None:
    model.batch_invariant = False
    pool, rng = Pool(model, BF16, 8), random.Random(3)
    step = DecodeStep(model, new_cache(model, 33, 1900, dtype=BF16), graph=True)
    assert not pool.drawn(rng, step)
    model.batch_invariant = True


@torch.inference_mode()
@pytest.mark.parametrize("cached", [BF16, E4M3])
def test_prompts_in_drawn_chunks(model: KimiK2ForCausalLM, cached: torch.dtype) -> None:
    """Logits and cache entries of prompts, side by side and cut anyhow, from graphs of padded sizes and without."""
    rng, vocabulary = random.Random(4), model.lm_head.weight.shape[0]
    prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length in (1, 5, 17, 64, 200, 333, 700)]
    made: list[tuple[Tensor, Tensor]] = []
    for prompt in prompts:
        cache = new_cache(model, 1, len(prompt), dtype=cached)
        step = PromptStep(DecodeStep(model, cache))
        logits = prefill(model, [prompt], cache, None, None, step)
        made.append((logits[0].clone(), cache.data[:, 0].view(torch.uint8).clone()))
    reads = {}
    for batch in (1, 2, 4):
        reads[batch] = PromptStep(DecodeStep(model, new_cache(model, batch, 1024, dtype=cached), graph=True))
    recorders = {read: read.step.record for read in reads.values()}
    for _ in range(DRAWN):
        read = rng.choice(list(reads.values()))
        chosen = [rng.randrange(len(prompts)) for _ in range(read.cache.data.shape[1])]
        read.step.record = recorders[read] if rng.random() < 0.7 else None
        chunk = rng.choice([None, None, 16, 64, 100, 129, 256])
        logits = prefill(model, [prompts[one] for one in chosen], read.cache, chunk, None, read)
        for place, one in enumerate(chosen):
            assert torch.equal(logits[place], made[one][0]), (chosen, place, chunk)
            entries = read.cache.data[:, place, : len(prompts[one])].view(torch.uint8)
            assert torch.equal(entries, made[one][1]), (chosen, place, chunk)
    for read in reads.values():
        read.close()
    print(f"{DRAWN} drawn sets of prompts: every logit and cache entry bit-equal")
