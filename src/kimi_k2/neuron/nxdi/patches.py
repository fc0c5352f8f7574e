"""What has to be mended in NxD, each with its place upstream, a guard, and a test that fails without it.

Checked with the sources of NxD for SDK 2.28 and 2.29. Where a different arrangement of our own made a patch
unnecessary, there is none: block scales narrower than a rank are repeated for smaller blocks (quantized.py), scales are
held for each expert instead of [1, 1, W], and selective loading under expert parallelism is a subclass (experts.py).
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch

from kimi_k2.errors import KimiK2Error


class PatchError(KimiK2Error):
    """Upstream's code is not what a patch was written for."""


def require_source(owner: Any, *fragments: str) -> None:
    """Check that `owner`'s source still holds each fragment.

    Raises:
        PatchError: naming the function and the fragment that is gone.
    """
    source = inspect.getsource(owner)
    for fragment in fragments:
        if fragment not in source:
            raise PatchError(
                f"{owner.__module__}.{owner.__qualname__} no longer contains {fragment!r}; this NxD release is newer or"
                " older than those the patch was checked with (SDK 2.28, 2.29)"
            )


class CpuExpertGroups:
    """Expert-parallel process groups for gloo.

    Mends: modules/moe/moe_process_group.py:24-52 makes a group of mesh[0] only. On XLA one group carries its whole
    mesh; with gloo the ranks outside mesh[0] get no group (`GroupMember.NON_GROUP_MEMBER` has no size). And
    parallel_layers/parallel_state.py:991 reads `group._mesh`, which gloo's groups lack.
    Checked with: SDK 2.28, 2.29. Only applied in CPU mode; on Neuron upstream is right.
    """

    known_meshes: ClassVar[dict[int, list[list[int]]]] = {}  # gloo's groups take no attributes
    NAMES = (
        "_MOE_TKG_TENSOR_MODEL_PARALLEL_GROUP",
        "_MOE_TKG_EXPERT_MODEL_PARALLEL_GROUP",
        "_MOE_CTE_TENSOR_MODEL_PARALLEL_GROUP",
        "_MOE_CTE_EXPERT_MODEL_PARALLEL_GROUP",
    )

    @classmethod
    def apply(cls) -> None:
        """Replace `init_tensor_expert_parallel_moe_process_groups` where NxDI calls it."""
        from neuronx_distributed.modules.moe import moe_process_group as upstream
        from neuronx_distributed.parallel_layers import parallel_state
        from neuronx_distributed_inference.modules import moe_v2

        original = upstream.init_tensor_expert_parallel_moe_process_groups
        if getattr(original, "_kimi_k2_patch", False):
            return
        require_source(original, "tkg_ep_tp_group_mesh[0]", "cte_ep_group_mesh[0]", *cls.NAMES)
        require_source(parallel_state.get_expert_parallel_rank_from_global_rank, "expert_parallel_group._mesh")

        def init_groups(tkg_tp: int, tkg_ep: int, cte_tp: int, cte_ep: int) -> None:
            if getattr(upstream, cls.NAMES[0]) is not None:
                return
            for (tp, ep), names in (((tkg_tp, tkg_ep), cls.NAMES[:2]), ((cte_tp, cte_ep), cls.NAMES[2:])):
                meshes = cls.meshes(tp, ep)
                for name, mesh in zip(names, meshes, strict=True):
                    setattr(upstream, name, cls.own_group(mesh))

        by_mesh = parallel_state.get_expert_parallel_rank_from_global_rank

        def rank_from_global_rank(rank: int, expert_parallel_group: Any) -> int:
            for ranks in cls.known_meshes.get(id(expert_parallel_group), ()):
                if rank in ranks:
                    return ranks.index(rank)
            result: int = by_mesh(rank, expert_parallel_group)
            return result

        parallel_state.get_expert_parallel_rank_from_global_rank = rank_from_global_rank
        init_groups._kimi_k2_patch = True  # type: ignore[attr-defined]
        upstream.init_tensor_expert_parallel_moe_process_groups = init_groups
        moe_v2.init_tensor_expert_parallel_moe_process_groups = init_groups

    @staticmethod
    def meshes(tp: int, ep: int) -> tuple[list[list[int]], list[list[int]]]:
        """Ranks of the tensor-parallel and of the expert-parallel groups, by upstream's own rule."""
        from neuronx_distributed.parallel_layers.parallel_state import initialize_model_parallel

        groups = initialize_model_parallel(
            tensor_model_parallel_size=tp, expert_model_parallel_size=ep, mesh_only=True, lnc_size=1
        )
        return groups.tp_groups, groups.ep_model_groups

    @classmethod
    def own_group(cls, mesh: list[list[int]]) -> Any:
        """The group of `mesh` that this rank is in; every rank makes all of them, as torch.distributed demands."""
        rank, own = torch.distributed.get_rank(), None
        for ranks in mesh:
            group = torch.distributed.new_group(list(ranks))
            if rank in ranks:
                own = group
        cls.known_meshes[id(own)] = mesh
        return own


