"""Ways of serving: checkpoint, layout, options and script of each, in float32, and what transformers' model gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import schedule
import torch
from harness import LAYOUTS, check, neuron_config
from reference import reference
from schedule import Script

from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

Options = Mapping[str, Any]
NONE: Options = MappingProxyType({})
CONTRIB = Path(__file__).parents[2] / "contrib" / "models" / "Kimi-K2-Instruct-0905"
FLASH: dict[str, Any] = {"flash_decoding_enabled": True}
SEQUENCE: dict[str, Any] = {"sequence_parallel_enabled": True}
LINES: dict[str, Any] = {"is_continuous_batching": True, "ctx_batch_size": 1, "tkg_batch_size": 4, "max_batch_size": 4}
PAIRS = FLASH | {"num_cores_per_group": 2}
BUCKETS = {"enable_bucketing": True, "context_encoding_buckets": [16, 48], "token_generation_buckets": [32, 48]}
LONG: dict[str, Any] = {
    **LINES, **dict.fromkeys(("seq_len", "n_positions", "max_context_length"), 512),
    "enable_bucketing": True, "context_encoding_buckets": [32, 512], "token_generation_buckets": [32, 512],
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    **LINES, "is_prefix_caching": True, "is_block_kv_layout": True, "pa_block_size": 8, "pa_num_blocks": 30,
    "enable_bucketing": True, "max_context_length": 24, "context_encoding_buckets": [8, 24], "prefix_buckets": [32],
    "token_generation_buckets": [48],
}  # fmt: skip
GROUPS = {"prefill_rows_at_once": 64}  # four blocks of 16 tokens; the prompts fill many
DRAFTS = {"speculation_length": 4}
# Sizes that the kernel of whole layers takes, and the least slots of a cache at LNC=2.
SLOTS = 256
WHOLE: dict[str, Any] = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "kv_lora_rank": 128, "q_lora_rank": 128,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "qk_rope_head_dim": 32, "moe_intermediate_size": 64,
}  # fmt: skip
LAYERS_PAIRS: dict[str, Any] = {**PAIRS, "seq_len": 2 * SLOTS}
# More experts than a step has choices, so that they are loaded selectively; odd heads, and blocks that end part empty.
ODD: dict[str, Any] = {
    "n_routed_experts": 24, "hidden_size": 320, "moe_intermediate_size": 192, "num_attention_heads": 12,
    "num_key_value_heads": 12, "v_head_dim": 24,
}  # fmt: skip


class Case(NamedTuple):
    """One way of serving.

    Attributes:
        layout: key of harness.LAYOUTS.
        options: of KimiK2NeuronConfig.
        script: `steps` of all lines, each prompt into its own line where those are named; steps of `some lines`; with
            `drafts`, of which a part is refused; behind shared `prefixes`; behind a prompt of `N tokens`.
        batch: sequences.
        source: member, form and sizes of the checkpoint, see `write`.
        experts: name of the format in which experts are held.
        more: of the job, see applications.py.
    """

    layout: str
    options: Options = NONE
    script: str = "steps"
    batch: int = 4
    source: Options = NONE
    experts: str = ""
    more: Options = NONE


def layers(layout: str, form: str = "bf16", batch: int = 4, cores: int = 2, script: str = "steps", **more: Any) -> Case:
    """Decode whose MoE layers are one kernel; a rank has at most 128 columns of the residual, 32 or 64 of an expert."""
    sizes = dict(WHOLE)
    sizes |= {"TP1": {"hidden_size": 128}, "TP2": {}, "EP2": {}}.get(layout, {"moe_intermediate_size": 128})
    options = {"seq_len": SLOTS, "decode": "layers", "logical_nc_config": cores, **more}
    held = "bf16_tiles" if form == "bf16" else "tiles"
    return Case(layout, options, script, batch, {"form": form, **sizes}, held)


def folder(layout: str, form: str, batch: int, script: str = "steps", **options: Any) -> Case:
    """The folder of contrib/models: `src` of a copy, without `kimi_k2`, or executed as the package's."""
    return Case(layout, options, script, batch, {"form": form, **ODD}, more={"folder": "src"})


