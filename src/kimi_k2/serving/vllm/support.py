"""Whether a deployment is one that our operations can serve, and if not, why: vLLM then runs as without us."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.kernels.router.gate import PACKED_EXPERTS
from kimi_k2.model.cache import kv_cache_dtype
from kimi_k2.serving.paged.heads import kernel_heads
from kimi_k2.serving.paged.support import config_of, refusal_of_gpu
from kimi_k2.serving.vllm import flags
from kimi_k2.sharding.layout import Layout, served_experts
from kimi_k2.sharding.plan import make_plan
from kimi_k2.variables import switch

ON_GPU = "KIMI_K2_VLLM_GPU"
# By vLLM's names; e4m3 holds the values as they are, at scale 1.
CACHE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
# Of vLLM's: the first is obeyed (`ops.registry`), the second changes what its own model computes.
BATCH_INVARIANT, MLA_DISABLE = "VLLM_BATCH_INVARIANT", "VLLM_MLA_DISABLE"
# Requests at once in batch-invariant mode, as many as a plan of attention takes on a GPU.
MOST_INVARIANT = 1024
# Methods of --speculative-config; None without one.
DRAFTS = (None, "ngram", "suffix", "eagle3")
# Backends of --all2all-backend; None for one replica.
EXCHANGES = (None, "allgather_reducescatter", "naive")
DECODE_GRAPHS = "KIMI_K2_VLLM_DECODE_GRAPHS"


def layout_of(vllm_config: Any) -> Layout:
    """How the ranks of a deployment share the model: experts over all of them with expert parallelism, else cut."""
    parallel = vllm_config.parallel_config
    replicas = parallel.data_parallel_size
    ranks = parallel.tensor_parallel_size * replicas
    groups = ranks if parallel.enable_expert_parallel else 1
    return Layout(moe_tp=ranks // groups, moe_ep=groups, target="cuda", experts=served_experts(), replicas=replicas)


def redundant_experts(vllm_config: Any) -> int:
    """Routed experts of a layer that are held twice, so that no rank has more tokens than others."""
    parallel = vllm_config.parallel_config
    return int(parallel.eplb_config.num_redundant_experts) if parallel.enable_eplb else 0


def cache_dtype(vllm_config: Any, config: KimiK2Config) -> torch.dtype | None:
    """Of the entries: as asked, else the checkpoint's own, else the model's; None for what ours does not write."""
    name = vllm_config.cache_config.cache_dtype
    if name == "auto":
        return kv_cache_dtype("auto", config) or vllm_config.model_config.dtype
    return CACHE_DTYPES.get(name)


def refusal(vllm_config: Any, hf_config: Any) -> str | None:
    """Why vLLM's own model is to serve this deployment; None if ours can."""
    parallel = vllm_config.parallel_config
    for reason, holds in (
        ("drafts in a pipeline", parallel.pipeline_parallel_size > 1 and _drafts(vllm_config) is not None),
        (f"an exchange of tokens by {_exchange(parallel)}", _exchange(parallel) not in EXCHANGES),
        ("context parallelism of prompts", getattr(parallel, "prefill_context_parallel_size", 1) > 1),
        *((f"decode context parallelism with {what}", holds) for what, holds in _beside_context_ranks(vllm_config)),
        ("microbatches", bool(getattr(parallel, "use_ubatching", False))),
        ("expert load balancing in a pipeline", parallel.enable_eplb and parallel.pipeline_parallel_size > 1),
        (
            f"{redundant_experts(vllm_config)} redundant experts, which do not divide among the ranks",
            redundant_experts(vllm_config) % layout_of(vllm_config).moe_ep > 0,
        ),
        ("a loader that leaves out other experts than ours", _loads_other_experts(parallel)),
        *((f"LoRA with {what}", holds) for what, holds in _beside_lora(vllm_config)),
        (f"drafts by {_drafts(vllm_config)}", _drafts(vllm_config) not in DRAFTS),
        (f"{MLA_DISABLE}={os.environ.get(MLA_DISABLE)}", _is_set(MLA_DISABLE)),
        *((f"{BATCH_INVARIANT} with {what}", holds) for what, holds in _varying(vllm_config)),
        *((argument, True) for argument in flags.noted(vllm_config, "vllm")),
    ):
        if holds:
            return reason
    try:
        config = config_of(hf_config)
        make_plan(config, layout_of(vllm_config))
    except KimiK2Error as error:
        return str(error)
    if cache_dtype(vllm_config, config) not in (vllm_config.model_config.dtype, torch.float8_e4m3fn):
        return f"a cache in {vllm_config.cache_config.cache_dtype}"
    raw = hf_config.to_dict()
    own = (raw.get("quantization_config") or raw.get("compression_config") or {}).get("quant_method")
    for method in flags.noted(vllm_config, "quantization"):
        if method != own:
            return f"--quantization {method}"
    return None if str(vllm_config.device_config.device_type) == "cpu" else _refusal_of_gpu(vllm_config, config)


def invariant() -> bool:
    """Whether a request's bits may not depend on the others."""
    return _is_set(BATCH_INVARIANT)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("0", "")


