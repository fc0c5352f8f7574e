"""Every option that is inherited from NxDI has an effect that is seen, or is refused by its name; and combinations.

Of a deployment's the planner refuses what the class refuses, and nothing else.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import environment
import pytest
import torch
from applications import of_options
from cases import BLOCKS, CASES, FLASH, SEQUENCE, SLOTS, config_of, format_of, layers
from harness import DRAWS, neuron_config

from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.errors import ConfigError
from kimi_k2.neuron.compile import build_application
from kimi_k2.plan.deployment import Deployment, make_target, preset_names

TINY = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
    "vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "max_position_embeddings": 65536,
}  # fmt: skip
SAMPLING = {"on_device_sampling_config": {"do_sample": True}}
BUCKETS = {"enable_bucketing": True}
QUANTIZED = {"quantized": True}


def package() -> Any:
    return importlib.import_module("kimi_k2.contrib_model")


def application(**options: Any) -> Any:
    raw = {**raw_preset(), **TINY}
    raw.pop("quantization_config")
    sizes = {"tp_degree": 2, "seq_len": 256, "max_context_length": 128}
    return of_options("none", raw, {**sizes, **options}, "kimi_k2.contrib_model")


@pytest.fixture(autouse=True)
def mocked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NXD_CPU_MODE", raising=False)


def arguments(app: Any) -> list[str]:
    return [wrapper.compiler_args for wrapper in app.models]


def model(app: Any, stage: int = 0) -> Any:
    sharding = importlib.import_module("kimi_k2.contrib_model.sharding")
    return sharding.model_on_meta(app.models[stage])


def shapes(app: Any) -> Any:
    return [(name, one.shape, one.dtype) for name, one in model(app).named_parameters()]


def buckets(app: Any) -> Any:
    return [wrapper.neuron_config.buckets for wrapper in app.models]


def states_behind(app: Any) -> list[int]:
    """Which output of a graph each cache is."""
    instance = app.models[1].get_model_instance()
    instance.module = model(app, 1)
    return list(instance.get(0)[1].values())


def truncated(app: Any) -> Any:
    ids = torch.ones(1, 200, dtype=torch.int32)
    try:
        return app.models[0].pad_inputs(ids, ids, ids, torch.zeros(1), torch.ones(1, 3))[0].shape
    except ValueError as error:
        return type(error)


def cut_ranks(app: Any) -> Any:
    """Which ranks are written, to where, if at all."""
    with mock.patch.object(app, "rank_weights") as write, mock.patch("pathlib.Path.mkdir"):
        app.shard_weights("compiled")
    return write.call_args


def loaded_ranks(app: Any) -> Any:
    """Which ranks are loaded without files, or that files are read."""
    app.traced_model = mock.MagicMock()
    read = mock.MagicMock(return_value={})
    with (
        mock.patch.object(app, "rank_weights", return_value=[{}]) as cut,
        mock.patch(f"{type(app).__module__}.load_file", read),
    ):
        app.load_weights("compiled")
    return cut.call_args, read.call_args_list


def argmax_options(app: Any) -> Any:
    sampling = importlib.import_module("neuronx_distributed_inference.modules.generation.sampling")
    sampler = model(app).sampler
    with mock.patch.object(sampling, "nxd_argmax") as called:
        called.return_value = torch.zeros(1)
        sampler._argmax_sample(torch.zeros(1, 8), False, 1)
    return called.call_args.kwargs["disable_argmax_kernel"]


def warmed_up(app: Any) -> bool:
    with mock.patch("torch.jit.load"), mock.patch.object(app, "load_weights"), mock.patch.object(app, "warmup") as warm:
        app.load("compiled/")
    return bool(warm.called)


def compile_variables(app: Any) -> Any:
    environment = importlib.import_module("neuronx_distributed_inference.utils.compile_env")
    with mock.patch.dict("os.environ", {}, clear=False) as changed:
        environment.set_compile_env_vars(app.neuron_config)
        return dict(changed)


def builder(app: Any) -> Any:
    return vars(app.get_builder())["weights_to_skip_layout_optimization"]


Effect = tuple[dict[str, Any], Any, Callable[[Any], Any]]
# Field: (the other options, its other value, where that is seen).
EFFECTS: dict[str, Effect] = {
    "allow_input_truncation": ({}, True, truncated),
    "apply_seq_ids_mask": ({"batch_size": 2, "ctx_batch_size": 2}, True, shapes),
    "async_mode": (SAMPLING, True, lambda app: app.models[1].async_mode),
    "batch_size": ({}, 2, shapes),
    "blockwise_matmul_config": ({}, {"block_size": 32}, lambda app: model(app).layers[1].mlp.experts.block_size),
    "cc_pipeline_tiling_factor": ({}, 4, arguments),
    "context_encoding_buckets": (BUCKETS, [64, 128], buckets),
    "disable_argmax_kernel": (SAMPLING, True, argmax_options),
    "disable_numeric_cc_token": ({}, True, compile_variables),
    "dma_order_config": ({}, {"token_generation_model": [1]}, arguments),
    "enable_bucketing": ({}, True, buckets),
    "enable_output_completion_notifications": ({}, True, arguments),
    "enable_spill_reload_dge": ({}, True, arguments),
    "is_continuous_batching": ({"batch_size": 2}, True, shapes),
    "local_ranks_size": ({"save_sharded_checkpoint": True}, 1, cut_ranks),
    "logical_nc_config": ({}, 1, arguments),
    "max_context_length": ({}, 64, buckets),
    "moe_ep_degree": ({}, 2, shapes),
    "moe_tp_degree": ({}, 1, shapes),
    "on_device_sampling_config": ({}, {"do_sample": False}, lambda app: model(app).lm_head.gather_output),
    "output_logits": (SAMPLING, True, states_behind),
    "quantization_type": (QUANTIZED, "expert_wise_per_channel_symmetric", shapes),
    "quantized": ({}, True, shapes),
    "rpl_reduce_dtype": ({}, "float32", lambda app: model(app).layers[0].self_attn.o_proj.reduce_dtype),
    "save_sharded_checkpoint": ({}, True, loaded_ranks),
    "scratchpad_page_size": ({}, 512, arguments),
    "seq_len": ({}, 512, shapes),
    "sequence_parallel_enabled": ({}, True, lambda app: model(app).layers[1].mlp.sequence_parallel),
    "skip_sharding": ({"save_sharded_checkpoint": True}, True, cut_ranks),
    "skip_warmup": ({}, True, warmed_up),
    "start_rank_id": ({"save_sharded_checkpoint": True}, 1, cut_ranks),
    "target": ({}, "trn2", arguments),
    "token_generation_buckets": (BUCKETS, [64, 256], buckets),
    "torch_dtype": ({}, "float32", shapes),
    "tp_degree": ({}, 4, shapes),
    "weights_to_skip_layout_optimization": ({}, [".*embed.*"], builder),
}
# At one value alone, or at the one that the checkpoint asks for; another is refused.
FIXED: dict[str, tuple[dict[str, Any], Any]] = {
    "ctx_batch_size": ({}, 2),
    "modules_to_not_convert": (QUANTIZED, ["lm_head"]),
    "quantization_block_axis": (QUANTIZED, [0, 1]),
    "quantization_block_size": (QUANTIZED, [8, 8]),
    "quantization_dtype": (QUANTIZED, "int8"),
    "quantized_checkpoints_path": (QUANTIZED, "/elsewhere"),
}
ELSEWHERE = {"on_cpu"}  # NxDI's CPU mode, in which test_logits.py runs
# What the package's class follows beyond the folder has its effect in cases.py, but for these.
IN_OTHER_TESTS = {
    "decode_layers_per_kernel", "disable_kv_cache_tiling", "enable_eagle_speculation", "enable_fused_speculation",
    "is_eagle3", "is_eagle_draft", "lora_config", "tensor_capture_config",
}  # fmt: skip
SPLIT: dict[str, Any] = {"tp_degree": 4, "enable_bucketing": True, "seq_len": 256, "max_context_length": 256}
SHORT: dict[str, Any] = {"seq_len": 48, "max_context_length": 48}
PREFIXES, PREFIXES_SPLIT = (neuron_config(ranks, 1, 4, **BLOCKS) for ranks in (1, 2))
_WHOLE = layers("TP2")
LAYERS = neuron_config(2, 1, 4, **format_of(_WHOLE, config_of(**_WHOLE.source)).neuron_options(), **_WHOLE.options)
del LAYERS["n_positions"]  # which follow seq_len
LAYERS_SPLIT: dict[str, Any] = {"flash_decoding_enabled": True, "seq_len": 8 * SLOTS}
CAPTURE = {"tensor_capture_config": {"modules_to_capture": ["layers.1"]}, **SAMPLING}
DRAFT: dict[str, Any] = {
    **dict.fromkeys(("enable_fused_speculation", "enable_eagle_speculation", "is_eagle3"), True),
    "speculation_length": 4, "on_device_sampling_config": {},
}  # fmt: skip


def other(value: Any) -> Any:
    """Another value of an option."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 1.0 if value == float("inf") else value + 1
    return ["other"] if isinstance(value, list) else "other"


