"""vLLM on a CPU with our model in it: the plain model's tokens, whenever requests come; and vLLM's own where it can."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from judge import Judge
from plain_tokens import expected
from processes import run_together
from sampling import PROCESSORS, SAMPLING, forced
from vllm_engine import OURS, WIDE, requests, serve

from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

needs.engine("vllm")

LAYERS, MOE_LAYERS = 3, 2


def check_ours(answer: dict[str, Any], log: str) -> None:
    """Our operations ran: each layer's as often as there were forward passes, all plain."""
    assert OURS in log
    calls = {name: sum(entries.values()) for name, entries in answer["calls"].items()}
    forwards, rest = divmod(calls["add_project"], LAYERS)
    assert rest == 0
    assert forwards >= 64
    assert calls["add_norm_route"] == calls["routed_experts_with_shared"] == MOE_LAYERS * forwards
    assert calls["mla_decode"] == calls["value_rows"] > 0
    assert calls["mla_naive_attention"] + calls["mla_absorbed_attention"] > 0  # prompts
    assert calls["float32_linear"] > 0
    # Most steps only carry on with the batch of the step before.
    assert forwards / 2 < calls["next_step"] < forwards
    assert all(entry == "plain" for entries in answer["calls"].values() for entry, count in entries.items() if count)


