"""AWS's kernels, unmodified, against their own torch references, at their own shapes and tolerances, on the emulator.

NKI_LIBRARY names a checkout of github.com/aws-neuron/nki-library (tried with the snapshot of 2026-04-13); scipy must be
importable. NKI_EACH raises the number of cases a test function (0: all).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nki_emulator

LIBRARY = os.environ.get("NKI_LIBRARY")
HERE = Path(__file__).parent
TESTS = "test/integration/nkilib"

# kernel: (file of theirs, which of its cases, how many of each test function)
KERNELS = {
    "attention_tkg": ("core/attention/test_attention_tkg.py", "test_attn_tkg_fast", 12),
    "cascaded_max": ("core/max/test_cascaded_max.py", "", 8),
    "cross_partition_copy": ("core/utils/test_cross_partition_copy.py", "", 6),
    "cumsum": ("core/cumsum/test_cumsum.py", "", 3),
    "find_nonzero_indices": ("core/subkernels/test_find_nonzero_indices.py", "", 2),
    "indexed_flatten": ("core/subkernels/test_indexed_flatten.py", "", 5),
    "layernorm_tkg": ("core/subkernels/test_layernorm_tkg.py", "", 5),
    "mlp_tkg": ("core/mlp/test_mlp_tkg.py", "b-1_s-1_h-2048 or b-1_s-1_h-256 or h-5120_i-128", 5),
    "moe_block_tkg": ("core/moe_block/test_moe_block_tkg.py", "im-192 and wd-float16 and not sweep", 2),
    "moe_tkg all experts": ("core/moe/moe_tkg/test_moe_tkg.py", "all_expert-1 and quant_type-0 and h-256", 3),
    "moe_tkg row-FP8": ("core/moe/moe_tkg/test_moe_tkg.py", "quant_type-2 and (h-512 or h-1024)", 3),
    "moe_tkg selective": ("core/moe/moe_tkg/test_moe_tkg.py", "all_expert-0 and quant_type-0 and h-512", 6),
    "output_projection_tkg": ("core/output_projection/test_output_proj_tkg.py", "", 3),
    "qkv_tkg": ("core/qkv/test_qkv_tkg.py", "", 2),
    "rmsnorm_quant": ("core/rmsnorm/test_rmsnorm_quant.py", "not 32768 and not 16384", 4),
    "rmsnorm_tkg": ("core/subkernels/test_rmsnorm_tkg.py", "", 6),
    "rope": ("core/embeddings/test_rope.py", "", 3),
    "rope_hf": ("core/embeddings/test_rope_hf.py", "", 5),
    "rotational_topk": ("core/topk/test_topk.py", "", 3),
    "router_topk": ("core/router_topk/test_router_topk.py", "", 20),
    "tp_broadcast": ("core/utils/test_tp_broadcast.py", "", 4),
}


def run(file: str, cases: str, each: str) -> str:
    """Run tests inside nki-library on the emulator; how many passed."""
    source = Path(nki_emulator.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    environment.setdefault("NKI_EACH", each)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "-p",
        "nki_library_plugin",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    command += ["-W", "ignore", "--rootdir=.", "-c", os.devnull, "--import-mode=importlib", "--tb=line"]
    expression = " and ".join(f"({condition})" for condition in (cases, "not model_config and not mx") if condition)
    done = subprocess.run(
        [*command, "-k", expression, file], cwd=LIBRARY, env=environment, capture_output=True, text=True
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert passed is not None, done.stdout[-3000:]
    return passed.group(0)


@pytest.mark.skipif(LIBRARY is None, reason="needs NKI_LIBRARY, a checkout of aws-neuron/nki-library")
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_of_aws(kernel: str) -> None:
    file, cases, each = KERNELS[kernel]
    print(kernel, run(f"{TESTS}/{file}", cases, str(each)))
