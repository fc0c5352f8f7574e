"""Files of the ranks that the pre-sharder writes, what the loader gives the device, and what NxD cuts: the same bytes.

NxD's mocked ranks are no processes: NXD_CPU_MODE is unset where it cuts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import media
import pytest
import torch
from applications import application
from cases import FIVE, SLOTS, WHOLE, Case, Stored, job
from harness import launch
from safetensors.torch import load_file

from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import Form
from kimi_k2.plan.nxdi import draft_options
from kimi_k2.synthetic.config import TINY_VISION
from kimi_k2.synthetic.draft import write_synthetic_head

MEMBERS = {
    "Instruct": ("kimi-k2-instruct", ""), "0905": ("kimi-k2-instruct-0905", ""), "Thinking": ("kimi-k2-thinking", ""),
    "K2.5": ("kimi-k2.5", ""), "BF16": ("kimi-k2-instruct-0905", "bf16"),
    "FP8 a channel": ("kimi-k2-instruct-0905", "fp8-channel"), "INT4": ("kimi-k2-instruct-0905", "int4"),
}  # fmt: skip
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8}
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "moe_intermediate_size": 256, **HEADS}
MEDIUM: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512,
    "n_routed_experts": 32, "form": "bf16", **HEADS,
}  # fmt: skip
# The presets' 64 ranks: an expert's real width, heads and latents that 64 ranks can divide.
WIDE: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 64,
    "kv_lora_rank": 48, "qk_rope_head_dim": 16, "moe_intermediate_size": 2048, "form": "bf16",
}  # fmt: skip
TILED = {**WHOLE, **SIZES, "hidden_size": 512}
LAYERS = {"decode": "layers", "seq_len": 8 * SLOTS}
SHARED = {**LAYERS, "flash_decoding_enabled": True, "num_cores_per_group": 8}
# Of whole layers, which are in tiles, from BF16, and from FP8 blocks for ranks that share a cache; and more ranks.
OTHERS: dict[str, Case] = {
    **{
        f"{name} {layout} {held}": Case(layout, source=sizes, experts=held)
        for name, sizes in (("tiny", {**SIZES, "form": "bf16"}), ("medium", MEDIUM))
        for layout in ("TP4xEP2", "TP8") for held in ("per_channel", "blockwise", "bf16")
    },
    "wide TP32xEP2": Case("TP32xEP2", source=WIDE, experts="blockwise"),
    "wide TP64": Case("TP64", source=WIDE, experts="per_channel"),
    "layers TP4xEP2": Case("TP4xEP2", LAYERS, source={**TILED, "form": "bf16"}, experts="tiles"),
    "layers TP8": Case("TP8", LAYERS, source={**TILED, "form": "bf16"}, experts="tiles"),
    "layers TP4xEP2 BF16": Case("TP4xEP2", LAYERS, source={**TILED, "form": "bf16"}, experts="bf16_tiles"),
    "layers TP8 FP8": Case("TP8", SHARED, source={**TILED, "form": "fp8"}, experts="tiles"),
}  # fmt: skip


class Device:
    """What NxDI calls as `traced_model.nxd_model`."""

    def initialize(self, weights: list[dict[str, torch.Tensor]], first: torch.Tensor) -> None:
        self.weights = weights


def differences(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> list[str]:
    """Names that only one has, or whose dtype, shape or bits differ."""
    wrong = [] if len(found) == len(expected) else [f"{len(found)} ranks"]
    for rank, (one, other) in enumerate(zip(found, expected, strict=False)):
        wrong += [f"{rank}: {name}" for name in one.keys() ^ other.keys()]
        for name in one.keys() & other.keys():
            same = (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
            if not same or not torch.equal(*(each[name].contiguous().view(torch.uint8) for each in (one, other))):
                wrong.append(f"{rank}: {name}")
    return wrong


def reserved(weights: list[dict[str, torch.Tensor]]) -> list[str]:
    """FP8 tensors with a code that Trainium reads as NaN: exponent bits all ones, 0x78 to 0x7F without the sign."""
    eights = {name: one for rank in weights for name, one in rank.items() if one.dtype == torch.float8_e4m3fn}
    return [name for name, tensor in eights.items() if bool(((tensor.view(torch.uint8) & 0x78) == 0x78).any())]


def compared(jobs: dict[str, Any]) -> dict[str, list[str]]:
    """A job: what differs between an application's files, what it loads with and without them, and NxD's cut."""
    from neuronx_distributed.modules.moe import moe_process_group

    found = {}
    for name, asked in jobs.items():
        app = application(asked)
        neuron, device = app.neuron_config, Device()
        theirs = app.get_builder().shard_checkpoint()
        app.traced_model = SimpleNamespace(nxd_model=device)
        with tempfile.TemporaryDirectory() as directory:
            neuron.save_sharded_checkpoint = True
            app.shard_weights(directory)
            files = [
                Path(directory, "weights", f"tp{rank}_sharded_checkpoint.safetensors") for rank in range(len(theirs))
            ]
            # A head has no files: it is cut beside those of its target.
            wrong = [] if "draft" in asked else differences([load_file(file) for file in files], theirs)
            wrong = [f"file {each}" for each in wrong]
            app.load_weights(directory)
            wrong += [f"loaded {each}" for each in differences(device.weights, theirs)]
        neuron.save_sharded_checkpoint = False
        app.load_weights("none")
        wrong += [f"without files {each}" for each in differences(device.weights, theirs)]
        found[name] = wrong + [f"NaN {each}" for each in reserved(theirs)]
        print(name, len(theirs), found[name], flush=True)
        moe_process_group.destroy_moe_model_parallel()
    return found


def check(stored: Stored, cases: dict[str, Case]) -> None:
    """No case differs."""
    jobs = {name: job(case, stored(**case.source)) for name, case in cases.items()}
    for one in jobs.values():
        one["neuron_config"]["torch_dtype"] = "bfloat16"
    found = launch(compared, jobs, way="lowered", timeout=900)
    assert found == {name: [] for name in cases}


@pytest.mark.parametrize("member", MEMBERS)
def test_every_member_and_layout(stored: Stored, member: str) -> None:
    """The class in each form in which it holds experts, and the folder."""
    name, form = MEMBERS[member]
    source = {**SIZES, "member": name, "form": form}
    cases = {f"{layout} {held}": Case(layout, source=source, experts=held) for layout in FIVE for held in HELD}
    for layout in FIVE:
        for held, options in FOLDER.items():
            more = {"folder": "kimi_k2.contrib_model"}
            cases[f"folder {layout} {held}"] = Case(layout, options, source=source, more=more)
    check(stored, cases)


HELD = ("bf16", "blockwise", "per_channel")
FOLDER: dict[str, dict[str, Any]] = {
    "BF16": {}, "blocks": {"quantized": True, "quantization_type": "blockwise_symmetric"},
    "channels": {"quantized": True, "quantization_type": "expert_wise_per_channel_symmetric"},
}  # fmt: skip


def test_more_ranks_and_whole_layers(stored: Stored) -> None:
    check(stored, OTHERS)


@pytest.mark.parametrize("form", ["llama", "mla"])
def test_a_head_beside_its_targets_files(stored: Stored, tmp_path: Path, form: Form) -> None:
    source = stored(num_hidden_layers=4)
    layers: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    write_synthetic_head(tmp_path, KimiK2Config.from_pretrained(source), form, **layers)
    drafts = {**draft_options(3), "on_device_sampling_config": {}, "torch_dtype": "bfloat16"}
    made = {**job(Case("EP2", drafts, batch=1), source), "draft": tmp_path}
    assert launch(compared, {form: made}, way="lowered") == {form: []}


def test_tower(checkpoints: dict[str, Path], stored: Stored) -> None:
    """Text and tower of K2.5, each on its own ranks."""
    source = stored(member="kimi-k2.5", form="", vision={**TINY_VISION, "vt_num_attention_heads": 4})
    given = job(Case("TP4", {"torch_dtype": "bfloat16"}), source)["neuron_config"]
    assert launch(towers, source, given, way="lowered") == []


def towers(source: Path, options: dict[str, Any]) -> list[str]:
    """A job: the same of NxDI's image-to-text base with a tower on two ranks."""
    tower = {"vision_buckets": [[16, 1]], "tp_degree": 2}
    app = media.application(source, options, tower, torch_dtype=torch.bfloat16, save_sharded_checkpoint=True)
    devices = Device(), Device()
    app.text_traced_model, app.vision_traced_model = (SimpleNamespace(nxd_model=device) for device in devices)
    theirs = [builder().shard_checkpoint() for builder in (app.get_text_builder, app.get_vision_builder)]
    with tempfile.TemporaryDirectory() as root:
        paths = [f"{root}/text", f"{root}/vision"]
        app.shard_text_weights(paths[0])
        app.shard_vision_weights(paths[1])
        app.load_weights(*paths)
        wrong = [
            difference
            for device, cut in zip(devices, theirs, strict=True)
            for difference in differences(device.weights, cut)
        ]
    return wrong + [f"{len(cut)} ranks" for cut, ranks in zip(theirs, (4, 2), strict=True) if len(cut) != ranks]


def test_a_missing_and_a_foreign_tensor_are_named(stored: Stored) -> None:
    from kimi_k2.contrib_model.checkpoint import CheckpointError, CheckpointMapping, StateDictReader

    checkpoint = stored(num_hidden_layers=2)
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    config = application(job(Case("TP1", more={"folder": "kimi_k2.contrib_model"}), checkpoint)).config
    foreign = {**tensors, "model.layers.1.mlp.extra.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"mlp\.extra"):
        list(CheckpointMapping(config, StateDictReader(foreign)).parameters())
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    with pytest.raises(CheckpointError, match="e_score_correction_bias: missing"):
        list(CheckpointMapping(config, StateDictReader(tensors)).parameters())
