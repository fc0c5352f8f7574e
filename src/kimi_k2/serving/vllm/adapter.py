"""All that this plugin reaches of vLLM, and why: names by `from ...adapter import NAME`, attributes by their class.

No other module here imports vLLM; `step`, `runner` and `verifying_runner` read its objects, and give the others types
of ours. A name is looked for when it is first asked for, so that what a version lacks takes away only what stands on
it. `python -m kimi_k2.serving.vllm.adapter DIRECTORY ...` says what versions of vLLM, unpacked there and not
imported, lack: nothing, or its rows; the status is then 1.
"""

from __future__ import annotations

import ast
import importlib
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from kimi_k2.terminal import say

logger = logging.getLogger("vllm.kimi_k2")  # vLLM's handlers print what its children log

OLDEST, NEWEST = (0, 24), (0, 33)  # that the table has been held against


class Row(NamedTuple):
    """A name of vLLM's.

    Attributes:
        why: what stands on it.
        modules: that may have it, the newest version's first.
    """

    why: str
    modules: tuple[str, ...]


_MESSAGES = ("vllm.entrypoints.generate.base.protocol", "vllm.entrypoints.openai.engine.protocol")
_NAMES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "our model is offered": {
        "ModelRegistry": "vllm.model_executor.models.registry",
        "MODELS_CONFIG_MAP": "vllm.model_executor.models.config",
        "VerifyAndUpdateConfig": "vllm.model_executor.models.config",
        "EngineArgs": "vllm.engine.arg_utils",
        "current_platform": "vllm.platforms",
        "ToolParserManager": "vllm.tool_parsers",
        "ReasoningParserManager": "vllm.reasoning",
    },
    "our model stands in for vLLM's": {
        "DeepseekV2ForCausalLM": "vllm.model_executor.models.deepseek_v2",
        "DeepseekV3ForCausalLM": "vllm.model_executor.models.deepseek_v2",
        "IntermediateTensors": "vllm.sequence",
        "get_pp_indices": "vllm.distributed.utils",
        "get_pp_group": "vllm.distributed.parallel_state",
        "get_tp_group": "vllm.distributed.parallel_state",
        "get_forward_context": "vllm.forward_context",
    },
    "our attention reads vLLM's cache": {
        "AttentionBackend": "vllm.v1.attention.backend",
        "AttentionCGSupport": "vllm.v1.attention.backend",
        "AttentionLayerBase": "vllm.model_executor.layers.attention_layer_base",
        "AttentionMetadataBuilder": "vllm.v1.attention.backend",
        "CommonAttentionMetadata": "vllm.v1.attention.backend",
        "MLAAttentionSpec": "vllm.v1.kv_cache_interface",
        "MLACommonMetadata": "vllm.model_executor.layers.attention.mla_attention",
        "split_decodes_and_prefills": "vllm.v1.attention.backends.utils",
        "get_kv_transfer_group": "vllm.distributed.kv_transfer",
        "has_kv_transfer_group": "vllm.distributed.kv_transfer",
        "cp_lse_ag_out_rs": ("vllm.v1.attention.ops.dcp", "vllm.v1.attention.ops.common"),
        "get_dcp_group": "vllm.distributed.parallel_state",
    },
    "data-parallel ranks share experts, and vLLM moves them": {
        "get_dp_group": "vllm.distributed.parallel_state",
        "EplbLayerState": "vllm.distributed.eplb.eplb_state",
        "RoutingMethodType": "vllm.model_executor.layers.fused_moe.config",
        "BaseRouter": "vllm.model_executor.layers.fused_moe.router.base_router",
    },
    "steps are prepared on the GPU": {
        "CPUWorker": "vllm.v1.worker.cpu_worker",
        "Worker": "vllm.v1.worker.gpu_worker",
        "ExecuteModelState": "vllm.v1.worker.gpu_model_runner",
        "SchedulerOutput": "vllm.v1.core.sched.output",
        "set_forward_context": "vllm.forward_context",
        "weak_ref_tensor": "vllm.utils.torch_utils",
        "SpecDecodeMetadata": "vllm.v1.spec_decode.metadata",
        "CUDAGraphMode": "vllm.config",
    },
    "a drafter shares our embeddings and head": {
        "ParallelLMHead": "vllm.model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbedding": "vllm.model_executor.layers.vocab_parallel_embedding",
    },
    "adapters (LoRA)": {
        "BaseLayerWithLoRA": "vllm.lora.layers",
        "LinearBase": "vllm.model_executor.layers.linear",
    },
    "ranks share out images": {
        "get_load_balance_assignment": "vllm.model_executor.models.vision",
        "get_tensor_model_parallel_rank": "vllm.distributed.parallel_state",
        "get_tensor_model_parallel_world_size": "vllm.distributed.parallel_state",
        "tensor_model_parallel_all_gather": "vllm.distributed.communication_op",
        "run_dp_sharded_mrope_vision_model": "vllm.model_executor.models.kimi_k25_vit",
    },
    "our parsers": {
        **dict.fromkeys(
            ("DeltaMessage", "ExtractedToolCallInformation"), _MESSAGES
        ),
        "ParserEngine": "vllm.parser.engine.parser_engine",
        "ParserEngineConfig": "vllm.parser.engine.parser_engine_config",
        "ParserEngineReasoningAdapter": "vllm.parser.engine.adapters",
        "ParserEngineToolAdapter": "vllm.parser.engine.adapters",
        "ParserState": "vllm.parser.engine.parser_engine_config",
        "Transition": "vllm.parser.engine.parser_engine_config",
        "EventType": "vllm.parser.engine.events",
        "ToolParser": "vllm.tool_parsers.abstract_tool_parser",
    },
    "forced calls keep to their schemas": {
        "SamplingParams": "vllm.sampling_params",
        "StructuredOutputsParams": "vllm.sampling_params",
        "VLLMValidationError": "vllm.exceptions",
        "validate_xgrammar_grammar": "vllm.v1.structured_output.backend_xgrammar",
    },
}  # fmt: skip
NAMES = {
    name: Row(why, (modules,) if isinstance(modules, str) else modules)
    for why, names in _NAMES.items()
    for name, modules in names.items()
}


