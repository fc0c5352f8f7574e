"""vLLM on a CPU with our model in it: flags of published recipes alone, together and drawn; the plain model's tokens.

A row is a model and flags; each flag says what it asks of vLLM, what tokens are then right, and what shows that it was
obeyed. `KIMI_K2_DRAWS=40 KIMI_K2_SLOW=1` adds forty drawn combinations, as many prompts to each flag alone, and what
takes up to four ranks: hours on two cores.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import engines
import pytest
import torch
from adapters import ATTENTION, MLP, write_adapter
from engines import OURS, PROCESSORS, SAMPLING, STOCK, WIDE, Served, forced, requests, serve, serve_replicas
from heads import write_dflash_head, write_following_head
from judge import Judge
from plain_tokens import expected
from scripted import write_random_checkpoint

from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import Form
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format
from kimi_k2.tokenization.tokenizer import KimiTokenizer

engines.need("vllm")

SEED = 50
DRAWS = int(os.environ.get("KIMI_K2_DRAWS", "2"))
LEFT_TO_STOCK = "all operations are vLLM's: "
LAYERS, MOE_LAYERS, DRAFTS = 3, 2, 3
REGEX = "([a-z]{1,3} )*"
FOUR_BITS = (
    "nvfp4",
    "nvfp4-packed",
    "mxfp4",
    "mxfp4-packed",
)  # floats, as modelopt, quark and llm-compressor write them


@dataclass
class Deployment:
    """What a row is served with.

    Attributes:
        name: of its model.
        model: its directory.
        plain: of what the plain model reads.
        jobs: requests of each replica.
        out: for what flags write.
        draw: values of flags.
        alone: one flag at most is asked for, but for when steps are scheduled and where experts are.
        options: of the engine.
        told: what vllm_requests.py is told.
        wanted: tokens of each request, of a model; None for the plain model's.
        swapped: models whose weights come later.
        ranks: of the deployment.
        usual: steps are vLLM's usual ones, of one rank without adapters or drafts.
        proofs: of the answer and the log: what shows that a flag was obeyed.
    """

    name: str
    model: Path
    plain: Path
    jobs: list[list[dict[str, Any]]]
    out: Path
    draw: random.Random
    alone: bool
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    wanted: Callable[[Path], list[list[int]]] | None = None
    swapped: list[Path] = field(default_factory=list)
    ranks: int = 1
    usual: bool = True
    proofs: list[Callable[[dict[str, Any], str], None]] = field(default_factory=list)

    @property
    def job(self) -> list[dict[str, Any]]:
        return self.jobs[0]

    def tokens(self, model: Path) -> list[list[int]]:
        return self.wanted(model) if self.wanted else expected(model, self.dtype, self.job)

    def serve(self, **environment: str) -> list[Served]:
        folder = self.out / f"served{len(list(self.out.iterdir()))}"
        return serve_replicas(
            self.model, self.dtype, self.jobs, folder, self.environment | environment, told=self.told, **self.options
        )

    def says(self, text: str, said: bool = True) -> None:
        """The log has to have this, or must not."""

        def check(_: Any, log: str) -> None:
            assert (text in log) == said, text

        self.proofs.append(check)


Flag = Callable[[Deployment], None]


def plain(directory: Path) -> KimiK2ForCausalLM:
    return KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32)


def sums(answer: dict[str, Any]) -> dict[str, int]:
    """Calls of each operation; ranks count for themselves."""
    return {name: sum(entries.values()) for name, entries in answer["calls"].items()}


def tensor(it: Deployment) -> None:
    it.ranks *= 2 // it.options.get("tensor_parallel_size", 1)
    it.options["tensor_parallel_size"] = 2


def pipeline(it: Deployment) -> None:
    """Without eager execution, as vLLM's worker on a CPU makes what stages hand on when it warms a model up."""
    it.ranks *= 2
    it.options |= {"pipeline_parallel_size": 2, "enforce_eager": False}