def test_each_is_listed() -> None:
    folder, more = package().KimiK2NeuronConfig.FOLLOWED, environment.contrib("config").KimiK2NeuronConfig.FOLLOWED
    assert {*EFFECTS, *FIXED, *ELSEWHERE} == set(folder)
    assert {*more} - {*folder} - {name for case in CASES.values() for name in case.options} == IN_OTHER_TESTS


@pytest.mark.parametrize("name", EFFECTS)
def test_it_has_an_effect(name: str) -> None:
    options, value, seen = EFFECTS[name]
    assert seen(application(**options)) != seen(application(**options, **{name: value}))


@pytest.mark.parametrize("name", FIXED)
def test_another_value_is_refused(name: str) -> None:
    options, value = FIXED[name]
    with pytest.raises(package().ConfigError) as caught:
        application(**options, **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("kind", ["folder", "class"])
def test_all_others_are_refused(kind: str) -> None:
    """A value other than NxDI's default, of the folder's class and of the package's."""
    upstream = importlib.import_module("neuronx_distributed_inference.models.config").MoENeuronConfig
    chosen = package() if kind == "folder" else environment.contrib("config")
    names = {*vars(upstream())} - chosen.KimiK2NeuronConfig.FOLLOWED
    for name, value in vars(chosen.KimiK2NeuronConfig()).items():
        if name not in names:
            continue
        with pytest.raises(ValueError, match=name) as caught:
            chosen.KimiK2NeuronConfig(**{name: other(value)})
        assert getattr(caught.value, "field", None) == name


@pytest.mark.parametrize(("given", "field"), [
    ({"tp_degree": 2, "world_size": 4}, "world_size"),
    ({"async_mode": True}, "async_mode"),
    ({"is_continuous_batching": True, "batch_size": 2, "apply_seq_ids_mask": False}, "apply_seq_ids_mask"),
    ({"is_eagle3": True}, "enable_fused_speculation"),
    ({**DRAFT, "is_eagle3": False}, "is_eagle3"),
    ({**DRAFT, "enable_eagle_speculation": False}, "enable_eagle_speculation"),
    ({**DRAFT, "speculation_length": 0}, "speculation_length"),
    ({**DRAFT, "on_device_sampling_config": None}, "on_device_sampling_config"),
    ({**DRAFT, "sequence_parallel_enabled": True}, "sequence_parallel_enabled"),
    ({**DRAFT, "output_logits": True}, "output_logits"),
    ({**DRAFT, "async_mode": True}, "async_mode"),
    ({"blockwise_matmul_config": {"use_shard_on_block_dynamic_while": True}}, "use_shard_on_block_dynamic_while"),
    # NxDI tells a prompt and drafts apart by the number of tokens alone.
    ({**SHORT, "speculation_length": 1}, "speculation_length"),
    (
        {**SHORT, "speculation_length": 16, "context_encoding_buckets": [16, 48], "enable_bucketing": True},
        "speculation_length",
    ),
    # The cache in blocks.
    ({**PREFIXES, "is_block_kv_layout": False}, "is_block_kv_layout"),
    ({**PREFIXES, "is_prefix_caching": False}, "is_prefix_caching"),
    ({**PREFIXES, "pa_num_blocks": 5}, "pa_num_blocks"),
    ({**PREFIXES, "pa_block_size": 7}, "max_context_length"),
    ({**PREFIXES, "prefix_buckets": [12]}, "prefix_buckets"),
    ({**PREFIXES, "token_generation_buckets": [20, 48]}, "token_generation_buckets"),
    ({**PREFIXES, "speculation_length": 3}, "speculation_length"),
    ({**PREFIXES, **SEQUENCE}, "sequence_parallel_enabled"),
    ({**PREFIXES, **SAMPLING, "async_mode": True}, "async_mode"),
    ({**PREFIXES, "chunked_prefill_config": {"max_num_seqs": 2}}, "chunked_prefill_config"),
    (
        {**PREFIXES_SPLIT, **FLASH, "pa_block_size": 3, "prefix_buckets": [18], "context_encoding_buckets": [24]},
        "pa_block_size",
    ),
    # What does not divide among ranks.
    ({**SPLIT, "num_cores_per_group": 2}, "num_cores_per_group"),
    ({**SPLIT, **FLASH, "num_cores_per_group": 3}, "num_cores_per_group"),
    ({**SPLIT, **FLASH, "num_cores_per_group": 1}, "num_cores_per_group"),
    ({**SPLIT, **FLASH, "seq_len": 258}, "seq_len"),
    ({**SPLIT, **FLASH, "token_generation_buckets": [130, 256]}, "token_generation_buckets"),
    ({**SPLIT, **FLASH, "context_encoding_buckets": [66, 256]}, "context_encoding_buckets"),
    ({**SPLIT, **SEQUENCE, "max_context_length": 254}, "max_context_length"),
    ({**SPLIT, **SEQUENCE, "context_encoding_buckets": [66, 256]}, "context_encoding_buckets"),
    (
        {**SPLIT, **SEQUENCE, **SAMPLING, "tensor_capture_config": {"modules_to_capture": ["norm"]}},
        "tensor_capture_config",
    ),
    # Whole layers in one kernel.
    ({**LAYERS, "decode": "kernels"}, "'decode': .*layers"),
    ({**LAYERS, "rpl_reduce_dtype": "bfloat16"}, "rpl_reduce_dtype.*layers"),
    ({**LAYERS, "seq_len": 128 * 3}, "seq_len.*layers"),
    (
        {**LAYERS, "enable_bucketing": True, "token_generation_buckets": [128, 256]},
        "token_generation_buckets.*layers",
    ),
    (
        {**LAYERS, "quantized": True, "quantization_type": "expert_wise_per_channel_symmetric"},
        "quantization_type.*layers",
    ),
    ({**LAYERS, **CAPTURE, "batch_size": 1}, "tensor_capture_config.*layers"),
    ({**LAYERS, "batch_size": 33}, "batch_size.*layers"),
    ({**LAYERS, **LAYERS_SPLIT, "batch_size": 32, "tp_degree": 8, "moe_tp_degree": 8}, "batch_size.*layers"),
    ({**LAYERS, **LAYERS_SPLIT, "seq_len": SLOTS}, "seq_len.*layers"),
    ({**LAYERS, **LAYERS_SPLIT, "logical_nc_config": 1}, "logical_nc_config.*layers"),
])  # fmt: skip
def test_combinations_that_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        environment.contrib("config").KimiK2NeuronConfig(**given)


def test_what_combinations_begin_with_is_taken() -> None:
    for given in (SHORT, PREFIXES, {**SPLIT, **FLASH, **SEQUENCE}, LAYERS, {**LAYERS, **BUCKETS, "seq_len": 1536}):
        made = environment.contrib("config").KimiK2NeuronConfig(**given)
    assert made.token_generation_buckets == [768, 1536]  # NxDI's begin with 128


MODEL, PRESETS = (
    "kimi-k2-instruct-0905",
    [name for name in preset_names() if (preset := Deployment.load(name)).on_nxdi and not preset.vision],
)
# What draws change of a preset's neuron_config.
CHANGES: dict[str, list[Any]] = {
    "decode_layers_per_kernel": [None, 5], "flash_decoding_enabled": [True, False],
    "num_cores_per_group": [None, 1, 3, 8, 16], "is_continuous_batching": [True, False], "ctx_batch_size": [None, 1, 8],
    "speculation_length": [None, 2, 4, 256], "logical_nc_config": [2, 3], "save_sharded_checkpoint": [True, False],
    "on_device_sampling_config": [None, {"do_sample": True, "global_topk": 4096}],
    "lora_config": [None, {"target_modules": ["q_b_proj"]}],
}  # fmt: skip


def taken(use: Callable[..., Any], *given: Any) -> bool:
    try:
        use(*given)
    except ConfigError:
        return False
    return True


def test_plan_and_class_take_the_same(tmp_path: Path) -> None:
    """Both ends have only the preset's schema in common: the class is built of a deployment that was not checked."""
    draw, path, seen = random.Random(DRAWS), tmp_path / "drawn.yaml", list[bool]()
    for _ in range(max(DRAWS, 150)):
        options = {name: draw.choice(CHANGES[name]) for name in draw.sample([*CHANGES], draw.choice([0, 0, 1, 2, 4]))}
        path.write_text(json.dumps({"like": draw.choice(PRESETS), "neuron_config": options}))
        lengths = (draw.choice(choices) for choices in ([None, 384, 1000, 2048], [None, 2, 8, 33], [None, 100, 256]))
        with mock.patch.object(Deployment, "check"):
            preset = Deployment.load(path).with_lengths(*lengths)
        config = KimiK2Config.from_preset(MODEL, n_shared_experts=draw.choice([1, 1, 1, 3]))
        seen.append(taken(build_application, preset, config, MODEL))
        assert taken(make_target, preset, config) == seen[-1], preset
    assert 30 < sum(seen) < 120
