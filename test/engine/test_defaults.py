"""generation_config.json beside transformers' own `generate` on the same file: the same tokens, or refused by name."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_k2.api import KimiK2, Prompt
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.defaults import NAME, GenerationDefaults
from kimi_k2.engine.sampler import Sampler
from kimi_k2.errors import ConfigError, GenerationError, KimiK2Warning
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

transformers = pytest.importorskip("transformers")
FILES, NEW, PROMPT = 500, 6, [5, 9, 5, 301, 77, 9]
SIZES = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "hidden_size": 64, "intermediate_size": 64}
# What files of people hold: values that do something, or nothing.
FIELDS: dict[str, list[Any]] = {
    "do_sample": [True, True, True, False, None],
    "temperature": [0.3, 0.7, 1.0, 2.0, None],
    "top_k": [1, 5, 20, 50, 0, 10**6, None],
    "top_p": [0.1, 0.5, 0.95, 1, None],
    "min_p": [0.02, 0.3, 0, 1, None],
    "repetition_penalty": [0.4, 1.3, 1, None],
    "max_new_tokens": [1, 3, 5, None],
    "max_length": [8, 10, 8192, 262144, None],
    "min_new_tokens": [2, 4, 0, 100, None],
    "min_length": [0, 8, 10, None],
    "eos_token_id": [513, "often", ["often", 3]],
    "bos_token_id": [None, 512],
    "pad_token_id": [None, 512],
    "length_penalty": [0.5, 4.0],
    "use_cache": [True, False],
    "renormalize_logits": [True, False],
    "early_stopping": [True, False],
    "transformers_version": ["4.57.1"],
    "_from_model_config": [True],
    "cache_implementation": [None, "dynamic"],
}
MOST_DRAWN = 11
# And what no file says rightly, or what `generate` has not; None and 1 do nothing.
REFUSED: dict[str, list[Any]] = {
    "do_sample": ["yes", 1],
    "temperature": [-1, -0.5, "hot", float("nan"), float("inf")],
    "top_k": [-3, 2.5],
    "top_p": [0, 1.5, "x"],
    "min_p": [-0.1, 2],
    "repetition_penalty": [0, 3.0, -1],
    "max_new_tokens": [0, -1, 1.5],
    "max_length": [0, 3, True],
    "min_new_tokens": [-1],
    "min_length": [-1],
    "eos_token_id": [10**6, "x", True, -1, [-1], {"a": 1}, 10**400],
    **{name: [2.0] for name in ("diversity_penalty", "no_repeat_ngram_size", "guidance_scale", "num_beams")},
    **{name: [0.5] for name in ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "max_time")},
    **{name: [[9]] for name in ("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "bad_words_ids")},
    **{name: [9] for name in ("forced_bos_token_id", "forced_eos_token_id", "num_return_sequences", "max_lenght")},
    **{name: [True] for name in ("remove_invalid_values", "token_healing", "use_mtp", "custom_generate", "foo")},
    **{name: [3] for name in ("prompt_lookup_num_tokens", "encoder_repetition_penalty", "assistant_early_exit")},
    "exponential_decay_length_penalty": [[2, 1.5]],
    "stop_strings": ["a", ["b"]],
    "watermarking_config": [{"greenlist_ratio": 0.3}],
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[KimiK2, Path]:
    directory = tmp_path_factory.mktemp("defaults")
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2-instruct", **SIZES), "bf16"), seed=3)
    with KimiK2.open(directory, otherwise={"max_new_tokens": NEW}) as model:
        return model, directory


@pytest.fixture(scope="module")
def theirs(ours: tuple[KimiK2, Path]) -> Any:
    return load_transformers_model(ours[1])


def drawn(draw: random.Random, often: int) -> dict[str, Any]:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(each) for each in value]
        return often if value == "often" else value

    names = draw.sample(list(FIELDS)[:MOST_DRAWN], draw.randint(1, 5))
    names += draw.sample(list(FIELDS)[MOST_DRAWN:], draw.randint(0, 2))
    fields = {name: filled(draw.choice(FIELDS[name])) for name in names}
    if draw.random() < 0.4:
        fields["do_sample"] = True
    if draw.random() < 0.2:
        name = draw.choice(list(REFUSED))
        fields[name] = draw.choice(REFUSED[name])
    return fields


def by_transformers(model: Any, directory: Path) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Tokens, logits and processed scores of its `generate`, as the directory's file has it."""
    model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    # What a command says where the file does not: so many tokens.
    said = json.loads((directory / NAME).read_text())
    if "eos_token_id" not in said:  # transformers would never end: the one thing that is otherwise here
        model.generation_config.eos_token_id = model.config.eos_token_id
    bounded = said.get("max_new_tokens") is not None or (said.get("max_length") or 10**9) < 8192
    more = {} if bounded else {"max_new_tokens": NEW}
    ids = torch.tensor([PROMPT])
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), output_scores=True, output_logits=True,
            return_dict_in_generate=True, **more,
        )  # fmt: skip
    return out.sequences[0, len(PROMPT) :].tolist(), torch.stack(out.logits, dim=1), torch.stack(out.scores, dim=1)