def context(it: Deployment) -> None:
    tensor(it)
    it.options |= {"decode_context_parallel_size": 2, "worker_extension_cls": "in_workers.Spread"}
    it.options["dcp_kv_cache_interleave_size"] = it.draw.choice([1, 4])
    it.options.setdefault("block_size", 16)
    it.told["parts"] = True
    it.says("prepared by vLLM: ")  # with a pipeline by that reason


def experts(it: Deployment) -> None:
    tensor(it)
    shared_out(it)
    it.options["enable_ep_weight_filter"] = filtered = it.draw.random() < 0.5
    it.says("EP weight filter", filtered)


def shared_out(it: Deployment) -> None:
    it.options["enable_expert_parallel"] = True


def replicas(it: Deployment) -> None:
    """The second rank's requests come when the first has few left: in between each runs steps for the other's."""
    it.jobs = [requests(31 + rank, 4, new_tokens=32) for rank in range(2)]
    for request in it.jobs[1]:
        request["arrival"] += 45
    it.told["steps"] = 200
    it.options["distributed_executor_backend"] = "uni"
    it.usual = False

    def calls(answer: dict[str, Any], _: str) -> None:
        counts = sums(answer)
        forwards = counts["routed_experts"] // MOE_LAYERS
        assert counts["routed_experts"] == MOE_LAYERS * forwards > 64 * MOE_LAYERS
        assert counts["add_project"] == LAYERS * forwards or it.options.get("enable_lora")
        assert counts["routed_experts_with_shared"] == counts["next_step"] == 0

    it.proofs.append(calls)


def parts(it: Deployment) -> None:
    it.told["parts"] = True
    it.options["max_num_batched_tokens"] = it.draw.choice([16, 32, 48])
    it.options.setdefault("block_size", 32)


def one_left(it: Deployment) -> None:
    """The first prompt, before any other comes, is as many tokens as a step takes, and one."""
    parts(it)
    it.job[0]["prompt"] = (it.job[0]["prompt"] * 17)[: it.options["max_num_batched_tokens"] + 1]
    for request in it.job[1:]:
        request["arrival"] += 4


def prefixes(it: Deployment) -> None:
    parts(it)
    it.options["enable_prefix_caching"] = True
    it.job[-1]["prompt"] = it.job[0]["prompt"][:50] + it.job[-1]["prompt"][:20]


def pages(it: Deployment) -> None:
    it.told["parts"] = True
    it.options["block_size"] = it.draw.choice([16, 32, 64, 128])


def cut_pages(it: Deployment) -> None:
    """Which the kernels take in parts."""
    parts(it)
    it.options |= {"block_size": 64, "worker_extension_cls": "in_workers.CutPages"}
    it.usual = False
    it.says("decode steps are prepared by vLLM: pages of 64 tokens in parts of 16")


def few_pages(it: Deployment) -> None:
    it.told["parts"] = True
    it.options |= {"block_size": 16, "num_gpu_blocks_override": 26, "enable_prefix_caching": False}


def adapters(it: Deployment) -> None:
    """Every third request has none; the others' touch all that may be, or attention and shared experts alone.

    Replicas' adapters touch no routed experts, and come to each in another order.
    """
    it.options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    it.usual, model, several = False, plain(it.plain), len(it.jobs) > 1
    if several:
        it.options["lora_target_modules"] = [name.rpartition(".")[2] for name in ATTENTION] + list(MLP)
    both = [
        write_adapter(model, it.out / "all", 8, 1, experts=not several),
        write_adapter(model, it.out / "some", 4, 2, experts=False),
    ]
    for start, job in enumerate(it.jobs):
        for number, request in enumerate(job):
            if which := (number if start == 0 else -number) % 3:
                request["adapter"] = [which, str(both[which - 1])]
    if not several:
        it.job[-1]["arrival"] += 200  # the last, which has none, by itself

    def obeyed(answer: dict[str, Any], _: str) -> None:
        counts = sums(answer)
        # The fused one where no token has an adapter.
        assert counts["absorb_and_store"] > counts["query_and_entry"] > 0 or several or not any(counts.values())
        base = expected(it.plain, "float32", [{**request, "adapter": None} for request in it.job])
        same = [token == other for token, other in zip(answer["tokens"], base, strict=True)]
        assert same == [not number % 3 for number in range(len(same))]

    it.proofs.append(obeyed)


