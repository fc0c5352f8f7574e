"""Decode forms drawn at random, one after the other on this process's rank in CPU mode; logits beside the plain model.

WORLD_SIZE=2 RANK=0 ... python drawn_kernels_worker.py job.json

The job names the layout, seeds and the output: of each seed the draw, and the field that is refused, or the largest
difference, whether all tokens are the same, and which kernels ran how often.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import schedule
import torch
from harness import LAYOUTS, neuron_config
from schedule import Script
from steps import application
from stored_experts import plain_over_stored
from test_experts import requantized
from worker import Counted

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

MEMBERS = (
    "kimi-k2-instruct", "kimi-k2-instruct-0905", "kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6", "kimi-k2.7-code",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "num_experts_per_tok": 8, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "qk_rope_head_dim": 32, "moe_intermediate_size": 64, "vision": None,
}  # fmt: skip
COMMON, BLOCK = 16, 8  # tokens of a shared prefix, and of a block


def drawn(seed: int, layout: str) -> dict[str, Any]:
    """What a seed stands for."""
    draw = random.Random(f"{layout} {seed}")
    decode = draw.choices(("xla", "layers"), (1, 3))[0]
    cached = draw.random() < 0.25
    batch = draw.choice((4, 4, 8) if cached else (1, 1, 2, 3, 4, 8, 32))
    tokens = 1 if batch > 8 else draw.choice((1, 1, 2, 3, 4))
    return {
        "seed": seed,
        "member": draw.choice(MEMBERS),
        "decode": decode,
        "batch": batch,
        "tokens": draw.choice((1, 1, 1, tokens)) if cached else tokens,
        "prefix_cache": cached,
        "continuous": cached or draw.random() < 0.5,
        "split": layout != "TP1" and draw.random() < 0.4,
        "layers_per_kernel": draw.choice((None, None, 1)) if decode == "layers" else None,
        # Four lines choose fewer experts than there are, and 32 of 384.
        "experts": 384 if batch == 32 else 128,
    }


def refused(one: dict[str, Any]) -> str | None:
    """The field that is refused, for a limit of NxDI's own."""
    return "speculation_length" if one["prefix_cache"] and one["tokens"] > 1 else None


def model_of(one: dict[str, Any], layout: str) -> KimiK2Config:
    ranks = LAYOUTS[layout][0] * LAYOUTS[layout][1]
    sizes = {**SIZES, "hidden_size": 128 * ranks, "n_routed_experts": one["experts"]}
    heads = ranks if one["split"] else 4
    return tiny_config(one["member"], **sizes, num_attention_heads=heads, num_key_value_heads=heads)


def options_of(one: dict[str, Any], layout: str, experts: Any) -> dict[str, Any]:
    """Arguments of KimiK2NeuronConfig; a rank has 256 slots of a cache."""
    tp, ep = LAYOUTS[layout]
    length = 256 * (tp * ep if one["split"] else 1)
    given = neuron_config(tp, ep, one["batch"], seq_len=length, **experts.neuron_options())
    given |= {"decode": one["decode"], "logical_nc_config": 1 if layout == "TP1" else 2}
    given["flash_decoding_enabled"] = one["split"]
    if one["layers_per_kernel"]:
        given["decode_layers_per_kernel"] = one["layers_per_kernel"]
    if one["tokens"] > 1:
        given["speculation_length"] = one["tokens"]
    if one["continuous"]:
        lines = dict.fromkeys(("tkg_batch_size", "max_batch_size"), one["batch"])
        given |= {"is_continuous_batching": True, "ctx_batch_size": 1, **lines}
    if one["prefix_cache"]:
        given |= {
            "is_prefix_caching": True, "is_block_kv_layout": True, "pa_block_size": BLOCK,
            "pa_num_blocks": length // BLOCK + 20, "enable_bucketing": True, "max_context_length": 24,
            "context_encoding_buckets": [8, 24], "prefix_buckets": [32], "token_generation_buckets": [length],
        }  # fmt: skip
    return given


def held_experts(config: KimiK2Config, one: dict[str, Any], layout: str) -> Any:
    tp, ep = LAYOUTS[layout]
    name = "tiles"
    if one["decode"] == "xla":
        name = "blockwise" if config.format_of_experts().e4m3_block is not None else "per_channel"
    return expert_formats()[name].for_layout(config, Layout(tp, ep, experts=name))