class CpuFp8ExpertGather:
    """Selection of FP8 experts in CPU mode.

    Mends: quantization/quantization_layers.py:1147 (QuantizedExpertFusedColumnParallel.forward). PyTorch cannot index
    FP8 on a CPU; lines 1136-1139 go round that through int8, but line 1147 indexes the FP8 weight once more.
    Checked with: SDK 2.28, 2.29. Only applied in CPU mode.
    """

    @staticmethod
    def apply() -> None:
        """Replace the forward of QuantizedExpertFusedColumnParallel."""
        from neuronx_distributed.quantization.quantization_layers import QuantizedExpertFusedColumnParallel as Upstream

        original = Upstream.forward
        if getattr(original, "_kimi_k2_patch", False):
            return
        require_source(
            original,
            "self.weight.view(torch.int8)[expert_indices, :, :].view(weight_dtype)",
            "weight = self.weight[expert_indices, ...] if expert_indices is not None else self.weight",
        )

        def forward(self: Any, input: torch.Tensor, expert_indices: torch.Tensor | None = None) -> torch.Tensor:
            if expert_indices is None or self.bias is not None:
                out: torch.Tensor = original(self, input, expert_indices)
                return out
            parameters = {name: self._parameters[name] for name in ("weight", "scale")}
            chosen = parameters["weight"].view(torch.int8)[expert_indices].view(parameters["weight"].dtype)
            self._parameters.update(weight=chosen, scale=parameters["scale"][expert_indices])
            try:
                computed: torch.Tensor = original(self, input)
                return computed
            finally:
                self._parameters.update(parameters)

        forward._kimi_k2_patch = True  # type: ignore[attr-defined]
        Upstream.forward = forward


class CpuExpertShardRank:
    """Making of quantized expert weights in CPU mode with tensor and expert parallelism together.

    Mends: parallel_layers/layers.py:96 (create_local_weight). It picks a rank's part by the rank among all
    tensor-parallel ranks, where experts are split over `moe_tp_degree` of them only: for the ranks beyond, nothing is
    left to concatenate. What it makes is overwritten when the checkpoint is loaded, for which NxD has the right rank.
    Checked with: SDK 2.28, 2.29. Only applied in CPU mode; on Neuron no weights are made.
    """

    @staticmethod
    def apply() -> None:
        """Replace `create_local_weight` where parameters are initialised."""
        from neuronx_distributed.parallel_layers import layers, parallel_state

        original = layers.create_local_weight
        if getattr(original, "_kimi_k2_patch", False):
            return
        require_source(original, "my_weight_list = weight_list[rank::world_size]")

        def create(
            full_weight: torch.Tensor,
            partition_dim: int,
            per_partition_size: int,
            stride: int,
            out_weight: torch.Tensor | None = None,
        ) -> torch.Tensor:
            parts = full_weight.shape[partition_dim] // per_partition_size
            if parts == parallel_state.get_tensor_model_parallel_size():
                return original(full_weight, partition_dim, per_partition_size, stride, out_weight)
            rank = parallel_state.get_tensor_model_parallel_rank() % parts
            pieces = torch.split(full_weight, per_partition_size // stride, dim=partition_dim)[rank::parts]
            with torch.no_grad():
                return torch.cat(pieces, dim=partition_dim, out=out_weight)

        create._kimi_k2_patch = True  # type: ignore[attr-defined]
        layers.create_local_weight = create


def apply_cpu_mode(neuron_config: Any) -> None:
    """The patches that this configuration needs in CPU mode.

    Raises:
        PatchError: upstream's code is not what a patch was written for.
    """
    if neuron_config.moe_ep_degree > 1:
        CpuExpertGroups.apply()
    if neuron_config.quantized:
        CpuFp8ExpertGather.apply()
        CpuExpertShardRank.apply()