def drafted(it: Deployment, method: str, **about: Any) -> None:
    """Several new tokens of a request are in a decode."""
    it.usual = False
    it.options["speculative_config"] = {"method": method, "num_speculative_tokens": DRAFTS, **about}

    def calls(answer: dict[str, Any], _: str) -> None:
        counts = sums(answer)
        assert 0 < answer["accepted"] <= answer["draft"] - it.alone  # alone some are refused
        assert not any(counts.values()) or counts["mla_decode"] > (3 if it.alone else 1) * answer["steps"] / 2
        assert counts["next_step"] == 0

    it.proofs.append(calls)


def ngram(it: Deployment) -> None:
    """Prompts that repeat themselves; alone they come in parts, and behind cached prefixes."""
    for request in it.job:
        request["prompt"] = (request["prompt"][:20] * 4)[:60]
    drafted(it, "ngram", prompt_lookup_max=3, prompt_lookup_min=1)
    if it.alone:
        prefixes(it)
        it.job[-1]["prompt"] = it.job[0]["prompt"]

    def stock(answer: dict[str, Any], _: str) -> None:
        assert answer["verified"] == answer["drafted"] == 0

    it.says("decode steps are prepared by vLLM: ")
    it.proofs.append(stock)


def eagle3(it: Deployment, form: Form | Literal["dflash"] = "llama") -> None:
    """A head that knows what often follows a token: what the target's last layer makes tells it which.

    But for an MLA head prompts come in parts; vLLM's MLA on a CPU takes them whole.
    """
    longer = [{**request, "new_tokens": request["new_tokens"] + DRAFTS} for request in it.job]
    wanted, target = expected(it.plain, "float32", longer), plain(it.plain)
    if form == "dflash":
        behind = write_dflash_head(it.out / "head", target, wanted)
    else:
        follows = write_following_head(it.out / "head", target, wanted, form, dtype=torch.float32)
        behind = lambda token: [follows[token]] * DRAFTS  # noqa: E731
    drafted(it, "dflash" if form == "dflash" else "eagle3", model=str(it.out / "head"))
    if form != "mla":
        parts(it)
        it.options |= {"block_size": 64} | ({"max_num_batched_tokens": 32} if it.alone else {})
        it.options.setdefault("worker_extension_cls", "in_workers.Amx")  # the head's attention takes pages of 32

    def taken(tokens: list[int], needed: int) -> int:
        """Drafts that an answer takes, each of them what follows its newest token, `DRAFTS` times."""
        have, found = 1, 0
        while have < needed:
            drafts = behind(tokens[have - 1])
            same = next((n for n in range(DRAFTS) if tokens[have + n] != drafts[n]), DRAFTS)
            have, found = have + same + 1, found + same
        return found

    def accepted(answer: dict[str, Any], _: str) -> None:
        assert form == "dflash" or answer["verified"] == answer["drafted"]
        if it.alone:  # other steps have prompts
            assert answer["verified"] > answer["steps"] / 2
            assert answer["accepted"] > answer["draft"] / 20
            every = zip(wanted, it.job, strict=True)
            assert answer["accepted"] == sum(taken(tokens, request["new_tokens"]) for tokens, request in every)

    it.proofs.append(accepted)


def dflash(it: Deployment) -> None:
    """Its three tokens come of one pass of vLLM's drafter, which steps of ours verify."""
    eagle3(it, "dflash")


def mla_head(it: Deployment) -> None:
    eagle3(it, "mla")


