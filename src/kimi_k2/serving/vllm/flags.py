"""Every engine argument of vLLM 0.24 to 0.33: what it does where our model serves, or that vLLM's own is to serve.

An argument at its default asks for nothing. One that is in no group here is of a version that nobody here has seen:
where it is set, vLLM's own model serves. Parts of an argument (`compilation_config.cudagraph_mode`) that are not listed
go with the whole. The API server's own flags (`--host`, `--tool-call-parser` ...) reach no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from kimi_k2.serving.vllm.adapter import Deployment

NOTED = "kimi_k2"  # the key in `additional_config`


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Our model does as asked, or the parts of vLLM that serve it.
OBEYED = _names("""
    model model_weights hf_config_path config_format hf_overrides trust_remote_code revision code_revision hf_token
    download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
    model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location max_parallel_loading_workers
    dtype seed max_model_len enforce_eager cudagraph_capture_sizes max_cudagraph_capture_size
    compilation_config.cudagraph_mode compilation_config.cudagraph_capture_sizes
    compilation_config.max_cudagraph_capture_size compilation_config.cudagraph_num_of_warmups
    compilation_config.cudagraph_copy_inputs
    tensor_parallel_size enable_expert_parallel distributed_executor_backend master_addr master_port nnodes node_rank
    distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
    block_size enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval gpu_memory_utilization
    kv_cache_memory_bytes num_gpu_blocks_override kv_events_config
    enable_sleep_mode enable_cumem_allocator ec_transfer_config ec_manager_config enable_prompt_embeds
    kv_transfer_config worker_cls worker_extension_cls model_class_overrides
    language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
    mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
    mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate
    video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize
    compilation_config.compile_mm_encoder compilation_config.cudagraph_mm_encoder
    compilation_config.encoder_cudagraph_token_budgets compilation_config.encoder_cudagraph_max_vision_items_per_batch
    compilation_config.encoder_cudagraph_max_frames_per_batch
    max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules specialize_active_lora
    dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
""")

# Before the model and behind it: scheduler, sampler, tokenizer, API, records.
WITHOUT_EFFECT = _names("""
    served_model_name tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init allowed_local_media_path
    allowed_media_domains io_processor_plugin renderer_num_workers tokens_only
    max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs max_num_queued_reqs
    max_num_queued_tokens max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
    long_prefill_token_threshold_adaptive enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl
    prefill_schedule_interval watermark disable_hybrid_kv_cache_manager scheduling_policy scheduler_cls
    async_scheduling stream_interval prefix_match_unit
    max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay return_sampling_mask logits_processors
    structured_outputs_config reasoning_parser reasoning_parser_plugin reasoning_config watermark_config
    generation_config override_generation_config
    disable_log_stats aggregate_engine_logging logging_config log_level log_config_file enable_log_requests
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
    kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_mfu_metrics
    enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats profiler_config
    watchdog_config shutdown_timeout fail_on_environ_validation ray_workers_use_nsight enable_shm_tensor_arena
    _api_process_count _api_process_rank additional_config performance_mode
""")

# Of what this family or one replica does not have.
OF_OTHERS = _names("""
    disable_sliding_window disable_cascade_attn swa_bounded_replay gdn_prefill_backend kda_prefill_backend
    kda_decode_backend mamba_config mamba_backend mamba_ssu_algorithm mamba_cache_dtype mamba_ssm_cache_dtype
    mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding
    mamba_cache_philox_rounds replayssm_buffer_len use_replayssm sparse_indexer_topk_backend enable_hc_sp
    allow_deprecated_quantization
    data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
    data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
    dp_sync_interval disable_nccl_for_dp_synchronization
    eplb_config ubatch_size
    dbo_decode_token_threshold dbo_prefill_token_threshold
    default_mm_loras enable_tower_connector_lora max_lora_cls_labels spec_model spec_tokens elastic_ep_max_dp_size
    kv_offloading_backend enable_flashinfer_autotune kernel_config.enable_flashinfer_autotune
    kernel_config.enable_cutedsl_warmup kernel_config.enable_jit_warmup
    kernel_config.enable_rocm_segmented_attn_autotune kernel_config.sparse_indexer_topk_backend
