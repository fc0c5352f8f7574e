"""The planner beside HLO that was lowered for the same preset: what `kimi-k2 compile --hlo-only` counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.files import read_json
from kimi_k2.plan.cost import decode_counts, prefill_counts
from kimi_k2.plan.deployment import CONTEXT_ENCODING, VISION_ENCODER
from kimi_k2.plan.hlo import GraphCounts
from kimi_k2.plan.target import Target
from kimi_k2.plan.vision import tower_rank_bytes, tower_rank_flops

MANIFEST = "compile.json"  # beside manifest.json, which is the converted weights'


@dataclass(frozen=True)
class GraphRow:
    """One graph: bytes read and FLOPs a rank as counted in HLO and as planned, and whether the collectives agree."""

    stage: str
    bucket: int
    bytes_counted: int
    bytes_planned: int
    flops_counted: int
    flops_planned: int
    same_collectives: bool


def against_hlo(config: KimiK2Config, target: Target, directory: Path) -> list[GraphRow]:
    """One row for each graph in `directory`'s manifest.

    Raises:
        ConfigError: there is no manifest, it is of another preset, or it has no counts (NEFFs, not HLO).
    """
    path = directory / MANIFEST
    try:
        manifest = read_json(path, ConfigError)
        made_for, artifacts = manifest["made_from"]["preset"], manifest["artifacts"].values()
    except FileNotFoundError:
        raise ConfigError("no such file; write it with kimi-k2 compile --hlo-only", file=path) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"not a manifest: {error}", file=path) from None
    if made_for != target.name:
        raise ConfigError(f"expected graphs of {target.name}, got {made_for}", field="made_from.preset", file=path)
    sharding = target.sharding(config)
    rows = []
    for graph in artifacts:
        if "weight_bytes_read" not in graph:
            continue
        if graph["stage"] == VISION_ENCODER:
            rows.append(_tower_row(config, target, graph))
            continue
        bucket, prefill = graph["bucket"], graph["stage"] == CONTEXT_ENCODING
        planned = (
            prefill_counts(config, replace(target, prompt=bucket), sharding)
            if prefill
            else decode_counts(config, target, sharding, bucket)
        )
        rows.append(
            GraphRow(
                graph["stage"], bucket, graph["weight_bytes_read"], planned.bytes_read(), graph["flops"],
                planned.flops, _counted(graph) == _planned(planned),
            )
        )  # fmt: skip
    if not rows:
        raise ConfigError("no lowered graphs in it", field="artifacts", file=path)
    return rows


def _tower_row(config: KimiK2Config, target: Target, graph: dict[str, Any]) -> GraphRow:
    """Of the tower every weight and input is read once; each block and the projector end in all-reduces."""
    ranks, patches, frames = target.tower_ranks or 1, graph["bucket"], graph["frames"]
    vision = config.vision
    assert vision is not None
    # Pixels in BF16; in four bytes a value positions, angles, the image's number and the frame's share.
    inputs = patches * (2 * 3 * vision.patch_size**2 + 4 * (vision.hidden_size + vision.head_dim + 2))
    planned = tower_rank_bytes(config, ranks, neuron=True) + inputs
    reduced = {("all-reduce", ranks): 2 * vision.num_hidden_layers + 1}
    counted: dict[tuple[str, int], int] = {}
    for one in graph["collectives"]:
        key = one["kind"], one["ranks"]
        counted[key] = counted.get(key, 0) + one["times"]
    return GraphRow(
        graph["stage"], patches, graph["weight_bytes_read"], planned, graph["flops"],
        tower_rank_flops(config, patches, frames, ranks), counted == reduced,
    )  # fmt: skip


def _counted(graph: dict[str, Any]) -> dict[tuple[str, int, int], int]:
    return {(one["kind"], one["ranks"], one["bytes"]): one["times"] for one in graph["collectives"]}


def _planned(counts: GraphCounts) -> dict[tuple[str, int, int], int]:
    return {(one.kind, one.ranks, one.nbytes): times for one, times in counts.collectives.items()}
