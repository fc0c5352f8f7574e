"""Faults put into attention in tiles one at a time, one rank in CPU mode: the largest distance of each to a reference.

A worker as cpu_worker.py; the job's `expected` is a file with the plain model's logits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import cpu_worker
import environment
import torch
from faults import Patch, edited
from steps import run

from kimi_k2.sharding import attention_tiles as tiles

attention, block = environment.contrib("attention"), environment.contrib("attention_tiles")
A, K = attention.KimiK2Attention, block.AttentionBlockKernel
FAULTS: dict[str, Callable[[], Patch]] = {
    "rotated backwards": lambda: edited(block, "kernel_rotation", "[-1.0, 1.0]", "[1.0, -1.0]"),
    "sines for cosines": lambda: edited(
        block, "kernel_rotation", "torch.stack((cos, sin * signs))", "torch.stack((sin, cos * signs))"),
    "new latents lost": lambda: edited(K, "__call__", "new_latents.to(kept)", "0 * new_latents.to(kept)"),
    "new keys lost": lambda: edited(K, "__call__", "new_keys.to(kept)", "0 * new_keys.to(kept)"),
    "norms swapped": lambda: edited(
        A, "_in_one_kernel", "(self.q_a_layernorm.weight, self.kv_a_layernorm.weight)",
        "(self.kv_a_layernorm.weight, self.q_a_layernorm.weight)"),
    "a slot too many": lambda: edited(A, "_in_one_kernel", "sum(dim=(1, 2, 3))", "sum(dim=(1, 2, 3)) + 1"),
    "softmax scale without mscale": lambda: edited(
        A, "_in_one_kernel", "self.hf.softmax_scale", "self.hf.qk_head_dim**-0.5"),
    "W_UK and W_UV swapped": lambda: edited(tiles, "_kv_b", "w_uk, w_uv = weight", "w_uv, w_uk = weight"),
    "rotary rows first": lambda: edited(
        tiles, "_q_b", "by_head[:, :, :p].flatten(1, 2), by_head[:, :, p:].flatten(1, 2)",
        "by_head[:, :, p:].flatten(1, 2), by_head[:, :, :p].flatten(1, 2)"),
    "o_proj's heads reversed": lambda: edited(
        tiles, "_o", ".permute(2, 1, 0), factors", ".permute(2, 1, 0).flip(1), factors"),
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    expected = torch.load(job["expected"])
    case = job["cases"][0]

    def distance() -> float:
        app = cpu_worker.build(json.loads(json.dumps(job)))
        app.reset()
        return float((run(app, case["prompts"], case["forced"]) - expected).abs().max())

    found = {"none": distance()}
    for name, make in FAULTS.items():
        owner, attribute, made = make()
        with mock.patch.object(owner, attribute, made):
            found[name] = distance()
    torch.save(found, job["output"])


if __name__ == "__main__":
    main()
