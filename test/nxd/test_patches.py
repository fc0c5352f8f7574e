"""Every patch: what fails without it on real NxD, and that its guard refuses source it was not written for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import environment
import pytest
from harness import WORKER, launch, neuron_config, sequences

from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.per_channel import ChannelExperts

WITHOUT = """
import environment
environment.prepare()
patches = environment.contrib("patches")
patches.{patch}.apply = classmethod(lambda cls: None)
import worker
environment.serve(worker.answer)
"""


def run_without(patch: str, job: dict[str, Any], directory: Path) -> None:
    """The CPU worker with one patch switched off."""
    directory.mkdir(exist_ok=True)
    worker = directory / "unpatched.py"
    lines = f"import sys\nsys.path.insert(0, {json.dumps(str(WORKER.parent))})\n" + WITHOUT.format(patch=patch)
    worker.write_text(lines)
    launch(job, directory, worker=worker)


@pytest.mark.parametrize("tp", [1, 2])
def test_without_cpu_expert_groups(checkpoints: dict[str, Path], tmp_path: Path, tp: int) -> None:
    options = neuron_config(tp, 2, 1)
    job = {"checkpoint": checkpoints["bf16"], "neuron_config": options, "cases": [sequences(1, 512, steps=1)]}
    with pytest.raises(AssertionError, match=r"_mesh|NON_GROUP_MEMBER|Invalid process group|'int' object"):
        run_without("CpuExpertGroups", job, tmp_path)


def test_without_cpu_fp8_expert_gather(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    options = neuron_config(1, 1, 1, **ChannelExperts().neuron_options())
    job = {"checkpoint": checkpoints["fp8"], "neuron_config": options, "cases": [sequences(1, 512, steps=1)]}
    with pytest.raises(AssertionError, match="not implemented for 'Float8_e4m3fn'"):
        run_without("CpuFp8ExpertGather", job, tmp_path)


def test_without_cpu_expert_shard_rank(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    options = neuron_config(2, 2, 1, **ChannelExperts().neuron_options())
    job = {"checkpoint": checkpoints["fp8"], "neuron_config": options, "cases": [sequences(1, 512, steps=1)]}
    with pytest.raises(AssertionError, match="non-empty"):
        run_without("CpuExpertShardRank", job, tmp_path)


def test_upstream_still_refuses_selective_loading_under_expert_parallelism() -> None:
    """What KimiK2ExpertMLPs replaces; when upstream mends it, ours can go."""
    from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2

    environment.contrib("patches").require_source(
        ExpertMLPsV2.forward, "Selective Loading with Expert parallelism is not supported in token generation."
    )


def test_guard_names_what_is_gone() -> None:
    patches = environment.contrib("patches")
    with pytest.raises(patches.PatchError, match=r"require_source no longer contains 'no such line'"):
        patches.require_source(patches.require_source, "no such line")


def test_blocks_wider_than_a_ranks_columns_are_refused() -> None:
    tiles = environment.contrib("tiles")
    with pytest.raises(ConfigError, match=r"quantization_block_size.*64 columns .* blocks of 128"):
        tiles.BlockExperts(2, 256, 64, 128, 2, 1)
