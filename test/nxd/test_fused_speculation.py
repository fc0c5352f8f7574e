"""NxDI's fused speculation with Eagle3 heads of both forms: the tokens are the plain model's, whatever is drafted."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import environment
import graphs
import pytest
import schedule
import torch
from applications import application
from cases import LINES, WHOLE, Stored
from generations import generations
from graphs import DRAFTED, counted, graph_of
from harness import DRAWS, SLOW, bf16_preset, launch, neuron_config, plain_model

from kimi_k2.checkpoint.writer import write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig, Form, head_shapes
from kimi_k2.drafts.head import Eagle3Head
from kimi_k2.engine.drafters import DraftCache
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import ConfigError
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import HiddenStates, KimiK2ForCausalLM
from kimi_k2.plan.nxdi import draft_options
from kimi_k2.synthetic.draft import draft_fields, write_synthetic_head

PROMPTS = DRAWS or 3
DRAFTS, LENGTH = 3, 96
SAMPLED, LINES_SAMPLED = 640, 16
QUALITIES = {"random": None, "half": 0.5, "perfect": 0.0}
PRESETS = {"xla": "trn2-tp32-ep2", "layers": "trn2-tp32-ep2-nki-layers"}
PRESETS |= {f"{decode}_tp": name.replace("tp32-ep2", "tp64-ep1") for decode, name in PRESETS.items()}


class Target(NamedTuple):
    """A checkpoint, and the plain model of it."""

    directory: Path
    model: KimiK2ForCausalLM


@pytest.fixture(scope="module")
def targets(stored: Stored) -> Callable[[str], Target]:
    """By the form of decode: the kernel has sizes of its own, and are K2.5's, of which the text is drafted."""

    @functools.cache
    def of(decode: str) -> Target:
        whole = {} if decode.startswith("xla") else {"member": "kimi-k2.5", **WHOLE}
        directory = stored(num_hidden_layers=4, **whole)
        return Target(directory, plain_model(directory))

    return of


def head_of(model: KimiK2ForCausalLM, form: Form, directory: Path) -> Path:
    """A head that has what published heads may have."""
    changes: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    changes |= {"draft_vocab_size": 96} if form == "llama" else {"fc_norm": True, "norm_output": True}
    write_synthetic_head(directory / form, model.config, form, **changes)
    return directory / form


def batches_of(model: KimiK2ForCausalLM, batch: int, wrong: float | None) -> tuple[list[dict[str, Any]], list[Any]]:
    """Batches of drawn sizes and the plain model's replies; the oracle knows them and what follows."""
    rng, lengths = random.Random(2), [1, 17, 40, 2, 3]
    prompts = [tokens[: lengths[n % len(lengths)]] for n, tokens in enumerate(schedule.drawn(PROMPTS, 40))]
    batches, expected = [], []
    while prompts:
        some = [prompts.pop() for _ in range(min(rng.randint(1, batch), len(prompts)))]
        replies = generate(model, some, SamplingParams(20 + DRAFTS, ignore_eos=True))
        params = {"max_new_tokens": rng.choice([1, 2, 9, 20])}
        asked: dict[str, Any] = {"prompts": some, "params": params}
        if wrong is not None:
            asked |= {"oracle": [a + b for a, b in zip(some, replies, strict=True)], "wrong": wrong}
        batches.append(asked)
        expected.append([reply[: params["max_new_tokens"]] for reply in replies])
    return batches, expected


def head_drafts(model: KimiK2ForCausalLM, head: Eagle3Head, text: list[int], fed: list[int]) -> list[int]:
    """What a head without a cache drafts behind a text, where after each it is told another token."""
    states = HiddenStates(head.aux_layers)
    model(torch.tensor([text]), states=states)
    hidden, tokens, found = head.fuse(states.joined()[:, :-1]), list(text[1:]), []
    for token in fed:
        cache = LatentCache(model.config, 1, LENGTH)
        own = DraftCache(cache, head.cache_dim, head.dtype)
        positions = torch.arange(len(tokens))[None]
        normed, after = head(torch.tensor([tokens]), hidden, positions, own, len(tokens))
        found.append(int(head.to_target(head.logits(normed[0, -1]).argmax())))
        hidden, tokens = torch.cat((hidden, after[:, -1:]), dim=1), [*tokens, token]
    return found