FEW: dict[str, Any] = {"num_hidden_layers": 2, "n_routed_experts": 72, "num_experts_per_tok": 8}
CHANNELS = {"quantized": True, "quantization_type": "expert_wise_per_channel_symmetric"}
FIVE = ["TP1", "TP2", "TP4", "EP2", "TP2xEP2"]
CASES: dict[str, Case] = {
    **{layout: Case(layout) for layout in FIVE},
    **{f"one line {layout}": Case(layout, batch=1) for layout in FIVE},
    **{
        f"{member} EP2": Case("EP2", source={"member": member, "form": ""})
        for member in ("kimi-k2-thinking", "kimi-k2.5")
    },
    **{
        f"{held} {layout}": Case(layout, source={"form": "fp8"}, experts=held)
        for held in ("blockwise", "per_channel") for layout in ("TP2", "EP2", "TP2xEP2")
    },
    **{f"arrival {layout}": Case(layout, LINES) for layout in ("TP1", "EP2")},
    **{f"groups {layout}": Case(layout, GROUPS) for layout in ("TP1", "EP2")},
    "flash TP2": Case("TP2", FLASH),
    "flash TP4": Case("TP4", FLASH | BUCKETS),
    "flash TP4 in pairs": Case("TP4", PAIRS | LINES),
    "flash TP2xEP2": Case("TP2xEP2", FLASH | LINES | BUCKETS),
    "sequence TP2": Case("TP2", SEQUENCE),
    "sequence TP4": Case("TP4", SEQUENCE | LINES | BUCKETS),
    "sequence EP2": Case("EP2", SEQUENCE),
    "sequence TP2xEP2": Case("TP2xEP2", SEQUENCE | BUCKETS),
    "both TP2xEP2": Case("TP2xEP2", FLASH | SEQUENCE | LINES),
    "some lines TP2": Case("TP2", LINES, "some lines"),
    "some lines flash TP2": Case("TP2", FLASH | LONG, "some lines"),
    "some lines sequence TP2": Case("TP2", SEQUENCE | LONG, "some lines"),
    **{f"drafts {layout}": Case(layout, DRAFTS, "drafts", batch=1) for layout in ("TP1", "TP2", "TP2xEP2")},
    **{f"drafts {layout}, four lines": Case(layout, DRAFTS, "drafts") for layout in ("TP1", "TP2xEP2")},
    "drafts flash TP4": Case("TP4", FLASH | DRAFTS, "drafts", batch=1),
    "drafts sequence TP2": Case("TP2", SEQUENCE | DRAFTS, "drafts", batch=1),
    **{f"prefixes {layout}": Case(layout, BLOCKS, "prefixes", source=FEW) for layout in ("TP1", "TP2xEP2")},
    **{
        f"prefixes flash {layout}": Case(layout, BLOCKS | FLASH, "prefixes", source=FEW)
        for layout in ("TP2", "TP2xEP2")
    },
    "prefixes flash TP4 in pairs": Case("TP4", BLOCKS | PAIRS, "prefixes", source=FEW),
    **{
        f"layers {form} {layout}, {batch}": layers(layout, form, batch, 1 if layout == "TP1" else 2)
        for layout, form, batch in (
            ("TP1", "int4", 1), ("TP2", "int4", 1), ("EP2", "int4", 4), ("TP2", "bf16", 1), ("EP2", "bf16", 4),
            ("TP2xEP2", "bf16", 1), ("TP2", "fp8", 4), ("EP2", "fp8", 1),
        )
    },
    "layers EP2": layers("EP2", batch=1),
    "layers arrival EP2": layers("EP2", **LINES),
    "layers sequence TP2": layers("TP2", **SEQUENCE),
    "layers TP4 in pairs": layers("TP4", batch=1, **LAYERS_PAIRS),
    "layers flash TP4": layers("TP4", "fp8", **FLASH, num_cores_per_group=4, seq_len=4 * SLOTS),
    "layers TP4 in pairs, four lines": layers("TP4", **LAYERS_PAIRS),
    **{
        f"operations {name}": case._replace(more={"without_kernel": True})
        for name, case in (("TP2", layers("TP2")), ("EP2", layers("EP2", "fp8")))
    },
    "folder BF16 TP2": folder("TP2", "bf16", 1),
    "folder blocks EP2": folder("EP2", "fp8", 1, quantized=True),
    "folder blocks TP2xEP2": folder("TP2xEP2", "fp8", 4, quantized=True),
    "folder channels TP4": folder("TP4", "fp8-channel", 1),
    "folder INT4 EP2": folder("EP2", "int4", 4),
    "folder some lines EP2": folder("EP2", "fp8", 4, "some lines", quantized=True, is_continuous_batching=True),
}  # fmt: skip


