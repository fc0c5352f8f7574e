"""Our pre-sharded files against NxD's own `ModelBuilder.shard_checkpoint` of NeuronKimiK2ForCausalLM's state dict.

NxD runs in a process of its own: its mocked ranks need NXD_CPU_MODE unset, the other tests of this folder set it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Decode, Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

WORKER = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import environment
environment.prepare(cpu=False)
import torch
from harness import neuron_config
from safetensors.torch import save_file
torch.set_num_threads(1)
config, modeling = environment.contrib("config"), environment.contrib("modeling_kimi_k2")
for job in json.loads(sys.argv[2]):
    options = neuron_config(job["tp"], job["ep"], 1, torch_dtype=torch.bfloat16, **job["options"])
    neuron = config.KimiK2NeuronConfig(on_cpu=False, **options)
    hf = config.load_kimi_config(job["source"])
    app = modeling.NeuronKimiK2ForCausalLM(job["source"], config.KimiK2InferenceConfig(neuron, load_config=hf))
    app.get_builder().shard_checkpoint(serialize_path=job["out"])
    app.neuron_config.save_sharded_checkpoint = True
    app.shard_weights(job["out"])
    loaded = []
    device = SimpleNamespace(initialize=lambda weights, start: loaded.extend(weights))
    app.traced_model = SimpleNamespace(nxd_model=device)
    app.load_weights(job["out"])
    for rank, (weights, cut) in enumerate(zip(loaded, app.rank_weights(0, len(loaded)), strict=True)):
        save_file(weights, Path(job["out"]) / f"loaded{rank}.safetensors")
        save_file(cut, Path(job["out"]) / f"cut{rank}.safetensors")
"""

SIZES = {
    "tiny": {"num_hidden_layers": 2, "moe_intermediate_size": 256},
    "medium": {
        "num_hidden_layers": 3,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "n_routed_experts": 32,
    },
    # The presets' 64 ranks: an expert's real width, heads and latents that 64 ranks can divide.
    "wide": {
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "moe_intermediate_size": 2048,
    },
}
# Of whole layers, which are in tiles; from BF16, and from FP8 blocks for ranks that share a cache.
LAYERS = {"layers-bf16": "bf16", "layers-fp8": "fp8"}
TILED = {
    "num_hidden_layers": 2,
    "moe_intermediate_size": 256,
    "hidden_size": 512,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "qk_rope_head_dim": 32,
}
SIZES |= dict.fromkeys(LAYERS, TILED)
# Members by their presets, as they are stored: FP8 blocks, INT4, INT4 beside a tower.
MEMBERS = {name: {"num_hidden_layers": 2} for name in ("kimi-k2-instruct-0905", "kimi-k2-thinking", "kimi-k2.5")}

CASES = [
    (size, tp, ep, experts)
    for size in SIZES
    for tp, ep in ((4, 2), (8, 1))
    for experts in ("per_channel", "blockwise", "bf16")
    if size in ("tiny", "medium")
]
CASES += [("wide", 32, 2, "blockwise"), ("wide", 64, 1, "per_channel")]
CASES += [("layers-bf16", 4, 2, "tiles"), ("layers-bf16", 8, 1, "tiles"), ("layers-bf16", 4, 2, "bf16_tiles")]
CASES += [("layers-fp8", 8, 1, "tiles")]
CASES += [(member, 2, 2, experts) for member in MEMBERS for experts in ("per_channel", "blockwise", "bf16")]


def layout_of(case: tuple[str, int, int, str]) -> Layout:
    """The layout of a case."""
    size, tp, ep, experts = case
    group = 8 if size == "layers-fp8" else 0
    decode: Decode = "layers" if size in LAYERS else "xla"
    return Layout(tp, ep, experts=experts, decode=decode, query_group=group)


def label(case: tuple[str, int, int, str]) -> str:
    """Name of a case and of its folder."""
    return "-".join(str(part) for part in case)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, and NxD's files for all cases from one process: importing NxD takes longer than the sharding."""
    root = tmp_path_factory.mktemp("sharding")
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8}
    jobs = []
    for member, sizes in MEMBERS.items():
        own = heads | sizes | {"moe_intermediate_size": 256}
        write_synthetic_checkpoint(root / member, tiny_config(member, **own))
    for name, sizes in SIZES.items():
        write_synthetic_checkpoint(root / name, with_format(tiny_config(**heads | sizes), LAYERS.get(name, "bf16")))
    for case in CASES:
        size, tp, ep, experts = case
        layout = layout_of(case)
        out = str(root / f"theirs-{label(case)}")
        options = {"decode": layout.decode, "seq_len": 2048, **expert_formats()[experts].neuron_options()}
        if layout.query_group:
            options |= {"flash_decoding_enabled": True, "num_cores_per_group": layout.query_group}
        job = {"tp": tp, "ep": ep, "options": options}
        jobs.append({**job, "source": str(root / size), "out": out})
    env = {name: value for name, value in os.environ.items() if name != "NXD_CPU_MODE"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), json.dumps(jobs)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("case", CASES, ids=label)
def test_the_application_shards_and_loads_the_same(root: Path, case: tuple[str, int, int, str]) -> None:
    """Files of `shard_weights`, and what is cut as it is loaded without files: both are what NxD's own code cuts."""
    out = root / f"theirs-{label(case)}"
    ranks = case[1] * case[2]
    assert len(list(out.glob("loaded*.safetensors"))) == ranks
    for rank in range(ranks):
        loaded = load_file(out / f"loaded{rank}.safetensors")
        theirs = load_file(out / f"tp{rank}_sharded_checkpoint.safetensors")
        assert_same_bytes(loaded, theirs)
        assert_same_bytes(load_file(out / f"cut{rank}.safetensors"), theirs)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_every_tensor_of_every_rank(root: Path, tmp_path: Path, case: tuple[str, int, int, str]) -> None:
    size, tp, ep, _ = case
    Presharder(root / size, tmp_path, layout_of(case)).run()
    for rank in range(tp * ep):
        name = f"tp{rank}_sharded_checkpoint.safetensors"
        ours, theirs = load_file(tmp_path / "weights" / name), load_file(root / f"theirs-{label(case)}" / name)
        assert_same_bytes(ours, theirs)


def assert_same_bytes(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        found = ours[key]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), key