def outcome(model: KimiK2, theirs: Any, directory: Path, often: int) -> str:
    """`refused`, `greedy` or `sampled`; AssertionError where both ran and differ."""
    fields = json.loads((directory / NAME).read_text())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KimiK2Warning)
            defaults = GenerationDefaults.from_pretrained(directory, model.config)
        params = defaults.params({}, {"max_new_tokens": NEW})
        call = replace(model, params=params, defaults=defaults)
        [(_, reply)] = call.answer([Prompt(PROMPT, {"parse": False})]) if params.temperature == 0 else [(0, None)]
        params = defaults.bounded(params, len(PROMPT))
    except ConfigError as error:
        assert str(directory / NAME) in str(error)
        assert error.field in fields
        return "refused"
    except GenerationError as error:
        assert "max_length" in str(error)
        assert fields["max_length"] <= len(PROMPT)
        return "refused"
    tokens, logits, scores = by_transformers(theirs, directory)
    if params.temperature == 0:
        greedy = [token for step in model.generator.stream([PROMPT], params) for token in step.tokens]
        assert greedy == tokens, fields
        assert reply is not None
        assert reply.tokens == len(tokens), fields
        return "greedy"
    ends = [position for position, token in enumerate(tokens) if token in params.eos_token_ids]
    assert len(tokens) == (ends[0] + 1 if ends else params.max_new_tokens), fields
    processed = Sampler(params, [PROMPT]).along(logits.float(), torch.tensor([tokens[:-1]], dtype=torch.int64))
    own = Sampler(params, [PROMPT]).probabilities(processed.flatten(0, 1))
    own = own / own.sum(dim=-1, keepdim=True)
    assert float((own - scores.flatten(0, 1).softmax(dim=-1)).abs().max()) <= 1e-5, fields
    return "sampled"


def test_drawn_files_beside_transformers(ours: tuple[KimiK2, Path], theirs: Any, tmp_path: Path) -> None:
    model, _ = ours
    first = next(iter(model.generator.stream([PROMPT], model.params))).tokens[0]
    assert first is not None
    draw, found = random.Random(45), Counter[str]()
    for number in range(FILES):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / NAME).write_text(json.dumps(drawn(draw, first)))
        found[outcome(model, theirs, directory, first)] += 1
    print(f"\n{FILES} files: {dict(found)}")
    assert min(found.values()) > FILES // 10
    assert len(found) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_generate_has_not_is_refused_by_name(ours: tuple[KimiK2, Path], tmp_path: Path, name: str) -> None:
    for value in REFUSED[name]:
        for more in ({}, {"do_sample": True}, {"do_sample": False}):
            (tmp_path / NAME).write_text(json.dumps({**more, name: value}))
            with pytest.raises((ConfigError, GenerationError), match=name):
                GenerationDefaults.from_pretrained(tmp_path, ours[0].config).bounded(ours[0].params, 3)


