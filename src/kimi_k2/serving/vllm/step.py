"""What vLLM says of a step and of its ranks, as types of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kimi_k2.engine.batch import Batch
from kimi_k2.serving.vllm.adapter import (
    get_dcp_group,
    get_dp_group,
    get_forward_context,
    get_kv_transfer_group,
    get_pp_group,
    get_tp_group,
    has_kv_transfer_group,
    split_decodes_and_prefills,
)

GROUPS = {"tp": get_tp_group, "pp": get_pp_group, "dp": get_dp_group, "dcp": get_dcp_group}


class Group:
    """Ranks that share something.

    Args:
        kind: of `GROUPS`.

    Attributes:
        size: how many they are.
        rank: this one.
        on_host: torch.distributed's of them, whose exchanges the devices take no part in.
        on_device: likewise, of the devices.
        of: vLLM's object, for its own functions.
    """

    def __init__(self, kind: str) -> None:
        self.of = of = GROUPS[kind]()
        self.size, self.rank, self.on_host, self.on_device = (
            of.world_size, of.rank_in_group, of.cpu_group, of.device_group
        )  # fmt: skip

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' x."""
        total: Tensor = self.of.all_reduce(x)
        return total

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x [n, ...], one rank's rows behind the other's."""
        gathered: Tensor = self.of.all_gather(x.contiguous(), 0)
        return gathered

    def gather_rows(self, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Likewise of several, of each rank its own number of rows; on a GPU alone."""
        gathered: list[Tensor] = self.of.all_gatherv(tensors, 0, sizes)
        return gathered

    def scatter_rows(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """This rank's rows of the sum of all ranks'; on a GPU alone."""
        scattered: Tensor = self.of.reduce_scatterv(rows, 0, sizes)
        return scattered


def tokens_of_replicas() -> list[int]:
    """Of this step, each data-parallel rank's."""
    tokens: list[int] = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
    return tokens


def metadata_of(layer: str) -> Any:
    """What a builder made of this step for a layer; None while vLLM measures memory."""
    return (get_forward_context().attn_metadata or {}).get(layer)


class Paged(Protocol):
    """A layer's cache, which connectors know by its name."""

    name: str
    kv_cache: Tensor


def move_caches(ours: Batch, layers: Mapping[int, Paged]) -> None:
    """Where vLLM has a connector: wait for each layer's cache before its attention, and hand it over behind.

    Args:
        ours: the batch of the step.
        layers: by the layer's number.
    """
    if not has_kv_transfer_group():
        return
    found = get_kv_transfer_group()
    if found.has_connector_metadata():
        ours.before_attention = lambda number: found.wait_for_layer_load(layers[number].name)
        ours.after_attention = lambda number: found.save_kv_layer(layers[number].name, layers[number].kv_cache, ours)


@dataclass(frozen=True)
class Step:
    """One step's sequences: decodes first, then prompts.

    Attributes:
        sequences: how many.
        decodes: of these.
        rows: new tokens of the decodes.
        starts: int32 [sequences + 1], where the new tokens of each begin.
        starts_on_host: likewise, on the host.
        seq_lens: int32 [sequences], with the new tokens.
        held: int32 [sequences], of each the tokens that this rank has; None where vLLM does not say it.
        pages: int32 [sequences, pages].
        slots: int64 [new tokens], where their entries go.
        prompts: lengths of the prompts, with the new tokens.
    """

    sequences: int
    decodes: int
    rows: int
    starts: Tensor
    starts_on_host: Tensor
    seq_lens: Tensor
    held: Tensor | None
    pages: Tensor
    slots: Tensor
    prompts: list[int]


def step_of(common: Any, most: int, extended: bool) -> Step:
    """That of vLLM's metadata.

    Args:
        common: vLLM's `CommonAttentionMetadata`.
        most: new tokens of a sequence up to which it is a decode.
        extended: whether a prompt's last tokens are decodes if they are so few.
    """
    decodes, _, rows, _ = split_decodes_and_prefills(
        common, decode_threshold=most, treat_short_extends_as_decodes=extended
    )
    prompts: list[int] = []
    if decodes < common.num_reqs:
        # On a GPU reading them back waits for the device, so the host's copy is preferred: exact for prompts.
        known = getattr(common, "seq_lens_cpu_upper_bound", None)
        prompts = (common.seq_lens if known is None else known)[decodes : common.num_reqs].tolist()
    return Step(
        common.num_reqs, decodes, rows, common.query_start_loc, common.query_start_loc_cpu, common.seq_lens,
        getattr(common, "dcp_local_seq_lens", None), common.block_table_tensor, common.slot_mapping, prompts,
    )  # fmt: skip


def adapters_of_tokens(manager: Any, wrapper: Any) -> tuple[list[int], Tensor] | None:
    """Slots of each token's adapter, -1 without one: on the host, and int64 on the device; None where nobody has one.

    Args:
        manager: vLLM's, of adapters.
        wrapper: that of its kernels; None before the first adapter.
    """
    mapping = manager._last_mapping
    if mapping is None or wrapper is None:
        return None
    slots = {number: slot for slot, number in enumerate(manager.lora_index_to_id) if number is not None}
    return [slots.get(number, -1) for number in mapping.index_mapping], wrapper._token_lora_indices


def rows_of_experts(state: Any) -> list[list[int]] | None:
    """Of vLLM's state of a layer: where each expert is held, by number over all ranks, -1 for nowhere; or None."""
    maps = state.logical_to_physical_map
    rows: list[list[int]] | None = None if maps is None else maps.tolist()
    return rows


def model_in(worker: Any, kind: type[Any]) -> Any:
    """What of a worker's model is of a class; None without."""
    return next((module for module in worker.model_runner.get_model().modules() if isinstance(module, kind)), None)


def forget_adapters(worker: Any) -> None:
    """Have vLLM read adapters anew when a request asks for one."""
    worker.model_runner.lora_manager.remove_all_adapters()