class Worker:
    """Checkpoints and plain models of a layout, made once."""

    def __init__(self, layout: str, root: Path) -> None:
        self.layout, self.root = layout, root
        self.plain: dict[Any, Any] = {}

    def checkpoint(self, config: KimiK2Config, one: dict[str, Any]) -> Path:
        """Written by rank 0."""
        directory = self.root / f"{one['member']}-{one['experts']}-{config.num_attention_heads}"
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if rank() == 0 and not directory.exists():
            write_synthetic_checkpoint(part := directory.with_name("part"), config, seed=5)
            part.rename(directory)  # whole, for ranks that wait for it
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        while not directory.exists():  # before there are process groups
            time.sleep(0.1)
        return directory

    def plain_model(self, directory: Path, neuron: Any, experts: Any) -> Any:
        key = (directory, experts)
        if key not in self.plain:
            if experts.tiles:
                self.plain[key] = plain_over_stored(directory, neuron, experts)
            else:
                self.plain[key] = requantized(directory, experts)
        return self.plain[key]

    def run(self, one: dict[str, Any]) -> dict[str, Any]:
        """One draw."""
        config = model_of(one, self.layout)
        experts = held_experts(config, one, self.layout)
        directory = self.checkpoint(config, one)
        job = {"checkpoint": str(directory), "neuron_config": options_of(one, self.layout, experts)}
        try:
            app = application(job, on_cpu=True, dtype="float32")
        except ConfigError as error:
            return {**one, "refused": error.field, "message": str(error)}
        app.to_cpu()
        app.reset()
        counted, made = Counted(app, one["tokens"]), (prefixes if one["prefix_cache"] else steps)(one)
        logits = schedule.run(counted, made.steps)
        count = sum(step[0] == "decode" for step in made.steps)
        found = {**one, "refused": None, "kernels": dict(counted.ran), "steps": count}
        found["layers"] = config.num_hidden_layers
        if rank() == 0:
            plain = schedule.expected(self.plain_model(directory, app.neuron_config, experts), made.of)
            found["far"] = float((logits - plain).abs().max())
            found["same"] = bool(torch.equal(logits.argmax(-1), plain.argmax(-1)))
        return found


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])


def prefixes(one: dict[str, Any]) -> Script:
    """Shared prefixes and block tables."""
    rows = torch.randint(0, 512, (4, 48), generator=torch.Generator().manual_seed(one["seed"]))
    rows[:, :COMMON] = rows[0, :COMMON]
    return schedule.shared_prefixes(rows.tolist(), COMMON)


def steps(one: dict[str, Any]) -> Script:
    """Ragged prompts, then steps of all lines, and with continuous batching of some in any order; drafts refused."""
    batch, width = one["batch"], one["tokens"]
    draw = random.Random(one["seed"])
    rows = [[draw.randrange(512) for _ in range(48)] for _ in range(batch)]
    at = [draw.randint(5, 20) for _ in range(batch)]
    every = list(range(batch))
    begun = [row[:count] for row, count in zip(rows, at, strict=True)]
    if one["continuous"]:
        arrival = draw.sample(every, batch)
        made = Script([["prefill", line, begun[line], 0] for line in arrival], [begun[line] for line in arrival])
    else:
        made = Script([["prompts", begun]], [*begun])
    some = draw.sample(every, draw.randint(1, batch)) if one["continuous"] else every
    chosen = [every, some] if batch > 8 else [every, some, draw.sample(every, batch) if one["continuous"] else every]
    for lines in chosen:
        keep = draw.randint(1, width)
        made.decode(rows, at, lines, width - keep, keep)
    return made


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    worker = Worker(job["layout"], Path(job["output"]).parent)
    results = []
    for seed in job["seeds"]:
        begun = time.monotonic()
        results.append(worker.run(drawn(seed, job["layout"])))
        if rank() == 0:
            print(json.dumps(results[-1] | {"seconds": round(time.monotonic() - begun, 1)}), flush=True)
            torch.save(results, job["output"])


if __name__ == "__main__":
    main()