def structured(it: Deployment) -> None:
    """Of every second request, with drafts that its grammar refuses: the tokens without drafts, all of them allowed.

    Requests are preempted meanwhile.
    """
    for request in it.job[::2]:
        request["sampling"] = {"structured_outputs": {"regex": REGEX}}
    it.told["parts"] = True
    it.options |= {"skip_tokenizer_init": False, "max_num_batched_tokens": 64, "block_size": 32}
    it.options["num_gpu_blocks_override"] = 14  # so few that some are taken back
    ((without, _),) = it.serve()
    write_following_head(it.out / "head", plain(it.plain), without["tokens"], dtype=torch.float32, head_dim=64)
    drafted(it, "eagle3", model=str(it.out / "head"))
    it.wanted = lambda _: without["tokens"]

    def obeyed(answer: dict[str, Any], _: str) -> None:
        assert answer["verified"] > 0 < answer["preempted"]
        tokenizer = KimiTokenizer.from_pretrained(it.plain)
        for tokens in answer["tokens"][::2]:
            assert re.fullmatch(f"{REGEX}[a-z]{{0,3}}", tokenizer.decode(tokens))

    it.proofs.append(obeyed)


def fp8_cache(it: Deployment) -> None:
    it.options["kv_cache_dtype"] = "fp8"
    it.wanted = lambda model: expected(model, "float32", it.job, torch.float8_e4m3fn)


def invariant(it: Deployment) -> None:
    """Alone: a request's bits are the same by itself and among others.

    Prompts in parts of what 24 tokens a step leave, down to one, decodes beside them; or whole, and nobody else.
    """
    it.environment["VLLM_BATCH_INVARIANT"] = "1"
    if not it.alone:
        return
    it.usual = False
    it.job[0]["prompt"] = (it.job[0]["prompt"] * 25)[:25]  # 24, then one
    it.job[1]["prompt"] = it.job[1]["prompt"][:1]
    apart = [{**request, "arrival": 70 * number} for number, request in enumerate(it.job)]
    by_itself, _ = serve(it.model, it.dtype, apart, it.out, environment=it.environment)
    it.told["parts"] = True
    it.options |= {"max_num_batched_tokens": 24, "enable_prefix_caching": True}
    it.says("no prefix caching, since VLLM_BATCH_INVARIANT is set")

    def same(among: dict[str, Any], _: str) -> None:
        assert (among["tokens"], among["logprobs"]) == (by_itself["tokens"], by_itself["logprobs"])
        assert among["calls"]["next_step"]["plain"] > among["steps"] / 4  # decode steps are ours there too

    it.proofs.append(same)


def ahead(it: Deployment) -> None:
    it.told["ahead"] = True


def reload_weights(it: Deployment) -> None:
    """Another checkpoint's, in parts as trainers send them or by vLLM; then the first's. FP8's over random ones."""
    it.swapped = [it.out / "other", it.plain]
    write_synthetic_checkpoint(it.swapped[0], KimiK2Config.from_pretrained(it.plain), seed=77)
    # vLLM's own reload makes random weights again; several ranks' models are out of reach but for it.
    by_method = ["parts", "whole"] if it.dtype != "float32" else ["reload" if it.ranks > 1 else "parts", "reload"]
    ways = it.draw.sample(by_method, 2)
    it.told["swaps"] = list(zip(ways, map(str, it.swapped), strict=True))
    if it.dtype != "float32":  # rounding as in a fresh engine
        it.options["load_format"] = "dummy"
        it.wanted = cache(lambda model: serve(model, it.dtype, it.job, it.out)[0]["tokens"])


def connector(it: Deployment) -> None:
    """Alone: one engine saves the caches of its prompts by layer, the next loads them."""
    stored = it.out / "stored"
    it.told["stored"] = str(stored)  # which other weights make stale, as in vLLM's own
    it.usual = it.usual and not it.alone  # decode steps are vLLM's
    it.options["kv_transfer_config"] = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(stored)},
    }  # fmt: skip
    if it.alone:
        ((_, log),) = it.serve()
        assert "External Cache Hit" not in log
        files = [path.stem for path in stored.rglob("*.safetensors")]
        assert set(files) == {f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)}
        assert len(files) == LAYERS * len(it.job)
        it.says("External Cache Hit")


