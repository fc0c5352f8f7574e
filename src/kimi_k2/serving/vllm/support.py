"""Whether a deployment is one that our operations can serve, and if not, why: vLLM then runs as without us."""

from __future__ import annotations

import os

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.kernels.attention.mla_sizes import PAGE
from kimi_k2.kernels.router.gate import PACKED_EXPERTS
from kimi_k2.model.cache import kv_cache_dtype
from kimi_k2.serving.paged.heads import kernel_heads
from kimi_k2.serving.paged.support import config_of, refusal_of_gpu
from kimi_k2.serving.vllm import flags
from kimi_k2.serving.vllm.adapter import Deployment, is_hopper
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
DRAFTS = (None, "ngram", "suffix", "eagle3", "dflash")
# Backends of --all2all-backend; None for one replica.
EXCHANGES = (None, "allgather_reducescatter", "naive")
DECODE_GRAPHS = "KIMI_K2_VLLM_DECODE_GRAPHS"
# What may be asked for beside tensor parallelism, by its name in a reason.
DRAFTED, LORA, OF_EXPERTS, TRANSFER = "drafts", "LoRA", "LoRA of routed experts", "a transfer of caches"
REPLICAS, STAGES, SPREAD = "data parallelism", "pipeline parallelism", "decode context parallelism"
BALANCED, SECOND, MANY = "expert load balancing", "vLLM's second model runner", f"more than {MOST_INVARIANT} requests"
RANKS, ROUTED = (REPLICAS, STAGES, SPREAD, BALANCED), "routed experts in answers"
LORA_FORMATS = "fully_sharded_loras", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"
# With what each has not been tried, does not hold, or is not built. A replica numbers its adapters by itself, and does
# not know the others'; which copy of a balanced expert serves goes by a token's place; the second runner puts a
# prompt's last token among the decodes; of a batch-invariant step's two phases vLLM would keep the second's experts.
AGAINST = {
    DRAFTED: (STAGES,),
    SPREAD: (DRAFTED, TRANSFER),
    BALANCED: (STAGES, ROUTED),
    LORA: (STAGES, SPREAD, BALANCED, ROUTED, *LORA_FORMATS),
    OF_EXPERTS: (REPLICAS,),
    ROUTED: (REPLICAS,),
    BATCH_INVARIANT: (LORA, DRAFTED, *RANKS, ROUTED, TRANSFER, MANY, SECOND),
}