def check_answers(directory: Path, dtype: str, job: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """The plain model's tokens; in 16 bits, log-probabilities as near to float32's as the plain model's in 16 bits.

    There the tiny model's logits often tie, and an expert that rounding has changed moves them by 0.3.
    """
    if dtype == "float32":
        assert answer["tokens"] == expected(directory, dtype, job)
        return
    judge, rounded = Judge(directory), Judge(directory, getattr(torch, dtype))
    served, plain = [], []
    for one, tokens, said in zip(job, answer["tokens"], answer["logprobs"], strict=True):
        own = rounded.logprobs(one["prompt"], tokens).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        served.append(judge.errors(one["prompt"], tokens, said))
        plain.append(judge.errors(one["prompt"], tokens, own.tolist()))
    assert float(torch.cat(served).mean()) < 1.5 * float(torch.cat(plain).mean()) < 0.1


# vLLM takes FP8 weights with 16-bit activations alone.
@pytest.mark.parametrize(("name", "dtype"), [("fp8", "bfloat16"), ("thinking", "float32"), ("bf16", "float32")])
def test_same_tokens_as_the_plain_model(name: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    job = requests(seed=len(name))
    answer, log = serve(checkpoints[name], dtype, job, tmp_path)
    check_answers(checkpoints[name], dtype, job, answer)
    check_ours(answer, log)


@pytest.mark.parametrize(
    ("name", "dtype", "first", "second"),
    [
        ("fp8", "bfloat16", "dummy", "whole"),
        ("thinking", "float32", "auto", "reload"),
        ("bf16", "float32", "auto", "reload"),
    ],
)
def test_weights_replaced_in_a_live_engine(
    name: str, dtype: str, first: str, second: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Another checkpoint's in parts, over random ones too, as trainers send them; then the first's."""
    job = requests(seed=6, count=3)
    other = tmp_path / "other"
    write_synthetic_checkpoint(other, KimiK2Config.from_pretrained(checkpoints[name]), seed=66)
    both = [other, checkpoints[name]]
    swaps = [("parts", str(both[0])), (second, str(both[1]))]
    answer, log = serve(both[1], dtype, job, tmp_path, swaps=swaps, load_format=first, enable_prefix_caching=True)
    assert OURS in log
    if dtype == "float32":
        wanted = [expected(directory, dtype, job) for directory in both]
    else:  # rounding as in a fresh engine
        wanted = [serve(directory, dtype, job, tmp_path)[0]["tokens"] for directory in both]
    assert answer["again"] == wanted
    assert (answer["tokens"] == wanted[1]) == (first != "dummy")
    assert wanted[0] != wanted[1]


@pytest.mark.parametrize(("name", "dtype"), [("fp8", "bfloat16"), ("thinking", "float32")])
def test_steps_with_prompts_in_pieces(name: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The pieces that are CUDA graphs on a GPU, padded; steps of decodes alone run as they do.

    All requests come at once, so that a step has several prompts.
    """
    job = [{**one, "arrival": 0} for one in requests(seed=len(name))]
    answer, log = serve(checkpoints[name], dtype, job, tmp_path, pieces=256)
    check_answers(checkpoints[name], dtype, job, answer)
    assert OURS in log
    assert 2 <= answer["replays"] < answer["steps"]


def test_every_way_of_sampling(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Steps that carry on with a batch give what vLLM's own preparing gives, preempted requests too.

    The cache holds about half of what the requests need at once.
    """
    job = [{**one, "sampling": SAMPLING[at % len(SAMPLING)]} for at, one in enumerate(requests(seed=11, count=9))]
    options: dict[str, Any] = {"num_gpu_blocks_override": 26, "block_size": 16, "enable_prefix_caching": False}
    made = []
    for switch in ("1", "0"):
        environment = {"KIMI_K2_VLLM_DECODE_GRAPHS": switch}
        answer, log = serve(checkpoints["thinking"], "float32", job, tmp_path, environment=environment, **options)
        assert ("decode steps are prepared by vLLM" in log) == (switch == "0")
        made.append(answer)
    ours, theirs = made
    assert ours["calls"]["next_step"]["plain"] > ours["steps"] / 3 > theirs["calls"]["next_step"]["plain"] == 0
    assert (ours["tokens"], ours["logprobs"]) == (theirs["tokens"], theirs["logprobs"])
    assert ours["preempted"] == theirs["preempted"] > 0
    assert [len(tokens) < 64 for tokens in ours["tokens"]].count(True) >= 1  # a stop token


def test_custom_logits_processors(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Tokens that a user's processor forces, with the plain model's log-probabilities, in steps that carry on too."""
    draw, job = random.Random(5), requests(seed=13)
    wanted = [[draw.randrange(512) for _ in range(one["new_tokens"])] for one in job]
    asked = [{**one, "sampling": forced(tokens)} for one, tokens in zip(job, wanted, strict=True)]
    answer, log = serve(checkpoints["thinking"], "float32", asked, tmp_path, logits_processors=PROCESSORS)
    check_ours(answer, log)
    assert answer["tokens"] == wanted
    judge = Judge(checkpoints["thinking"])
    for one, tokens, said in zip(job, wanted, answer["logprobs"], strict=True):
        assert float(judge.errors(one["prompt"], tokens, said).max()) < 1e-4


def expected_of_ranks(directory: Path, layout: Layout, dtype: str, job: list[dict[str, Any]], out: Path) -> Any:
    """Greedy tokens of the plain model cut over ranks, which in 16 bits round their sums as vLLM's ranks must."""
    Presharder(directory, out / "ranks", layout).run()
    asked, result = out / "asked_of_ranks.json", out / "tokens.json"
    asked.write_text(json.dumps({"dtype": dtype, "requests": job}))
    worker = Path(__file__).with_name("ranks_worker.py")
    given = directory, out / "ranks", layout.moe_tp, layout.moe_ep, asked, result
    run_together([[sys.executable, worker, rank, *given] for rank in range(layout.ranks)], timeout=600)
    return json.loads(result.read_text())


# In float32 the tokens are those of one rank; FP8's blocks need wider projections than the tiny model's, and 16 bits.
@pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="KIMI_K2_SLOW=1 starts two ranks for each")
@pytest.mark.parametrize("experts", [False, True], ids=["cut", "shared out"])
@pytest.mark.parametrize(("name", "dtype"), [("wide", "bfloat16"), ("thinking", "float32"), ("bf16", "float32")])
def test_two_ranks(
    name: str, dtype: str, experts: bool, checkpoints: dict[str, Path], wide: Path, tmp_path: Path
) -> None:
    """Tensor parallelism, with routed experts cut or shared out; then vLLM's loader may leave out the other rank's."""
    job, directory = requests(seed=4), {**checkpoints, "wide": wide}[name]
    options: dict[str, Any] = {"enable_expert_parallel": experts, "enable_ep_weight_filter": experts and name != "bf16"}
    answer, log = serve(directory, dtype, job, tmp_path, tensor_parallel_size=2, **options)
    assert ("EP weight filter" in log) == options["enable_ep_weight_filter"]
    assert log.count(OURS) == 2
    if dtype == "float32":
        assert answer["tokens"] == expected(directory, dtype, job)
    else:
        layout = Layout(*((1, 2) if experts else (2, 1)), target="cuda", experts=STORED)
        assert answer["tokens"] == expected_of_ranks(directory, layout, dtype, job, tmp_path)


def test_fp8_cache_of_the_checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """compressed-tensors' kv_cache_scheme, which the plain model obeys too."""
    model = tmp_path / "model"
    shutil.copytree(checkpoints["thinking"], model)
    raw = json.loads((model / "config.json").read_text())
    raw["quantization_config"]["kv_cache_scheme"] = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    (model / "config.json").write_text(json.dumps(raw))
    job = requests(seed=13, count=4)
    answer, log = serve(model, "float32", job, tmp_path)
    assert OURS in log
    assert answer["tokens"] == expected(model, "float32", job) != expected(checkpoints["thinking"], "float32", job)


def test_caches_move_between_engines(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """One engine saves the caches of its prompts by layer, the next loads them: the plain model's tokens twice."""
    job, stored = requests(seed=12, count=3), tmp_path / "stored"
    config = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"shared_storage_path": str(stored)}  # type: ignore[assignment]
    wanted = expected(checkpoints["thinking"], "float32", job)
    for hits in (False, True):
        answer, log = serve(checkpoints["thinking"], "float32", job, tmp_path, kv_transfer_config=config)
        assert OURS in log
        assert answer["tokens"] == wanted
        assert ("External Cache Hit" in log) == hits
    files = [path.name for path in stored.rglob("*.safetensors")]
    assert {name.removesuffix(".safetensors") for name in files} == {
        f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)
    }
    assert len(files) == LAYERS * len(job)


def test_text_of_k2_5(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Its tensors have another prefix; vLLM's K2.5 asks for its text under this architecture."""
    model = tmp_path / "model"
    shutil.copytree(checkpoints["k2.5"], model)
    raw = json.loads((model / "config.json").read_text())
    text = {**raw["text_config"], "architectures": ["DeepseekV2ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(text))
    job = requests(seed=5)
    answer, log = serve(model, "float32", job, tmp_path)
    assert answer["tokens"] == expected(checkpoints["k2.5"], "float32", job)
    check_ours(answer, log)


def test_same_tokens_as_vllms_own_model(tmp_path: Path) -> None:
    """In BF16 weights, which is what vLLM's own model can serve on a CPU."""
    directory = tmp_path / "wide"
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2-instruct", **WIDE), "bf16"), seed=3)
    job = requests(seed=3)
    ours, log = serve(directory, "float32", job, tmp_path)
    check_ours(ours, log)
    theirs, log = serve(directory, "float32", job, tmp_path, plugins="kimi_k2_parsers")
    assert "kimi-k2" not in log
    assert not any(sum(entries.values()) for entries in theirs["calls"].values())
    assert ours["tokens"] == theirs["tokens"] == expected(directory, "float32", job)


def test_what_ours_cannot_serve_is_vllms(tmp_path: Path) -> None:
    """A model that ours refuses runs as without the plugin, and a line says why."""
    directory = tmp_path / "wide"
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2-instruct", **WIDE), "bf16"), seed=3)
    job = requests(seed=3, count=2)
    wanted = expected(directory, "float32", job)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 1}))
    answer, log = serve(directory, "float32", job, tmp_path)
    lines = [line for line in log.splitlines() if "kimi-k2: " in line]
    assert len(lines) == 1
    assert "all operations are vLLM's: " in lines[0]
    assert "num_nextn_predict_layers" in lines[0]
    assert answer["tokens"] == wanted
