"""Whether our operations can serve a deployment of SGLang's, and if not, why: it then runs as without us."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.kernels.attention.mla_sizes import PAGE
from kimi_k2.serving.paged.support import config_of, refusal_of_gpu
from kimi_k2.sharding.layout import Layout, engine_serves, served_experts
from kimi_k2.sharding.plan import make_plan
from kimi_k2.variables import switch

logger = logging.getLogger("sglang.kimi_k2")

# Names in SGLang that the plugin and the model's class stand on. A module whose import would be slow is read as text.
NEEDED = (
    ("sglang.srt.arg_groups.choices", "add_attention_backend_choices"),
    ("sglang.srt.model_executor.cuda_graph_config", "with_phase"),
    ("sglang.srt.arg_groups.model_override_base", "register_model_override"),
    ("sglang.srt.arg_groups.model_override_base", "resolving_view"),
    ("sglang.srt.arg_groups.overrides", "declare_resolution"),
    ("sglang.srt.arg_groups.resolution_hooks", "register_resolution_hook"),
    ("sglang.srt.runtime_context", "attention_backends"),
)
AS_TEXT = (
    ("sglang.srt.environ", "SGLANG_EXTERNAL_MODEL_PACKAGE"),
    ("sglang.srt.layers.attention.attention_registry", "def register_attention_backend("),
    ("sglang.srt.layers.attention.base_attn_backend", "def init_forward_metadata_in_graph("),
    ("sglang.srt.layers.logits_processor", "class LogitsProcessor("),
    ("sglang.srt.mem_cache.memory_pool", "class MLATokenToKVPool("),
    ("sglang.srt.model_executor.forward_context", "def get_attn_backend("),
    ("sglang.srt.models.deepseek_v2", "class DeepseekV3ForCausalLM("),
    ("sglang.srt.models.kimi_k25", "self.language_model = DeepseekV3ForCausalLM("),
)
# Fields that SGLang adds to a configuration: its own length, heads of sliding windows, which half of a model of images
# runs, and on a CPU the numbers of heads as they were.
ADDED = (
    "context_len", "swa_head_dim", "swa_v_head_dim", "encoder_only", "language_only", "language_model_only",
    "original_num_attention_heads", "original_total_num_kv_heads",
)  # fmt: skip
# The step of SGLang's resolution of settings that asks for a model's.
STEP = "handle_model_specific_adjustments"
# Classes in `models`, by SGLang's names: K2's configurations say the first, K2.5's the second.
ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
BACKEND = "kimi_k2"
PACKAGE_VARIABLE, PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE", "kimi_k2.serving.sglang.models"
ON_GPU = "KIMI_K2_SGLANG_GPU"
# For larger ones SGLang takes a Triton kernel with every backend that it does not know (`mem_cache/allocation.py`).
PAGES_ON_CPU: tuple[int | None, ...] = (None, 1)
# What of SGLang's settings our model serves: others are served by SGLang's own. Those that a version lacks are passed.
SERVED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("pipeline parallelism", "pp_size", (1,)),
    ("data parallelism", "dp_size", (1,)),
    ("data parallelism of attention", "attn_dp_size", (1,)),
    ("context parallelism", "attn_cp_size", (1,)),
    ("context parallelism of decodes", "dcp_size", (1,)),
    ("an exchange of tokens between experts", "moe_a2a_backend", ("none", None)),
    ("expert load balancing", "enable_eplb", (False,)),
    ("LoRA", "enable_lora", (None, False)),
    ("LoRA", "lora_paths", (None, [], {})),
    ("speculative decoding", "speculative_algorithm", (None,)),
    ("another form of the weights", "quantization", (None,)),
    ("another implementation of models", "model_impl", ("auto", "sglang")),
    ("another cache type than the model's", "kv_cache_dtype", ("auto",)),
    ("embeddings", "is_embedding", (None, False)),
    ("prefill apart from decode", "disaggregation_mode", ("null",)),
    ("several streams of batches", "enable_pdmux", (False,)),
    ("two batches at once", "enable_two_batch_overlap", (False,)),
    ("a cache in host memory", "enable_hierarchical_cache", (False,)),
    ("a cache in host memory", "enable_lmcache", (False,)),
    ("one pool for all memory", "enable_unified_memory", (None, False)),
    ("weights in host memory", "cpu_offload_gb", (0,)),
    ("weights in host memory", "offload_group_size", (-1, 0)),
    ("torch.compile", "enable_torch_compile", (False,)),
    ("deterministic inference", "enable_deterministic_inference", (False,)),
    ("routed experts in answers", "enable_return_routed_experts", (False,)),
    ("hidden states in answers", "enable_return_hidden_states", (False,)),
    ("hidden states of layers in answers", "enable_return_aux_hidden_states", (False,)),
    ("SGLang's megakernel", "enable_nvidia_megakernel", (False,)),
)


def layout_of(parallel: Any) -> Layout:
    """How the ranks share the model: experts shared out over `ep_size` groups of ranks, cut within each."""
    groups = parallel.ep_size
    return Layout(moe_tp=parallel.tp_size // groups, moe_ep=groups, target="cuda", experts=served_experts())


def refusal(settings: Any, hf_config: Any) -> str | None:
    """Why SGLang's own model is to serve this deployment; None if ours can.

    Args:
        settings: SGLang's, as far as they are resolved when it asks for a model's defaults.
        hf_config: of the model.
    """
    try:
        config = config_of(getattr(hf_config, "text_config", hf_config), ADDED)
        make_plan(config, layout_of(settings))
    except KimiK2Error as error:
        return str(error)
    for reason, field, served in SERVED:
        if getattr(settings, field, served[0]) not in served:
            return f"{reason} ({field})"
    if ("prefill", "backend") in getattr(settings, "_cuda_graph_config_locked", ()):
        backend = settings.cuda_graph_config.prefill.backend
        if backend != "disabled":  # whoever switches graphs off has set it too
            return f"CUDA graphs of prompts were asked for ({backend})"
    other = os.environ.get(PACKAGE_VARIABLE)
    if other not in (None, "", PACKAGE):
        return f"{PACKAGE_VARIABLE} names {other}"
    if settings.device == "cpu":
        return None if settings.page_size in PAGES_ON_CPU else f"pages of {settings.page_size} tokens on a CPU"
    return _refusal_of_gpu(settings, config)


def _refusal_of_gpu(settings: Any, config: KimiK2Config) -> str | None:
    """Why our kernels cannot serve."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.runtime_context import get_platform

    if not switch(ON_GPU, False):
        return f"a GPU, where several ranks have not been tried ({ON_GPU}=1 serves)"
    hopper = settings.device == "cuda" and get_platform().device_capability == (9, 0)
    dtype = model_config_of(settings).dtype
    return refusal_of_gpu(config, settings.tp_size, dtype, settings.page_size, hopper)


def overrides(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """The defaults of a model, which SGLang asks for: our backend, or nothing where we cannot serve."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    settings = resolving_view(server_args)
    asked = [server_args.attention_backend, server_args.prefill_attention_backend, server_args.decode_attention_backend]
    if any(name not in (None, BACKEND) for name in asked):
        reason: str | None = "another attention was asked for"
    else:
        reason = refusal(settings, hf_config)
    if reason is not None:
        engine_serves(reason)
        logger.info("kimi-k2: all operations are SGLang's: %s", reason)
        return {}
    os.environ[PACKAGE_VARIABLE] = PACKAGE  # read by the processes that serve, which are started later
    return {"attention_backend": BACKEND, **({} if settings.device == "cpu" else {"page_size": PAGE})}


def without_graphs_of_prompts(server_args: Any, previous: Callable[[Any], None]) -> None:
    """After SGLang has resolved what a model wants: our prompts are launched, as their attention is as the batch is."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    previous(server_args)
    settings = resolving_view(server_args)
    if settings.attention_backend == BACKEND:
        graphs = with_phase(settings.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(server_args, "kimi-k2", cuda_graph_config=graphs)