def balanced(it: Deployment) -> None:
    """By vLLM's own balancer, with some experts held twice, or none."""
    tensor(it)
    shared_out(it)
    it.options |= {"enable_eplb": True, "worker_extension_cls": "in_workers.Balanced"}
    it.options["eplb_config"] = {
        "window_size": 2, "step_interval": 8, "num_redundant_experts": it.draw.choice([0, 2]), "use_async": False,
        "communicator": "torch_nccl",
    }  # fmt: skip
    it.says("Rearranging experts")


def elsewhere(it: Deployment) -> None:
    """Another engine reads the prompts; NIXL brings their caches, so that all steps here are decodes."""
    pytest.importorskip("nixl")
    it.told["elsewhere"], it.usual = [engines.free_port(), engines.free_port()], False
    it.options["kv_transfer_config"] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    it.says("NIXL compatibility check passed")


def pieces(it: Deployment, run: int = 0) -> None:
    """The pieces that are CUDA graphs on a GPU, padded; steps of decodes alone run as they do.

    All requests come at once, so that a step has several prompts. The second of two ranks may refuse a run: of a size's
    trial, or of its record.
    """
    it.options["worker_extension_cls"], it.usual = f"in_workers.Piece{run}", False
    for request in it.job:
        request["arrival"] = 0

    def replayed(answer: dict[str, Any], log: str) -> None:
        count = log.count("a step with prompts is replayed")
        assert not count if run else it.ranks <= count < answer["steps"] * it.ranks
        reasons = re.findall("no graph of pieces: [0-9]+ tokens: (.*)", log)
        assert sorted(reasons) == (["another rank cannot", "refused by the second rank"] if run else [])

    it.proofs.append(replayed)


def sampled(it: Deployment) -> None:
    """Steps that carry on with a batch give what vLLM's own preparing gives, preempted requests too.

    The cache holds about half of what the requests need at once.
    """
    few_pages(it)
    del it.told["parts"]
    for at, request in enumerate(it.job):
        request["sampling"] = SAMPLING[at % len(SAMPLING)]
    ((theirs, said),) = it.serve(KIMI_K2_VLLM_DECODE_GRAPHS="0")
    assert "decode steps are prepared by vLLM" in said and theirs["calls"]["next_step"]["plain"] == 0
    it.says("decode steps are prepared by vLLM", said=False)
    it.wanted, it.usual = lambda _: theirs["tokens"], False

    def same(ours: dict[str, Any], _: str) -> None:
        assert ours["calls"]["next_step"]["plain"] > ours["steps"] / 3
        assert ours["logprobs"] == theirs["logprobs"]
        assert ours["preempted"] == theirs["preempted"] > 0
        assert any(len(tokens) < 64 for tokens in ours["tokens"])  # a stop token

    it.proofs.append(same)


def processors(it: Deployment) -> None:
    """Tokens that a user's logits processor forces, with the plain model's log-probabilities."""
    wanted = [[it.draw.randrange(512) for _ in range(request["new_tokens"])] for request in it.job]
    for request, tokens in zip(it.job, wanted, strict=True):
        request["sampling"] = forced(tokens)
    it.options["logits_processors"] = PROCESSORS
    it.wanted = lambda _: wanted

    def near(answer: dict[str, Any], _: str) -> None:
        judge = Judge(it.plain)
        for request, tokens, said in zip(it.job, wanted, answer["logprobs"], strict=True):
            assert float(judge.errors(request["prompt"], tokens, said).max()) < 1e-4

    it.proofs.append(near)


def stock(it: Deployment) -> None:
    """vLLM's own model gives the same tokens, by none of our operations."""

    def same(answer: dict[str, Any], _: str) -> None:
        ((theirs, log),) = it.serve(**STOCK)
        assert "kimi-k2" not in log and not any(sums(theirs).values())
        assert theirs["tokens"] == answer["tokens"]

    it.proofs.append(same)