def test_what_the_call_says_wins(tmp_path: Path) -> None:
    config = KimiK2Config.from_preset("kimi-k2-instruct")
    said = {"do_sample": True, "temperature": 0.5, "max_length": 100, "min_length": 40, "min_p": 0.1}
    (tmp_path / NAME).write_text(json.dumps(said))
    defaults = GenerationDefaults.from_pretrained(tmp_path, config)
    params = defaults.params({"temperature": 0.9}, {"max_new_tokens": 128, "temperature": 0.6})
    assert (params.temperature, params.top_k, params.min_p, params.max_new_tokens) == (0.9, 50, 0.1, 128)
    assert defaults.bounded(params, 30) == replace(params, max_new_tokens=70, min_tokens=10)
    assert defaults.without({"max_new_tokens": 3}).bounded(params, 200) == params
    (tmp_path / NAME).write_text("{}")
    assert GenerationDefaults.from_pretrained(tmp_path, config).params({}, {"temperature": 0.6}).temperature == 0.6
    (tmp_path / NAME).write_text(json.dumps({"temperature": 0.3, "top_k": 7}))
    with pytest.warns(KimiK2Warning, match="temperature, top_k: without do_sample"):
        defaults = GenerationDefaults.from_pretrained(tmp_path, config)
    assert defaults.params({}, {"temperature": 0.6}).temperature == 0
    assert defaults.params({"temperature": 0.9}, {}).top_k == 7


def test_config_json_counts_where_there_is_no_file(tmp_path: Path) -> None:
    """transformers does the same; what its version 4 wrote of its own accord says nothing."""
    config = KimiK2Config.from_preset("kimi-k2-instruct")
    old = {"do_sample": False, "temperature": 1.0, "top_k": 50, "max_length": 20, "num_beams": 1, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": old, "repetition_penalty": 1.3}))
    assert GenerationDefaults.from_pretrained(tmp_path, config).sampling == {
        "repetition_penalty": 1.3,
        "eos_token_ids": {163585, 163586},
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_beams": 4}}))
    with pytest.raises(ConfigError, match=r"config\.json: field 'num_beams'"):
        GenerationDefaults.from_pretrained(tmp_path, config)
    (tmp_path / NAME).write_text(json.dumps({"eos_token_id": [163593]}))
    assert GenerationDefaults.from_pretrained(tmp_path, config).sampling == {"eos_token_ids": {163593, 163586}}


@pytest.mark.parametrize(
    "field", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_p": 1.0}, {"top_k": 0, "min_p": 0.0}]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_a_greedy_call_could_not_obey_is_refused(
    ours: tuple[KimiK2, Path], field: dict[str, Any], temperature: float
) -> None:
    """As transformers' strict validation does, whose `top_k` says nothing at 50; at open and at each call."""
    model, directory = ours
    does = {name: value for name, value in field.items() if value}
    theirs = transformers.GenerationConfig(do_sample=temperature > 0, **does)
    try:
        theirs.validate(strict=True)
        refused = False
    except ValueError:
        refused = True
    for call in (
        lambda **said: model.generate("a", max_new_tokens=2, **said),
        lambda **said: KimiK2.from_pretrained(directory, sampling=said),
    ):
        if refused:
            with pytest.raises(GenerationError, match=f"{next(iter(field))}: goes with a temperature"):
                call(temperature=temperature, **field)
        else:
            call(temperature=temperature, **field)


def test_no_reply_can_be_longer_than_it_may(ours: tuple[KimiK2, Path]) -> None:
    """vLLM refuses it too; what the file asks for yields to the call."""
    with pytest.raises(GenerationError, match=r"min_tokens: expected at most max_new_tokens \(3\), got 8"):
        ours[0].generate("a", max_new_tokens=3, min_tokens=8)
    model = replace(ours[0], params=replace(ours[0].params, min_tokens=8))
    assert model.generate("a", max_new_tokens=3)[0].tokens == 3