def layout_of(it: Deployment) -> Layout:
    """How the ranks of a deployment share the model: experts over all of them with expert parallelism, else cut."""
    ranks = it.ranks * it.replicas
    groups = ranks if it.shared_out else 1
    return Layout(moe_tp=ranks // groups, moe_ep=groups, target="cuda", experts=served_experts(), replicas=it.replicas)


def redundant_experts(it: Deployment) -> int:
    """Routed experts of a layer that are held twice, so that no rank has more tokens than others."""
    return int(it.redundant) if it.balanced else 0


def cache_dtype(it: Deployment, config: KimiK2Config) -> torch.dtype | None:
    """Of the entries: as asked, else the checkpoint's own, else the model's; None for what ours does not write."""
    if it.cache == "auto":
        return kv_cache_dtype("auto", config) or it.dtype
    return CACHE_DTYPES.get(it.cache)


def refusal(it: Deployment) -> str | None:
    """Why vLLM's own model is to serve this deployment; None if ours can."""
    exchange, asked = it.exchange if it.replicas > 1 else None, _asked(it)
    joined = it.spread_joined_by if asked[SPREAD] else None
    for reason, holds in (
        *((f"{one} with {other}", asked[one] and asked[other]) for one, some in AGAINST.items() for other in some),
        (f"an exchange of tokens by {exchange}", exchange not in EXCHANGES),
        ("context parallelism of prompts", it.spread_prompts > 1),
        (f"{SPREAD} with --dcp-comm-backend {joined}", joined not in (None, "ag_rs")),
        (f"{SPREAD} with --dcp-q-replicate", asked[SPREAD] and it.spread_queries),
        ("microbatches", it.microbatches),
        (
            f"{redundant_experts(it)} redundant experts, which do not divide among the ranks",
            redundant_experts(it) % layout_of(it).moe_ep > 0,
        ),
        ("a loader that leaves out other experts than ours", _loads_other_experts(it)),
        (f"drafts by {it.drafts}", it.drafts not in DRAFTS),
        (f"{ROUTED}, as this version of vLLM asks for them", it.routed_of_old),
        (f"{MLA_DISABLE}={os.environ.get(MLA_DISABLE)}", _is_set(MLA_DISABLE)),
        *((argument, True) for argument in flags.noted(it, "vllm")),
    ):
        if holds:
            return reason
    try:
        config = config_of(it.hf)
        make_plan(config, layout_of(it))
    except KimiK2Error as error:
        return str(error)
    if cache_dtype(it, config) not in (it.dtype, torch.float8_e4m3fn):
        return f"a cache in {it.cache}"
    raw = it.hf.to_dict()
    own = (raw.get("quantization_config") or raw.get("compression_config") or {}).get("quant_method")
    for method in flags.noted(it, "quantization"):
        if method != own:
            return f"--quantization {method}"
    return None if str(it.device) == "cpu" else _refusal_of_gpu(it, config)


def invariant() -> bool:
    """Whether a request's bits may not depend on the others."""
    return _is_set(BATCH_INVARIANT)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("0", "")


def _asked(it: Deployment) -> dict[str, bool]:
    """Of what `AGAINST` names, whether it is asked for."""
    return {
        DRAFTED: it.drafts is not None, LORA: it.lora is not None, OF_EXPERTS: may_touch_experts(it),
        REPLICAS: it.replicas > 1, STAGES: it.stages > 1, SPREAD: it.spread > 1, BALANCED: bool(it.balanced),
        TRANSFER: it.transfer is not None, BATCH_INVARIANT: invariant(), MANY: it.most > MOST_INVARIANT,
        SECOND: invariant() and bool(it.second_runner), ROUTED: bool(it.routed),
        **{name: bool(getattr(it.lora, name, False)) for name in LORA_FORMATS},
    }  # fmt: skip


def may_touch_experts(it: Deployment) -> bool:
    """Whether adapters may touch routed experts: a CUDA graph can hold no step of theirs."""
    if it.lora is None:
        return False
    return it.lora_targets is None or any(name.rpartition(".")[2] == "experts" for name in it.lora_targets)


def against_decode_steps(it: Deployment) -> str | None:
    """Why vLLM is to prepare all decode steps of a deployment; None if they can be ours."""
    asked = _asked(it)
    for reason, holds in (
        (f"{DECODE_GRAPHS}=0", not switch(DECODE_GRAPHS, True)),
        ("eager execution", str(it.device) == "cuda" and it.eager),
        # Others draft as many tokens as they find, another number for each request.
        (f"drafts by {it.drafts}", it.drafts not in (None, "eagle3", "dflash")),
        *((name, asked[name]) for name in (LORA, *RANKS, ROUTED, TRANSFER)),
        ("a transfer of encoders' outputs", it.encoders_transfer is not None),
    ):
        if holds:
            return reason
    return None


def _loads_other_experts(it: Deployment) -> bool:
    """Whether vLLM's loader gives a rank others than the consecutive experts that it holds here at first."""
    others: bool = it.shared_out and it.filtered and (it.placement != "linear" or it.balanced)
    return others


def _refusal_of_gpu(it: Deployment, config: KimiK2Config) -> str | None:
    """Why our kernels cannot serve."""
    if not switch(ON_GPU, True):
        return f"{ON_GPU}=0"
    experts, ranks = config.n_routed_experts, layout_of(it).dense
    heads = config.num_attention_heads // ranks
    if invariant() and experts not in PACKED_EXPERTS:
        return f"{BATCH_INVARIANT} with {experts} experts, its router takes {PACKED_EXPERTS}"
    padded = kernel_heads(heads) or heads
    if it.lora is not None and padded > heads:
        return f"LoRA with {heads} heads a rank, the kernels add {padded - heads} of zeros"
    together = padded * it.spread
    if kernel_heads(together) != together and kernel_heads(heads):
        return f"decode context parallelism of {together} heads, which the kernels do not take together"
    # Else the backend's pages are taken; vLLM cuts larger ones into these.
    page = it.page if it.page_is_asked and it.page % PAGE else None
    return refusal_of_gpu(config, ranks, it.dtype, page, is_hopper())