@pytest.mark.parametrize(("form", "ranks", "quality", "decode", "batch"), [
    ("llama", 1, "half", "xla", 1), ("mla", 1, "half", "xla", 1), ("mla", 2, "half", "xla", 1),
    ("llama", 2, "perfect", "xla", 1), ("mla", 2, "random", "xla", 1), ("llama", 1, "half", "xla", 4),
    ("mla", 2, "half", "xla", 4), ("llama", 2, "half", "layers", 4),
    ("mla", 2, "half", "layers", 1), ("llama", 2, "perfect", "layers", 4),
    *(
        pytest.param(form, 2, "half", f"{decode}_tp", batch, marks=SLOW)
        for form, decode, batch in (("llama", "xla", 4), ("mla", "layers", 1), ("llama", "layers", 4))
    ),
])  # fmt: skip
def test_tokens_are_the_plain_models(
    targets: Callable[[str], Target], tmp_path: Path, form: Form, ranks: int, quality: str, decode: str, batch: int
) -> None:
    """One and two ranks, which are the presets' groups of experts or share each; with four lines each has its own."""
    target = targets(decode)
    batches, expected = batches_of(target.model, batch, QUALITIES[quality])
    head = head_of(target.model, form, tmp_path)
    job = job_of(target, head, tmp_path, ranks, decode, batch)
    answers = launch(generations, job, batches, ranks=ranks, timeout=500 + 30 * PROMPTS)
    plain = Eagle3Head.from_pretrained(head, target.model)
    for asked, answer, wanted in zip(batches, answers, expected, strict=True):
        assert answer["replies"] == wanted
        assert quality != "perfect" or answer["accepted"] == answer["drafted"]
        check_head(target.model, plain, asked["prompts"], wanted, answer["notes"])


def job_of(target: Target, head: Path, directory: Path, ranks: int, decode: str, batch: int = 1) -> dict[str, Any]:
    return {
        "checkpoint": target.directory, "draft": str(head), "draft_tokens": DRAFTS, "ranks": ranks,
        "preset": bf16_preset(PRESETS[decode], directory), "sampling": {},
        "deployment": {"length": LENGTH, "batch_size": batch}, "overrides": LINES if batch > 1 else {},
    }  # fmt: skip


@pytest.mark.parametrize(("form", "ranks", "decode"), [("llama", 1, "xla"), ("mla", 2, "layers")])
def test_executed_graphs(targets: Callable[[str], Target], tmp_path: Path, form: Form, ranks: int, decode: str) -> None:
    """What the compiler would get but for kernels, which XLA does not execute, with NxDI's host code and ours."""
    target = targets(decode)
    batches, expected = batches_of(target.model, 1, None)
    job = job_of(target, head_of(target.model, form, tmp_path), tmp_path, ranks, decode)
    asked = [{**batch, "adapter": len(batch["prompts"]) == 1} for batch in batches]
    for answer, wanted in zip(launch(generations, job, asked, ranks=ranks, way="executed"), expected, strict=True):
        assert answer["replies"] == wanted
        # NxDI's adapter stops where a step might give too many tokens, or behind one that did.
        found = answer.get("adapted", [[]])[0]
        assert all(one == other for one, other in zip(found, wanted[0], strict=False))


def test_sampled_tokens_have_the_targets_distribution(targets: Callable[[str], Target], tmp_path: Path) -> None:
    """The first two tokens of a reply, where the target's likeliest second one is drafted: half of all are accepted."""
    target, prompt, most = targets("xla"), [5, 6, 7], 4
    head = head_of(target.model, "mla", tmp_path)
    first = likeliest(target.model, prompt, most)
    second = {token: likeliest(target.model, [*prompt, token], most) for token in first}
    batch = {
        "prompts": [prompt] * LINES_SAMPLED, "times": SAMPLED // LINES_SAMPLED,
        "params": {"max_new_tokens": 2, "temperature": 1.5, "top_k": most},
        "table": {str(token): max(own, key=own.__getitem__) for token, own in second.items()},
    }  # fmt: skip
    job = job_of(target, head, tmp_path, 1, "xla") | {
        "sampling": {"do_sample": True, "dynamic": True, "global_topk": 64}
    }
    job |= {"draft_tokens": 1, "deployment": {"length": LENGTH, "batch_size": LINES_SAMPLED}}
    (answer,) = launch(generations, job, [batch], timeout=500)
    counts = Counter(map(tuple, answer["replies"]))
    pairs = {(one, two): p * q for one, p in first.items() for two, q in second[one].items()}
    assert set(counts) <= set(pairs)
    total = len(answer["replies"])
    squared = sum((counts[pair] - total * share) ** 2 / (total * share) for pair, share in pairs.items())
    # Chi-square of 15 degrees of freedom: above 44.3 with a probability of 1e-4.
    assert len(pairs) == 16 and squared < 44.3
    accepted = sum(p * max(second[one].values()) for one, p in first.items())
    assert abs(answer["accepted"] - total * accepted) < 4.5 * (total * accepted * (1 - accepted)) ** 0.5


