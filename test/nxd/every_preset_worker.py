"""A Trainium preset brought down to this process's rank in CPU mode, tiny models of the family one after the other.

WORLD_SIZE=2 RANK=0 ... python every_preset_worker.py job.json

The job names the preset, members and the output: of each member the largest difference to the plain model over the
stored weights, whether all tokens are the same, and the form of decode that ran.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from drawn_kernels_worker import SIZES, Worker, rank
from harness import expected_logits
from steps import run
from worker import Counted

from kimi_k2.neuron.application import cpu_deployment
from kimi_k2.neuron.compile import build_application
from kimi_k2.plan.deployment import Deployment
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.synthetic.config import tiny_config

STEPS = 2


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    preset, ranks = Deployment.load(job["preset"]), job["neuron_config"]["tp_degree"]
    tiny = cpu_deployment(preset, length=64, batch_size=preset.batch_size)
    worker, results = Worker(job["preset"], Path(job["output"]).parent), {}
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 512, (5 + line % 7,), generator=draw).tolist() for line in range(preset.batch_size)]
    forced = torch.randint(0, 512, (preset.batch_size, STEPS), generator=draw).tolist()
    for member in job["members"]:
        one = {"member": member, "experts": 384 if preset.batch_size > 8 else 128}
        heads = ranks if tiny.cache_ranks > 1 else 4
        config = tiny_config(
            member, **SIZES, hidden_size=128 * ranks, n_routed_experts=one["experts"], num_attention_heads=heads,
            num_key_value_heads=heads,
        )  # fmt: skip
        directory = worker.checkpoint(config, one)
        app = build_application(tiny, config, str(directory), on_cpu=True)
        app.load("")
        app.reset()
        counted: Any = Counted(app, 1)
        logits = run(counted, prompts, forced)
        found = {"decode": app.neuron_config.decode, "kernels": dict(counted.ran)}
        if rank() == 0:
            experts = expert_formats()[tiny.experts].for_layout(
                config, replace(tiny.layout(config), dtype=torch.float32)
            )
            plain = worker.plain_model(directory, app.neuron_config, experts)
            wanted = expected_logits(plain, {"prompts": prompts, "forced": forced})
            found["far"] = float((logits - wanted).abs().max())
            found["same"] = bool(torch.equal(logits.argmax(-1), wanted.argmax(-1)))
            results[member] = found
            print(member, found, flush=True)
            torch.save(results, job["output"])


if __name__ == "__main__":
    main()