def _varying(vllm_config: Any) -> Iterator[tuple[str, bool]]:
    """With what batch-invariant mode has not been tried, or does not hold."""
    if not invariant():
        return
    most = vllm_config.scheduler_config.max_num_seqs
    yield "LoRA", vllm_config.lora_config is not None
    yield from _more_than_ranks(vllm_config)  # which copy of a balanced expert serves goes by a token's place
    yield "a transfer of caches", vllm_config.kv_transfer_config is not None
    yield f"{most} requests, more than {MOST_INVARIANT}", most > MOST_INVARIANT
    # It puts a prompt's last token among the decodes.
    yield "vLLM's second model runner", bool(getattr(vllm_config, "use_v2_model_runner", False))


def _beside_lora(vllm_config: Any) -> Iterator[tuple[str, bool]]:
    """With what LoRA has not been tried, or is not built."""
    lora = vllm_config.lora_config
    if lora is None:
        return
    yield from _more_than_ranks(vllm_config)
    for name in ("fully_sharded_loras", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"):
        yield name, bool(getattr(lora, name, False))


def _more_than_ranks(vllm_config: Any) -> Iterator[tuple[str, bool]]:
    """What beside tensor parallelism may have been asked for."""
    parallel = vllm_config.parallel_config
    yield "drafts", _drafts(vllm_config) is not None
    yield "data parallelism", parallel.data_parallel_size > 1
    yield "pipeline parallelism", parallel.pipeline_parallel_size > 1
    yield "decode context parallelism", parallel.decode_context_parallel_size > 1
    yield "expert load balancing", parallel.enable_eplb


def against_decode_steps(vllm_config: Any) -> str | None:
    """Why vLLM is to prepare all decode steps of a deployment; None if they can be ours."""
    on_gpu = str(vllm_config.device_config.device_type) == "cuda"
    for reason, holds in (
        (f"{DECODE_GRAPHS}=0", not switch(DECODE_GRAPHS, True)),
        ("eager execution", on_gpu and bool(vllm_config.model_config.enforce_eager)),
        # Others draft as many tokens as they find, another number for each request.
        (f"drafts by {_drafts(vllm_config)}", _drafts(vllm_config) not in (None, "eagle3")),
        ("LoRA", vllm_config.lora_config is not None),
        ("data parallelism", vllm_config.parallel_config.data_parallel_size > 1),
        ("pipeline parallelism", vllm_config.parallel_config.pipeline_parallel_size > 1),
        ("decode context parallelism", vllm_config.parallel_config.decode_context_parallel_size > 1),
        ("expert load balancing", vllm_config.parallel_config.enable_eplb),
        ("a transfer of caches", vllm_config.kv_transfer_config is not None),
        ("a transfer of encoders' outputs", getattr(vllm_config, "ec_transfer_config", None) is not None),
    ):
        if holds:
            return reason
    return None


def _exchange(parallel: Any) -> str | None:
    """Of tokens among data-parallel ranks."""
    return None if parallel.data_parallel_size == 1 else str(parallel.all2all_backend)


def _drafts(vllm_config: Any) -> str | None:
    """The method of a deployment's drafts."""
    speculative = vllm_config.speculative_config
    return None if speculative is None else str(speculative.method)


def _beside_context_ranks(vllm_config: Any) -> Iterator[tuple[str, bool]]:
    """With what sequences spread over ranks have not been tried, or it is not built."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return
    yield "drafts", _drafts(vllm_config) is not None
    yield "a transfer of caches", vllm_config.kv_transfer_config is not None
    how = getattr(parallel, "dcp_comm_backend", None)
    yield f"--dcp-comm-backend {how}", how not in (None, "ag_rs")
    yield "--dcp-q-replicate", bool(getattr(parallel, "dcp_q_replicate", False))


def _loads_other_experts(parallel: Any) -> bool:
    """Whether vLLM's loader gives a rank others than the consecutive experts that it holds here at first."""
    others = getattr(parallel, "expert_placement_strategy", "linear") != "linear" or parallel.enable_eplb
    return parallel.enable_expert_parallel and others and getattr(parallel, "enable_ep_weight_filter", False)


def _refusal_of_gpu(vllm_config: Any, config: KimiK2Config) -> str | None:
    """Why our kernels cannot serve."""
    if not switch(ON_GPU, True):
        return f"{ON_GPU}=0"
    experts, ranks = config.n_routed_experts, layout_of(vllm_config).dense
    heads = config.num_attention_heads // ranks
    if invariant() and experts not in PACKED_EXPERTS:
        return f"{BATCH_INVARIANT} with {experts} experts, its router takes {PACKED_EXPERTS}"
    padded = kernel_heads(heads) or heads
    if vllm_config.lora_config is not None and padded > heads:
        return f"LoRA with {heads} heads a rank, the kernels add {padded - heads} of zeros"
    together = padded * vllm_config.parallel_config.decode_context_parallel_size
    if kernel_heads(together) != together and kernel_heads(heads):
        return f"decode context parallelism of {together} heads, which the kernels do not take together"
    cache = vllm_config.cache_config
    user_set = getattr(cache, "user_specified_block_size", True)  # else the backend's pages are taken
    page = cache.block_size if user_set else None
    return refusal_of_gpu(config, ranks, vllm_config.model_config.dtype, page, _is_hopper())


def _is_hopper() -> bool:
    """As the driver's library says: asking torch would start CUDA, and vLLM's processes could not fork any more."""
    from kimi_k2.serving.vllm.adapter import current_platform

    return bool(current_platform.is_cuda() and current_platform.is_device_capability((9, 0)))