def __getattr__(name: str) -> Any:
    """The object of that name in the vLLM that is installed.

    Raises:
        ImportError: vLLM lacks it; the message has its name.
        AttributeError: the table lacks it.
    """
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    for module in row.modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            reason = error
    raise ImportError(f"vLLM has no {name} in {' or '.join(row.modules)}: {reason}")


@contextmanager
def unless_changed(then: str) -> Iterator[None]:
    """Run what stands on vLLM's names; where one is not as it was, the log says so, and `then` is how it is."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("kimi-k2: %s, since it has changed: %s", then, error)


def platform() -> str | None:
    """The platform that vLLM runs on: its own for CUDA or for CPUs; None for any other, which may have its own models.

    Raises:
        ImportError: vLLM has none.
    """
    from kimi_k2.serving.vllm.adapter import current_platform as here

    if not type(here).__module__.startswith("vllm.platforms."):
        return None
    return "cuda" if here.is_cuda() else "cpu" if here.is_cpu() else None


def is_hopper() -> bool:
    """As the driver's library says: asking torch would start CUDA, and vLLM's processes could not fork any more."""
    from kimi_k2.serving.vllm.adapter import current_platform

    return platform() == "cuda" and bool(current_platform.is_device_capability((9, 0)))


# Attributes of vLLM's objects that are read, written or called here, by the module whose classes give them.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_model_runner": (
        "compilation_config", "device", "discard_request_mask", "drafter", "execute_model_state", "get_model",
        "input_batch", "input_ids", "kv_cache_config", "kv_connector_output", "num_computed_tokens",
        "num_prompt_logprobs", "num_spec_tokens", "optimistic_seq_lens_cpu", "positions", "prepare_inputs_event",
        "propose_draft_token_ids", "requests", "scheduler_config", "seq_lens", "speculative_config",
        "synchronize_input_prep", "use_async_scheduling", "use_aux_hidden_state_outputs",
        "valid_sampled_token_count_gpu", "vllm_config",
        "_copy_valid_sampled_token_count", "_draft_prob_req_ids", "_draft_probs", "_draft_token_ids", "_update_states",
    ),
    "vllm.v1.worker.gpu_input_batch": (
        "block_ids", "block_table", "num_computed_tokens", "num_computed_tokens_cpu", "num_computed_tokens_cpu_tensor",
        "num_prompt_tokens", "num_reqs", "num_tokens", "prev_num_draft_len",
        "prev_req_id_to_index", "prev_sampled_token_ids", "refresh_metadata", "req_id_to_index", "sampling_metadata",
        "token_ids_cpu",
    ),
    "vllm.v1.worker.block_table": ("append_row", "block_size", "block_table", "commit_block_table", "slot_mapping"),
    "vllm.v1.utils": ("copy_to_gpu", "gpu", "np"),
    "vllm.v1.core.sched.output": (
        "new_block_ids", "num_common_prefix_blocks", "num_computed_tokens", "num_scheduled_tokens",
        "req_ids", "resumed_req_ids", "scheduled_cached_reqs", "scheduled_spec_decode_tokens",
        "total_num_scheduled_tokens",
    ),
    "vllm.v1.attention.backend": (
        "block_table_tensor", "dcp_local_seq_lens", "is_prefilling", "max_query_len", "max_seq_len",
        "num_actual_tokens", "num_reqs", "positions", "query_start_loc", "query_start_loc_cpu",
        "reorder_batch_threshold", "seq_lens", "seq_lens_cpu_upper_bound", "slot_mapping", "_cudagraph_support",
        "_init_reorder_batch_threshold",
    ),
    "vllm.v1.kv_cache_interface": ("block_size", "kv_cache_groups"),
    "vllm.v1.spec_decode.llm_base_proposer": (
        "draft_attn_groups", "max_model_len", "prepare_inputs_padded", "prepare_next_token_ids_padded", "propose",
        "_determine_batch_execution_and_padding",
    ),
    "vllm.v1.worker.gpu_worker": (
        "compile_or_warm_up_model", "execute_model", "model_runner", "sleep", "use_v2_model_runner", "wake_up",
    ),
    "vllm.v1.worker.lora_model_runner_mixin": ("lora_manager",),
    "vllm.lora.worker_manager": ("remove_all_adapters",),
    "vllm.lora.model_manager": ("lora_index_to_id", "_last_mapping"),
    "vllm.lora.punica_wrapper.punica_base": ("_token_lora_indices",),
    "vllm.forward_context": ("attn_metadata", "dp_metadata", "num_tokens_across_dp_cpu"),
    "vllm.distributed.parallel_state": (
        "all_gather", "all_gatherv", "all_reduce", "cpu_group", "device_group", "rank_in_group", "reduce_scatterv",
        "world_size",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "has_connector_metadata", "save_kv_layer", "wait_for_layer_load",
    ),
    "vllm.distributed.eplb.eplb_state": ("logical_to_physical_map",),
    "vllm.config.parallel": ("eplb_config",),
    "vllm.config.speculative": ("disable_padded_drafter_batch", "draft_parallel_config"),
    "vllm.platforms.interface": ("is_cpu", "is_cuda", "is_device_capability"),
}  # fmt: skip

# Those that not all versions from `OLDEST` to `NEWEST` have, with the first and the last that does; read only if there.
VARYING: dict[str, dict[str, tuple[tuple[int, int], tuple[int, int]]]] = {
    "vllm.config.parallel": {"dcp_q_replicate": ((0, 29), NEWEST)},
    "vllm.config.vllm": {
        "_get_v1_model_runner_unsupported_features": ((0, 29), NEWEST),
        "aux_output_config": ((0, 32), NEWEST),
    },
    "vllm.config.aux_output": {"enable_return_routed_experts": ((0, 32), NEWEST)},
    "vllm.config.model": {"enable_return_routed_experts": (OLDEST, (0, 29))},
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer": dict.fromkeys(
        ("RoutedExpertsCaptureSource", "layer_id", "capture_fn"), ((0, 29), NEWEST)
    ),
    "vllm.config.lora": {"enable_moe_shared_loras": ((0, 29), NEWEST)},
    "vllm.v1.spec_decode.llm_base_proposer": {"use_heterogeneous_vocab": ((0, 29), NEWEST)},
    "vllm.parser.engine.parser_engine_config": {
        "turn_boundary_tokens": ((0, 29), NEWEST),
        "wait_for_reasoning": ((0, 32), NEWEST),
    },
    "vllm.parser.engine.adapters": {
        "find_reasoning_end": ((0, 32), NEWEST),
        "reasoning_end_token_ids": ((0, 32), NEWEST),
        "skip_reasoning_parsing": ((0, 32), NEWEST),
        "implicit_reasoning_end_token_ids": ((0, 33), NEWEST),
    },
    "vllm.entrypoints.generate.base.protocol": {"DeltaMessage": ((0, 29), NEWEST)},
    "vllm.entrypoints.openai.engine.protocol": {"DeltaMessage": (OLDEST, OLDEST)},
    "vllm.v1.attention.ops.dcp": {"cp_lse_ag_out_rs": ((0, 29), NEWEST)},
    "vllm.v1.attention.ops.common": {"cp_lse_ag_out_rs": (OLDEST, OLDEST)},
}


# What a deployment's configuration says, by our names; by the module whose class gives it, and where in `VllmConfig`.
_SETTINGS: dict[tuple[str, str], dict[str, str]] = {
    ("vllm.config.parallel", "parallel_config"): {
        "ranks": "tensor_parallel_size", "stages": "pipeline_parallel_size", "replicas": "data_parallel_size",
        "replica": "data_parallel_rank", "spread": "decode_context_parallel_size",
        "spread_by": "cp_kv_cache_interleave_size", "spread_joined_by": "dcp_comm_backend",
        "spread_queries": "dcp_q_replicate", "spread_prompts": "prefill_context_parallel_size",
        "microbatches": "use_ubatching", "shared_out": "enable_expert_parallel", "balanced": "enable_eplb",
        "placement": "expert_placement_strategy", "filtered": "enable_ep_weight_filter",
        "exchange": "all2all_backend", "worker": "worker_cls",
    },
    ("vllm.config.parallel", "parallel_config.eplb_config"): {"redundant": "num_redundant_experts"},
    ("vllm.config.vllm", ""): {
        "additional": "additional_config", "lora": "lora_config", "quantization": "quant_config",
        "transfer": "kv_transfer_config", "encoders_transfer": "ec_transfer_config",
        "second_runner": "use_v2_model_runner",
        "against_first_runner": "_get_v1_model_runner_unsupported_features",
    },
    ("vllm.config.cache", "cache_config"): {
        "page": "block_size", "page_is_asked": "user_specified_block_size", "cache": "cache_dtype",
        "prefixes": "enable_prefix_caching",
    },
    ("vllm.config.compilation", "compilation_config"): {
        "captured": "cudagraph_capture_sizes", "layers": "static_forward_context",
    },
    ("vllm.config.compilation", "compilation_config.cudagraph_mode"): {"graphs": "name"},
    ("vllm.config.model", "model_config"): {
        "dtype": "dtype", "eager": "enforce_eager", "hf": "hf_text_config",
        "routed_of_old": "enable_return_routed_experts",
    },
    ("vllm.config.aux_output", "aux_output_config"): {"routed": "enable_return_routed_experts"},
    ("vllm.config.scheduler", "scheduler_config"): {"most_tokens": "max_num_batched_tokens", "most": "max_num_seqs"},
    ("vllm.config.speculative", "speculative_config"): {"drafts": "method"},
    ("vllm.config.lora", "lora_config"): {
        "lora_slots": "max_loras", "lora_rank": "max_lora_rank", "lora_dtype": "lora_dtype",
        "lora_targets": "target_modules",
    },
    ("vllm.config.load", "load_config"): {"load_format": "load_format"},
    ("vllm.config.device", "device_config"): {"device": "device_type"},
}  # fmt: skip
# Of those that not every version has, or not every deployment.
_WITHOUT: dict[str, Any] = {
    "spread_joined_by": None, "spread_queries": False, "spread_prompts": 1, "microbatches": False,
    "placement": "linear", "filtered": False, "encoders_transfer": None, "second_runner": False,
    "against_first_runner": list, "page_is_asked": True, "graphs": "NONE", "drafts": None, "additional": None,
    "routed": False, "routed_of_old": False,
}  # fmt: skip
SETTINGS = {name: (place, theirs) for (_, place), names in _SETTINGS.items() for name, theirs in names.items()}
for (_module, _place), _names in _SETTINGS.items():
    if _always := [theirs for ours, theirs in _names.items() if ours not in _WITHOUT]:
        ATTRIBUTES[_module] = (*ATTRIBUTES.get(_module, ()), *_always)
    if (_part := _place.partition(".")[0]) and _part not in VARYING["vllm.config.vllm"]:
        ATTRIBUTES["vllm.config.vllm"] = (*ATTRIBUTES.get("vllm.config.vllm", ()), _part)


class Deployment:
    """What is asked of vLLM, by the names of `SETTINGS`; a value that is set is set in vLLM's configuration.

    Args:
        vllm_config: vLLM's.
    """

    def __init__(self, vllm_config: Any) -> None:
        vars(self)["of"] = vllm_config

    def _held(self, name: str) -> tuple[Any, str]:
        if name not in SETTINGS:
            raise AttributeError(name)
        path, theirs = SETTINGS[name]
        return (attrgetter(path)(self.of) if path else self.of), theirs

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(*self._held(name))
        except AttributeError:
            if name in _WITHOUT:
                return _WITHOUT[name]
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(*self._held(name), value)


@lru_cache(maxsize=256)
def defined(file: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a module defines or imports, and attributes that its classes have or set; of its source alone."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8")))) if file.is_file() else []
    within: list[ast.AST] = [statement for node in nodes if isinstance(node, ast.ClassDef) for statement in node.body]
    within += [target for node in within for target in getattr(node, "targets", [getattr(node, "target", node)])]
    within += [node for node in nodes if isinstance(node, ast.Attribute)]
    return tuple(frozenset(chain.from_iterable(map(_given, some))) for some in (nodes, within))  # type: ignore[return-value]


def _given(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.ImportFrom(names=names) | ast.Import(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name


def file_of(module: str, root: Path) -> Path:
    """Of a module of the vLLM in `root`, the folder that has `vllm`."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def version(root: Path) -> tuple[int, int]:
    """Of the vLLM in `root`, as its wheel has it."""
    text = root.joinpath("vllm", "_version.py").read_text(encoding="utf-8")
    found = re.search(r"version_tuple = \((\d+), (\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def lacking(root: Path) -> list[str]:
    """Rows that are not so in the vLLM in `root`, `module: name` each; of its source alone."""

    def has(module: str, name: str, *, attribute: bool = False) -> bool:
        return name in defined(file_of(module, root))[attribute]

    gone = [
        f"{row.modules[0]}: {name}"
        for name, row in NAMES.items()
        if not any(has(module, name) for module in row.modules)
    ]
    gone += [
        f"{module}: {name}" for module, names in ATTRIBUTES.items() for name in names
        if not has(module, name, attribute=True)
    ]  # fmt: skip
    for module, rows in VARYING.items():
        for name, (since, until) in rows.items():
            if has(module, name) != (since <= version(root) <= until):
                gone.append(f"{module}: {name} in {version(root)}")
    return gone


def main(roots: list[str]) -> int:
    """See the module."""
    found = {root: lacking(Path(root)) for root in roots}
    for root, gone in found.items():
        say(f"{root}: {', '.join(gone) or 'nothing is lacking'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