def routed(it: Deployment) -> None:
    """Of each token but the last its experts in each layer, as vLLM's own model returns them; order apart."""
    prefixes(it)
    it.options |= {"enable_return_routed_experts": True, "worker_extension_cls": "in_workers.Routed"}
    it.usual = False
    it.says("decode steps are prepared by vLLM: routed experts in answers")

    def same(answer: dict[str, Any], _: str) -> None:
        it.told.clear()  # vLLM's own attention takes whole prompts
        it.options |= {"max_num_batched_tokens": 256, "enable_prefix_caching": False}
        ((theirs, log),) = it.serve(**STOCK)
        assert "kimi-k2" not in log and theirs["tokens"] == answer["tokens"]
        for request, ours, stocks in zip(it.job, answer["routed"], theirs["routed"], strict=True):
            chosen = torch.tensor(ours).sort(-1).values
            assert chosen.shape[:2] == (len(request["prompt"]) + request["new_tokens"] - 1, LAYERS)
            assert torch.equal(chosen, torch.tensor(stocks).sort(-1).values)
            assert not chosen[:, : LAYERS - MOE_LAYERS].any() and (chosen[:, -MOE_LAYERS:].diff() > 0).all()

    it.proofs.append(same)


def refused(run: int) -> Flag:
    """The second of two ranks cannot run a step while graphs are recorded, 1 in the trial before; 0 none."""

    def flag(it: Deployment) -> None:
        tensor(it)
        it.options["worker_extension_cls"] = f"in_workers.Refused{run}"

        def said(_: Any, log: str) -> None:
            reasons = [line.partition("prepared by vLLM: no graph of them: ")[2] for line in log.splitlines()]
            wanted = ["another rank cannot", "refused by the second rank"] if run else []
            assert sorted(filter(None, reasons)) == wanted
            follow = "decode steps of up to 4 requests follow each other on the GPU: 3 sizes"
            for line in (follow, "a decode step is replayed"):
                assert log.count(line) == (0 if run else 2)

        it.proofs.append(said)

    flag.__name__ = f"refused{run}"
    return flag


def refused_piece(run: int) -> Flag:
    def flag(it: Deployment) -> None:
        tensor(it)
        pieces(it, run)

    flag.__name__ = f"refused_piece{run}"
    return flag


Row = tuple[str, tuple[Flag, ...]]
FLAGS: list[Flag] = [
    tensor, pipeline, context, experts, parts, prefixes, pages, few_pages, adapters, ngram, eagle3, fp8_cache,
    invariant, ahead, reload_weights, connector,
]  # fmt: skip
REFUSED = [*(refused(run) for run in (0, 1, 3)), *(refused_piece(run) for run in (10, 13))]
SEVERAL = (tensor, pipeline, context, experts, balanced, *REFUSED)
# Of vLLM's own: either says the same of an argument, or of the tokens that answers have.
CLASH: list[set[Flag]] = [
    {context, few_pages}, {ngram, eagle3}, {adapters, fp8_cache}, {ngram, prefixes}, {eagle3, pages},
    {eagle3, few_pages}, {few_pages, pages}, {prefixes, few_pages}, {parts, prefixes},
]  # fmt: skip
# vLLM takes FP8 weights with 16-bit activations alone, and its own model serves no INT4 on a CPU.
NAMED: list[Row] = [
    *((name, ()) for name in ("fp8", "thinking", "scheme", "text", "mtp")),
    *((name, ()) for name in FOUR_BITS),
    *((name, (reload_weights,)) for name in ("fp8", "thinking", "bf16", "nvfp4")),
    *((name, (flag,)) for name in ("fp8", "thinking") for flag in (pieces, invariant)),
    *(("thinking", (flag,)) for flag in (one_left, cut_pages, sampled, processors, connector, replicas, adapters)),
    *(("thinking", (flag,)) for flag in (elsewhere, *REFUSED)),
    *(("bf16", (flag,)) for flag in (stock, fp8_cache, ngram, eagle3, dflash, adapters, routed)),
    *((name, (flag,)) for name in ("wide", "thinking", "bf16") for flag in (tensor, experts)),
    ("bf16", (mla_head, ahead)), ("tokenizer", (structured,)), ("tokenizer", (structured, ahead)),
    *(("thinking", (flag, pieces)) for flag in (tensor, experts)), ("wide", (balanced,)),
    ("thinking", (balanced, reload_weights)),
    ("thinking", (replicas, shared_out)), ("thinking", (replicas, adapters)),
    ("thinking", (adapters, reload_weights)), ("thinking", (prefixes, context)),
    # Of published recipes.
    ("bf16", (pipeline, context)), ("bf16", (experts, fp8_cache, eagle3)), ("bf16", (adapters, eagle3)),
    ("bf16", (experts, adapters, reload_weights)), ("nvfp4-packed", (experts,)),
]  # fmt: skip
# Of several ranks, and run all the same: what each asks of several is asked nowhere else.
QUICK: list[Row] = [
    ("thinking", flags) for flags in ((tensor, pieces), (balanced, reload_weights), (prefixes, context))
]