@pytest.mark.parametrize(("preset", "form", "kernels"), [
    ("trn2-tp32-ep2", "llama", {}),
    ("trn2-tp64-ep1", "mla", {}), ("trn2-tp32-ep2-nki-layers", "llama", {"decode_layers": 3}),
])  # fmt: skip
def test_lowered_at_real_shapes(tmp_path: Path, preset: str, form: Form, kernels: dict[str, int]) -> None:
    """Four layers of the target beside the whole head: what a rank holds of it, and a step's sums over the ranks.

    The kernel of whole layers is called between the layers that the head reads.
    """
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=4)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    changes: dict[str, Any] = layers | ({"draft_vocab_size": 32000} if form == "llama" else {})
    fields = draft_fields(config, form, **changes)
    write_json(tmp_path / "config.json", fields)
    graph = graph_of(preset, DRAFTED, 4, draft=tmp_path, drafts=DRAFTS)
    counts, states = counted(graph), {name: list(kind[1]) for name, kind in graph.states.items()}
    draft = DraftConfig.from_dict(fields)
    shapes = head_shapes(draft, config) | {"embed_tokens.weight": (draft.vocab_size, 7168)}
    shapes |= {"lm_head.weight": (draft.draft_vocab_size, 7168)}
    held = (
        sum(math.prod(shape) * 2 // (64 if len(shape) > 1 else 1) for name, shape in shapes.items() if name != "d2t")
        + 4 * draft.draft_vocab_size
        + 2 * sum(math.prod(shape) for name, shape in states.items() if name.startswith("draft_model."))
    )
    own = [size for name, size in counts["counts"].held.items() if name.startswith("draft_model.")]
    assert sum(own) == pytest.approx(held, rel=1e-3)
    assert graphs.kernels(graph) == kernels
    # Attention and MLP of a draft pass; the pass behind verification writes the cache alone.
    sums = {
        collective["bytes"]: collective["times"]
        for collective in counts["collectives"]
        if collective["kind"] == "all-reduce"
    }
    assert sums[7168 * 2] == 2 * DRAFTS
    assert states["hidden_state_rolling_buffer.hidden_states"] == [2, 2 * (DRAFTS + 1), 3 * 7168]


def configured(head: Path, target: Target, **options: Any) -> Any:
    """The inference config of a target with a draft."""
    drafts = {**draft_options(DRAFTS), "on_device_sampling_config": {}}
    neuron = {**neuron_config(1, 1, 1, seq_len=LENGTH), **drafts, **options}
    return application({"checkpoint": target.directory, "draft": head, "neuron_config": neuron}).config


def test_a_saved_configuration_is_the_same(targets: Callable[[str], Target], tmp_path: Path) -> None:
    """As a compiled model's directory holds it, from which NxDI loads."""
    target = targets("xla")
    saved = configured(head_of(target.model, "llama", tmp_path), target)
    read = type(saved).from_json_string(saved.to_json_string())
    fused = read.fused_spec_config
    assert (fused.worker_cls, fused.draft_model_cls) == (
        environment.contrib("modeling_kimi_k2").NeuronKimiK2Model,
        environment.contrib("draft_head").NeuronKimiK2DraftForCausalLM,
    )
    assert read.aux_layers == fused.draft_config.aux_layers == [0, 2, 4]
    assert fused.draft_config.draft == saved.fused_spec_config.draft_config.draft
    assert (fused.draft_config.hf.hidden_size, fused.draft_config.hf.num_hidden_layers) == (256, 1)
    assert read.to_json_string() == saved.to_json_string()


@pytest.mark.parametrize(("changes", "options", "field"), [
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, {}, "eagle_aux_hidden_state_layer_ids"),
    ({"num_key_value_heads": 1}, {"tp_degree": 2, "moe_tp_degree": 2}, "num_key_value_heads"),
    ({"draft_vocab_size": 33}, {"tp_degree": 2, "moe_tp_degree": 2}, "draft_vocab_size"),
    ({"hidden_size": 128}, {}, "hidden_size"),
])  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(
    targets: Callable[[str], Target], tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    target = targets("xla")
    eagle = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    write_synthetic_head(tmp_path, target.model.config, "llama", **{**eagle, **changes})
    with pytest.raises(ConfigError, match=field):
        configured(tmp_path, target, **options)


def test_a_target_needs_its_draft(targets: Callable[[str], Target], tmp_path: Path) -> None:
    target = targets("xla")
    inference = configured(head_of(target.model, "llama", tmp_path), target)
    inference.fused_spec_config = None
    with pytest.raises(ConfigError, match="fused_spec_config"):
        environment.contrib("modeling_kimi_k2").NeuronKimiK2ForCausalLM(str(target.directory), inference)


def likeliest(model: KimiK2ForCausalLM, text: list[int], most: int) -> dict[int, float]:
    """Probabilities at temperature 1.5 of the tokens that may come next."""
    logits = model(torch.tensor([text]))[0, -1].double().topk(most)
    return dict(zip(logits.indices.tolist(), (logits.values / 1.5).softmax(0).tolist(), strict=True))


def check_head(
    model: KimiK2ForCausalLM, head: Eagle3Head, prompts: list[list[int]], replies: list[list[int]], notes: list[Any]
) -> None:
    """Of each step the head's own drafts, whatever was accepted before."""
    texts = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    for step in range(0, len(notes), DRAFTS):
        positions, own, fed = zip(*notes[step : step + DRAFTS], strict=True)
        for row, text in enumerate(texts):
            begun = text[: positions[0][row] + 2]
            if len(begun) < positions[0][row] + 2:  # an ended line, which is computed and ignored
                continue
            found = [tokens[row] for tokens in own]
            assert found == head_drafts(model, head, begun, [tokens[row] for tokens in fed])