""")

# How vLLM compiles its own model; ours is not compiled. Named at start where they are set.
NOT_COMPILED = _names("compilation_config optimization_level")

# Decided by vLLM's configuration as it stands in the end, which the environment changes too (`support.refusal`).
DECIDED_LATER = _names("""
    pipeline_parallel_size data_parallel_size all2all_backend prefill_context_parallel_size
    decode_context_parallel_size dcp_comm_backend dcp_q_replicate enable_dbo enable_eplb enable_ep_weight_filter
    speculative_config enable_lora fully_sharded_loras enable_mixed_moe_lora_format enable_moe_shared_loras
    spec_method kv_cache_dtype quantization enable_return_routed_experts aux_output_config
""")

# vLLM's own model serves these, but at the values given.
VLLMS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _names("""
        quantization_config attention_backend attention_config moe_backend linear_backend kernel_config ir_op_priority
        monokernel cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group
        offload_prefetch_step offload_params kv_offloading_size calculate_kv_scales
        kv_cache_dtype_skip_layers kv_sharing_fast_prefill override_attention_dtype pooler_config diffusion_config
        engram_config enable_batch_sharded_sampling
        expert_placement_strategy enable_elastic_ep enable_fault_tolerance fault_tolerance_config
        disable_custom_all_reduce sleep_mode_offload_cudagraph sleep_mode_backend sleep_preserve_parameter_names
        enable_nccl_comm_suspend enable_layerwise_nvtx_tracing
        """),
        (),
    ),
    "load_format": ("hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "dummy",
                    "runai_streamer"),
    # Others copy on a GPU alone (offloading), or have not been tried.
    "kv_transfer_config.kv_connector": ("ExampleConnector", "SharedStorageConnector", "NixlConnector"),
    "model_impl": ("vllm",),
    "runner": ("generate",),
    "convert": ("none",),
    "weight_transfer_config.backend": ("nccl", "ipc"),
    "weight_transfer_config": (),
}  # fmt: skip

HARMLESS = OBEYED | WITHOUT_EFFECT | OF_OTHERS | DECIDED_LATER


def known(name: str) -> bool:
    """Whether an argument, or a part of one, is in a group here."""
    return name in HARMLESS or name in NOT_COMPILED or name in VLLMS


def _changed(name: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    if value is None or value is default:
        return
    parts = _parts(value)
    if parts is None:
        if value != default:
            yield name, value
        return
    usual = _parts(default) or {}
    for part, current in parts.items():
        other = usual.get(part)
        if current is not None and current is not other and current != other:
            yield f"{name}.{part}", current


def _parts(value: Any) -> Mapping[str, Any] | None:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return value if isinstance(value, Mapping) else None


def judged(arguments: Any) -> dict[str, list[str]]:
    """Of what these `EngineArgs` ask.

    Returns:
        Text of what vLLM's own model is to serve (`vllm`), of what has no effect on ours (`unused`), and the method
        that must be the checkpoint's (`quantization`).
    """
    vllms: list[str] = []
    unused: list[str] = []
    changed: dict[str, Any] = {}  # from their defaults; of an argument with parts, the parts
    for field in fields(arguments):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        changed.update(_changed(field.name, getattr(arguments, field.name), default))
    for name, value in changed.items():
        whole, dot, part = name.partition(".")
        argument = name if known(name) else whole
        text = f"--{whole.replace('_', '-')}{dot}{part} {value!s:.60}"
        if not known(argument):
            vllms.append(f"{text}, which this version of the plugin does not know")
        elif argument in VLLMS and value not in VLLMS[argument]:
            vllms.append(text)
        elif argument in NOT_COMPILED:
            unused.append(text)
    quantization = [str(changed["quantization"])] if "quantization" in changed else []
    return {"vllm": vllms, "unused": unused, "quantization": quantization}


def noted(it: Deployment, which: str) -> list[str]:
    """What `judged` has said of the arguments that a configuration was made of."""
    notes: list[str] = it.additional.get(NOTED, {}).get(which, []) if isinstance(it.additional, dict) else []
    return notes