def combinations(count: int) -> list[Row]:
    """Those named and so many drawn; two thirds of those of several ranks are left out, as each takes minutes."""
    draw, found = random.Random(SEED), list[tuple[Flag, ...]]()
    while len(found) < count:
        drawn = tuple(sorted(draw.sample(FLAGS, draw.choice([2, 2, 3])), key=FLAGS.index))
        left_out = any(flag in SEVERAL for flag in drawn) and draw.random() < 0.66
        if drawn not in found and not left_out and not any(pair <= set(drawn) for pair in CLASH):
            found.append(drawn)
    return NAMED + [("bf16", flags) for flags in found]


def name_of(row: Row) -> str:
    return "+".join([row[0], *(flag.__name__ for flag in row[1])])


Models = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path], wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model's directory, and that of what the plain model reads.

    `bf16` has sizes that vLLM's own model serves on a CPU, `scheme` the checkpoint's own FP8 cache, `text` that of
    K2.5, whose tensors have another prefix and for which vLLM's K2.5 asks under this architecture, `mtp` a layer that
    ours refuses.
    """
    root = tmp_path_factory.mktemp("recipes")

    @cache
    def found(name: str) -> tuple[Path, Path]:
        directory = root / name
        if name == "tokenizer":
            write_random_checkpoint(directory)
        elif name == "bf16":
            write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2-instruct", **WIDE), "bf16"), seed=3)
        elif name in FOUR_BITS:
            write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2-instruct"), name), seed=5)
        elif name in ("scheme", "text", "mtp"):
            of = found({"scheme": "thinking", "text": "k2.5", "mtp": "bf16"}[name])[0]
            raw = json.loads((of / "config.json").read_text())
            if name == "text":
                raw = {**raw["text_config"], "architectures": ["DeepseekV2ForCausalLM"]}
            elif name == "mtp":
                raw["num_nextn_predict_layers"] = 1
            else:
                scheme = {"type": "float", "num_bits": 8, "strategy": "tensor"}
                raw["quantization_config"]["kv_cache_scheme"] = scheme
            shutil.copytree(of, directory)
            (directory / "config.json").write_text(json.dumps(raw))
            return directory, directory if name == "scheme" else of
        else:
            directory = {**checkpoints, "wide": wide}[name]
        return directory, directory

    return found


def check_calls(it: Deployment, answer: dict[str, Any]) -> None:
    """Our operations ran, all plain: each layer's as often as there were forward passes."""
    counts = sums(answer)
    if it.ranks > 1:
        return
    assert all(entry == "plain" for entries in answer["calls"].values() for entry, count in entries.items() if count)
    assert counts["mla_decode"] == counts["value_rows"] > 0 < counts["float32_linear"]
    prompts = counts["mla_naive_attention"] + counts["mla_absorbed_attention"]
    assert (prompts == 0) == ("elsewhere" in it.told)
    if it.usual:
        forwards, rest = divmod(counts["add_project"], LAYERS)
        assert rest == 0 and forwards >= it.job[0]["new_tokens"]
        assert counts["add_norm_route"] == counts["routed_experts_with_shared"] == MOE_LAYERS * forwards
        # Most steps only carry on with the batch of the step before.
        assert not it.alone or forwards / 2 < counts["next_step"] < forwards


