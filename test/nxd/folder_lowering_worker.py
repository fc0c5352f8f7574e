"""The folder's graphs at Kimi-K2's widths, without weights: a line of JSON for each.

python folder_lowering_worker.py MOE_TP MOE_EP fp8|bf16 LAYERS
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections import Counter
from typing import Any

os.environ["PJRT_DEVICE"] = "CPU"
os.environ.pop("NXD_CPU_MODE", None)

import environment

environment.prepare(cpu=False)

from kimi_k2.config import raw_preset  # noqa: E402


def application(tp: int, ep: int, experts: str, layers: int, **options: Any) -> Any:
    """The application of one sequence, 512 tokens of prompt and 1,024 in all."""
    src = importlib.import_module("kimi_k2.contrib_model")
    raw = {**raw_preset(), "num_hidden_layers": layers}
    neuron = src.KimiK2NeuronConfig(
        tp_degree=tp * ep, moe_tp_degree=tp, moe_ep_degree=ep, seq_len=1024, max_context_length=512,
        quantized=experts == "fp8", **options,
    )  # fmt: skip
    config = src.KimiK2InferenceConfig(neuron, load_config=src.load_kimi_config(raw))
    return src.NeuronKimiK2ForCausalLM("none", config)


if __name__ == "__main__":
    app = application(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    lowering = environment.contrib("lowering")
    for stage in lowering.STAGES:
        graph = lowering.lower(app, stage)
        types = {
            name: re.findall(rf"(\w+)\[([\d,]*)\]\S* parameter\({number}\)", graph.hlo)[0]
            for number, name in graph.parameters.items()
        }
        dtype, shape = types["layers.1.mlp.experts.gate_up_proj.weight"]
        gathered = re.findall(r"= \w+\[(\d+),(7168),(\d+)\]\S* gather\(", graph.hlo)
        counts = {
            "stage": stage,
            "bytes": len(graph.hlo),
            "collectives": dict(Counter(re.findall(r" (all-\w+|reduce-scatter)\(", graph.hlo))),
            "f64": graph.hlo.count("f64["),
            "constants": {number: list(one.shape) for number, one in graph.constants.items() if one.numel() > 128},
            "float32": [n for n, (kind, _) in types.items() if kind == "f32" and not n.startswith("input.")],
            "experts": [dtype, [int(size) for size in shape.split(",")]],
            "selected": [int(size) for size in gathered[0]] if gathered else None,
        }
        print("COUNTS", json.dumps(counts), flush=True)
