"""What neuronx-cc and the Neuron runtime are told, by stage, each with its reason.

`--internal-hlo2tensorizer-options` is not among them: NxDI's ModelWrapper appends it, for FP8 weights with
`--experimental-unsafe-fp8e4m3fn-as-fp8e4m3`, without which the compiler refuses them (NCC_EVRF051).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kimi_k2.plan.deployment import CONTEXT_ENCODING, STAGES, Deployment
from kimi_k2.plan.instructions import LONG_PROMPT, RAISED

LONG_CONTEXT = 128 * 1024


def compiler_args(deployment: Deployment, stage: str) -> list[str]:
    """Arguments of neuronx-cc for one of STAGES: the deployment's own, or NxDI's for that stage.

    Prefill is as in NxDI's ModelWrapper: -O1 and a tiling factor of 2. Decode is as there, -O2 and 1, and under expert
    parallelism as in its qwen3_moe, -O3, because the modular flow of the lower levels slows such a graph.
    """
    if stage in deployment.compiler_args:
        return list(deployment.compiler_args[stage])
    prefill, lnc = stage == CONTEXT_ENCODING, deployment.neuron_config.logical_nc_config
    # All-reduces overlap with compute, in as many pieces as the tiling factor says.
    overlap = f"--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={2 if prefill else 1}"
    # ModelWrapper leaves this out at 128k on LNC=2, where it spills too much (its NCC-6889).
    strided = not (prefill and lnc == 2 and deployment.seq_len >= LONG_CONTEXT)
    return [
        "--model-type=transformer",  # the compiler's scheduling for decoders
        "-O1" if prefill else "-O3" if deployment.moe_ep_degree > 1 else "-O2",
        "--auto-cast=none",  # the router must stay in float32
        "--enable-saturate-infinity",  # masked scores of -inf must not become NaN
        "--enable-mixed-precision-accumulation",  # float32 sums of BF16 values
        f"--lnc={lnc}",
        f"--tensorizer-options='{overlap}{' --vectorize-strided-dma' if strided else ''}'",
        # DMA descriptors for gathers by a vector of indices (selected experts), as in qwen3_moe.
        "--internal-enable-dge-levels vector_dynamic_offsets",
        # Matrix multiplies alone may be more than the compiler's 5 million instructions.
        *([RAISED] if prefill and deployment.max_context_length > LONG_PROMPT else []),
    ]


def environment(deployment: Deployment) -> dict[str, str]:
    """Variables that must be set before NxD is imported, for compilation and for loading."""
    lnc = deployment.neuron_config.logical_nc_config
    return {**runtime_environment(lnc, deployment.tp_degree), **deployment.environment}


def runtime_environment(logical_nc_config: int, ranks: int) -> dict[str, str]:
    """The same for a compiled model of which only the physical cores of a logical one and the ranks are known."""
    lnc = str(logical_nc_config)
    return {
        "NEURON_LOGICAL_NC_CONFIG": lnc,  # the runtime's side of logical_nc_config
        "NEURON_RT_VIRTUAL_CORE_SIZE": lnc,  # its older name; NxD's own tests set both
        "NEURON_RT_EXEC_TIMEOUT": "1800",  # seconds, default 30: the first execution loads 1 TB of weights
        "LOCAL_WORLD_SIZE": str(ranks),  # NxD's groups read it: of four ranks without a default, of others with 64
        "XLA_HANDLE_SPECIAL_SCALAR": "1",  # undocumented; NxD's quantized MoE tests set both for FP8 experts
        "UNSAFE_FP8FNCAST": "1",  # e4m3fn is taken for e4m3; no value above 240 is in the weights
    }


def compile_digest(deployment: Deployment) -> str:
    """Changes when anything that compilation depends on does."""
    arguments = {stage: compiler_args(deployment, stage) for stage in STAGES}
    # Deployments keep the digest that they had before there were these fields.
    absent: dict[str, Any] = {field: True for field in ("vision", "torch_native") if getattr(deployment, field) is None}
    if deployment.neuron_config.speculation_length is None:
        absent["neuron_config"] = {"speculation_length"}
    content = [deployment.model_dump(exclude=absent), arguments, environment(deployment)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