def check_logprobs(it: Deployment, answer: dict[str, Any]) -> None:
    """In 16 bits log-probabilities are as near to float32's as the plain model's in 16 bits.

    There the tiny model's logits often tie, and an expert that rounding has changed moves them by 0.3.
    """
    judge, rounded = Judge(it.plain), Judge(it.plain, getattr(torch, it.dtype))
    served, own = [], []
    for request, tokens, said in zip(it.job, answer["tokens"], answer["logprobs"], strict=True):
        served.append(judge.errors(request["prompt"], tokens, said))
        own.append(judge.errors(request["prompt"], tokens, rounded.chosen(request["prompt"], tokens).tolist()))
    assert float(torch.cat(served).mean()) < 1.5 * float(torch.cat(own).mean()) < 0.1


@pytest.mark.parametrize("row", combinations(min(DRAWS, 40)), ids=name_of)
def test_row(row: Row, models: Models, tmp_path: Path) -> None:
    """The tokens, where ours serves and where it leaves the deployment to vLLM's model by a reason in the log.

    An engine that does not start has to be one that does not start without our model either, for the same reason.
    """
    name, flags = row
    if any(flag in SEVERAL for flag in flags) and row not in QUICK and not os.environ.get("KIMI_K2_SLOW"):
        pytest.skip("KIMI_K2_SLOW=1 starts up to four ranks for each")
    alone, (model, judged) = row in NAMED and len({*flags} - {ahead, shared_out}) < 2, models(name)
    job = requests(SEED, max(8, DRAWS)) if alone else requests(SEED, 4, new_tokens=16)
    it = Deployment(name, model, judged, [job], tmp_path, random.Random(name_of(row)), alone)
    it.dtype = "bfloat16" if name in ("fp8", "wide", *FOUR_BITS) else "float32"
    for flag in flags:
        flag(it)
    try:
        served = it.serve()
    except AssertionError as error:
        with pytest.raises(AssertionError) as without:
            it.serve(**STOCK)
        ours, theirs = ({*re.findall(r"\w+Error: .*", str(raised))} for raised in (error, without.value))
        same = {line for line in ours & theirs if "root cause above" not in line}
        assert same, error
        pytest.skip(f"vLLM does not start: {same}")
    reasons = {reason for _, log in served for reason in re.findall(f"{LEFT_TO_STOCK}(.*)", log)}
    print(f"\n{name_of(row)}: {reasons or 'ours'}", flush=True)
    assert (name == "mtp") == any("num_nextn_predict_layers" in reason for reason in reasons)
    for job, (answer, log) in zip(it.jobs, served, strict=True):
        it.jobs = [job]
        check(it, answer, log, ours=not reasons)
    assert len({tuple(answer["calls"]["routed_experts"].items()) for answer, _ in served}) == 1  # in step


def check(it: Deployment, answer: dict[str, Any], log: str, ours: bool) -> None:
    """Of one replica."""
    if it.options.get("load_format") == "dummy":
        assert answer["tokens"] != it.tokens(it.plain)
    elif it.dtype == "float32":
        assert answer["tokens"] == it.tokens(it.plain)
    else:
        check_logprobs(it, answer)
    if not ours:
        return
    assert log.count(OURS) == it.ranks + ("elsewhere" in it.told)
    check_calls(it, answer)
    for proof in it.proofs:
        proof(answer, log)
    assert answer["again"] == [it.tokens(model) for model in it.swapped]
    assert it.name != "scheme" or answer["tokens"] != expected(it.plain, "float32", it.job, torch.float32)
