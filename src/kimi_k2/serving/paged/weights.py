"""A checkpoint's tensors, as an engine's loader gives them one by one, into one rank's part of the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import EXPERT, IGNORED, LAYER, beside_weights
from kimi_k2.errors import CheckpointError, MissingTensorError, TensorDtypeError, TensorShapeError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts
from kimi_k2.quantization.stored import StoredFormat, format_of, unquantized
from kimi_k2.sharding.layout import PlannedTensor, ShardingPlan
from kimi_k2.spellings import plain_name

FLOATS = {torch.bfloat16, torch.float16, torch.float32, torch.float64}


class RankLoader:
    """Copies the slices that a rank holds.

    Args:
        model: this rank's part, from `parallel.apply.parallelize`, in the checkpoint's stored form.
        plan: of all ranks.
        rank: this one.
        layers: those of the model that are here; None for all.

    Attributes:
        touched: layers some of whose weights have been replaced; whoever renews them clears it.
        held: the experts that this rank holds of a stacked tensor, by their rows.
        emptied: whether all must come again before a step.
    """

    def __init__(self, model: KimiK2ForCausalLM, plan: ShardingPlan, rank: int, layers: range | None = None) -> None:
        self.model, self.plan, self.rank = model, plan, rank
        self.planned = {tensor.name: tensor for tensor in plan.of_layers(layers)}
        self.elsewhere = {tensor.name for tensor in plan.tensors} - self.planned.keys()
        self.filled: dict[str, int] = dict.fromkeys(self.planned, 0)
        self.touched: set[int] = set()
        self.held: Callable[[PlannedTensor], Sequence[int]] = lambda planned: planned.experts_of(rank)
        self._rows: dict[int, dict[int, list[int]]] = {}
        self._parts: dict[str, dict[str, Tensor]] = {}  # of matrices that come quantized and are held in BF16
        self.emptied = False

    def forget(self) -> None:
        """Take note that nothing that came is there any more."""
        self.filled = dict.fromkeys(self.filled, 0)
        self.emptied = True

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take tensors by their names in the checkpoint.

        Returns:
            Names, in the model, of what is filled so far.

        Raises:
            CheckpointError: (subclasses) a tensor that the model lacks, or of another shape or dtype.
        """
        self._rows.clear()  # they may have been moved
        for name, tensor in weights:
            plain = plain_name(name)
            module, _, suffix = plain.rpartition(".")
            source = format_of(self.plan.config.quantization, module)
            if IGNORED.search(plain) or suffix in source.implied or beside_weights(source, plain):
                continue
            if source.method is not None and format_of(self.model.config.quantization, module).method is not None:
                source = unquantized()  # comes as it is held
            held, expert = plain if source.method is None else f"{module}.weight", EXPERT.match(plain)
            if expert is not None:
                kind = expert["kind"].removeprefix("weight") if source.method is None else ""
                target = "down_proj" if expert["proj"] == "down_proj" else "gate_up_proj"
                held = f"{expert['moe']}.experts.{target}{kind}"
            if held in self.elsewhere:
                continue
            planned = self.planned.get(held)
            if planned is None:
                raise CheckpointError("no such tensor in this model", tensor=name)
            rows = () if expert is None else self._rows_of(planned).get(int(expert["expert"]), ())
            if expert is not None and not rows:
                continue
            whole = self._whole(plain, tensor, source, planned.dtype)
            if whole is not None and expert is not None:
                self._expert(plain, whole, planned, expert["proj"], rows)
            elif whole is not None:
                self._copy(held, self._local(held), _cut(planned, whole, self.rank, held), held)
        return {name for name, count in self.filled.items() if count}

    def check(self) -> None:
        """Refuse a model of which a part has come and another is missing, or anything that has been emptied.

        Raises:
            MissingTensorError: naming the first.
        """
        if not self.emptied and not any(self.filled.values()):  # an engine's random weights
            return
        for name, planned in self.planned.items():
            # Experts come one by one, gate and up apart.
            expected = len(self.held(planned)) * (2 if "gate_up_proj" in name else 1) if ".experts." in name else 1
            if self.filled[name] < expected:
                raise MissingTensorError(f"{self.filled[name]} of {expected} parts came", tensor=name)
        self.emptied = False

    def _whole(self, name: str, tensor: Tensor, source: StoredFormat, dtype: torch.dtype) -> Tensor | None:
        """The tensor as it is held: of what comes quantized the matrix, once the last of its tensors is there."""
        if source.method is None:
            return tensor
        module, _, suffix = name.rpartition(".")
        if suffix not in source.suffixes:
            raise CheckpointError("no such tensor in this model", tensor=name)
        came = self._parts.setdefault(module, {})
        came[suffix] = tensor
        if set(source.suffixes).difference(source.implied, came):
            return None
        return source.dequantize(self._parts.pop(module), dtype)

    def _local(self, name: str) -> Tensor:
        module, _, suffix = name.rpartition(".")
        tensor: Tensor = getattr(self.model.get_submodule(module), suffix)
        return tensor

    def _copy(self, name: str, target: Tensor, values: Tensor, planned: str) -> None:
        if target.shape != values.shape:
            raise TensorShapeError(f"is {list(values.shape)} on a rank, expected {list(target.shape)}", tensor=name)
        # Rounding to another float is the engine's --dtype; anything else would be another number.
        if target.dtype != values.dtype and not {target.dtype, values.dtype} <= FLOATS:
            raise TensorDtypeError(f"is {values.dtype}, expected {target.dtype}", tensor=name)
        if (layer := LAYER.match(name)) is not None:
            self.touched.add(int(layer[1]))
        target.copy_(values)
        self.filled[planned] += 1

    def _expert(
        self, name: str, whole: Tensor, planned: PlannedTensor, projection: str, expert_rows: Sequence[int]
    ) -> None:
        """Into an expert's rows of the stacked tensor."""
        experts = self.model.get_submodule(planned.name.rpartition(".")[0])
        assert isinstance(experts, Experts)
        experts.restore()
        rows = planned.shape[1] // (1 if projection == "down_proj" else 2)
        tensor = _in_rows(whole, (rows, *planned.shape[2:]))
        if planned.dim is not None:
            dim, ranks = planned.dim - 1, planned.parts
            width = tensor.shape[dim] // ranks
            tensor = tensor.narrow(dim, self.rank % ranks * width, width)
        for row in expert_rows:
            local = self._local(planned.name)[row]
            half = local.shape[0] // 2
            local = {"gate_proj": local[:half], "up_proj": local[half:], "down_proj": local}[projection]
            self._copy(name, local, tensor, planned.name)

    def _rows_of(self, planned: PlannedTensor) -> dict[int, list[int]]:
        """By expert that is here its rows in the stacked tensors of a layer."""
        rows = self._rows.get(planned.layer)
        if rows is None:
            rows = self._rows[planned.layer] = {}
            for row, expert in enumerate(self.held(planned)):
                rows.setdefault(expert, []).append(row)
        return rows


def _in_rows(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A scale of a whole matrix (NVFP4's) as ranks hold it, once a row; else the tensor."""
    return tensor.expand(shape) if tensor.numel() == 1 == shape[-1] else tensor


def _cut(planned: PlannedTensor, tensor: Tensor, rank: int, name: str) -> Tensor:
    tensor = _in_rows(tensor, planned.shape)
    if tuple(tensor.shape) != planned.shape:
        raise TensorShapeError(f"is {list(tensor.shape)}, expected {list(planned.shape)}", tensor=name)
    regions = [tensor[region] for region in planned.regions(rank)]
    return regions[0] if len(regions) == 1 else torch.cat(regions, dim=planned.dim or 0)