def config_of(member: str = "kimi-k2-instruct-0905", form: str = "bf16", **sizes: Any) -> KimiK2Config:
    """A tiny member in a stored form, by default its own."""
    config = tiny_config(member, **sizes)
    return with_format(config, form) if form else config


def write(directory: Path, seed: int = 3, **source: Any) -> Path:
    """A checkpoint of `config_of`, where there is none yet."""
    if not directory.exists():
        write_synthetic_checkpoint(directory, config_of(**source), seed=seed)
    return directory


def copied(directory: Path) -> Path:
    """contrib/models/NAME of a checkout that has nothing else."""
    path = directory / "neuronx-distributed-inference" / "contrib" / "models" / CONTRIB.name
    shutil.copytree(CONTRIB, path, ignore=shutil.ignore_patterns("__pycache__"))
    return path


def script_of(case: Case) -> Script:
    """What is run."""
    if case.script == "steps":
        arrival = [2, 0, 3, 1] if "is_continuous_batching" in case.options else None
        return schedule.sequences(case.batch, arrival=arrival)
    if case.script.endswith("tokens"):
        return schedule.sequences(1, 2, lengths=[int(case.script.split()[0])])
    if case.script == "drafts":
        return schedule.with_drafts(case.batch)
    if case.script == "prefixes":
        return schedule.shared_prefixes()
    # A long line keeps its cache beside short ones in a small bucket; a prompt may be one token.
    return schedule.some_lines([300, 9, 20, 13] if case.options.get("seq_len", 0) > SLOTS else [17, 9, 1, 13])


def format_of(case: Case, config: KimiK2Config) -> Any:
    """The format in which experts are held, or None."""
    if not case.experts:
        return None
    layout = Layout(*LAYOUTS[case.layout], experts=case.experts, decode=case.options.get("decode", "xla"))
    return layout.expert_format(config)


def job(case: Case, checkpoint: Path, *scripts: Any) -> dict[str, Any]:
    """A case as a job of applications.py, with scripts of its own or those given."""
    held = format_of(case, KimiK2Config.from_pretrained(checkpoint))
    tp, ep = LAYOUTS[case.layout]
    given = {"torch_dtype": "float32", **(held.neuron_options() if held else {}), **case.options}
    options = neuron_config(tp, ep, case.batch, **given)
    return {"checkpoint": checkpoint, "neuron_config": options, "scripts": [*scripts] or [script_of(case)], **case.more}


def rounded_to(held: Any, config: KimiK2Config) -> tuple[tuple[int, int] | None, float]:
    """Blocks of `reference` in which a format holds experts that are stored otherwise, and their greatest value."""
    if held is None or not held.quantization_type:
        return None, 0.0
    if held.name == "per_channel":
        return (1, 0), 240.0
    return (held.block_of(1, 2) if config.format_of_experts().e4m3_block is None else None), 448.0


def model_of(case: Case, checkpoint: Path) -> Any:
    """transformers' model of a case, with experts as they are held."""
    config = KimiK2Config.from_pretrained(checkpoint)
    return reference(checkpoint, *rounded_to(format_of(case, config), config))


def compare(name: str, answer: Mapping[str, Any], script: Script, model: Any) -> None:
    """A job's logits beside a model's."""
    assert "logits" in answer, answer
    check(name, answer["logits"][0], script.expected(model))


Stored = Callable[..., Path]


def far(answer: Mapping[str, Any], expected: torch.Tensor) -> float:
    """The largest difference of a job's logits, infinite where it ended in an error."""
    return float((answer["logits"][0] - expected).abs().max()) if "logits" in answer else float("inf")
