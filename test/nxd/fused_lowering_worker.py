"""Lowers the step with a draft in the graph at Kimi-K2's real shapes (fewer layers) and prints its counts as JSON.

python fused_lowering_worker.py PRESET LAYERS HEAD DRAFT_TOKENS STAGE
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter

os.environ["PJRT_DEVICE"] = "CPU"
os.environ.pop("NXD_CPU_MODE", None)

import environment

environment.prepare(cpu=False)

from hlo import count, peak_live_bytes, summary  # noqa: E402

from kimi_k2.config import KimiK2Config  # noqa: E402
from kimi_k2.neuron import contrib  # noqa: E402
from kimi_k2.neuron.compile import build_application, draft_options  # noqa: E402
from kimi_k2.plan.deployment import Deployment  # noqa: E402


def main() -> None:
    name, layers, head, tokens, stage = sys.argv[1:]
    preset = Deployment.load(name)
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=int(layers))
    options = {"disable_argmax_kernel": True, **draft_options(int(tokens))}
    app = build_application(preset, config, "kimi-k2-instruct-0905", draft=head, **options)
    graph = contrib.load("lowering").lower(app, stage)
    counts = count(graph.hlo, graph.parameters)
    own = re.compile(r"^draft_model\.")
    held = sum(size for name, size in counts.held.items() if own.match(name))
    of_draft = {"held": held, "read": counts.bytes_read(own.pattern)}
    calls = Counter(re.findall(r'custom_call_target="kimi_k2\.nki\.(\w+)"', graph.hlo))
    facts = {
        **summary(counts), "draft": of_draft, "kernels": dict(calls), "live": peak_live_bytes(graph.hlo).nbytes,
        "outputs": len(graph.aliases), "states": {name: list(kind[1]) for name, kind in graph.states.items()},
    }  # fmt: skip
    print("COUNTS " + json.dumps(facts))


if __name__ == "__main__":
    main()
