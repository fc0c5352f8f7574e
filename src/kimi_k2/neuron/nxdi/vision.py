"""The vision tower of K2.5 on NxD's parallel layers, in graphs of fixed numbers of patches.

A graph takes a pack of images or of video chunks, filled up to its bucket. What depends on an image's size is computed
on the host and given as tensors: the resampled positions, the angles of RoPE, the number of each patch's image. Patches
stand in the order of the tokens that they become, frames of a token side by side, so that averaging over frames and
merging are reshapes. Heads, feed-forward and projector are split over the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn import functional as F

from kimi_k2.checkpoint.names import VISION
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, MediaError
from kimi_k2.model.vision.tower import PositionEmbedding, rotation
from kimi_k2.ops.embedding import apply_rotary_interleaved
from kimi_k2.vision_config import LAYER_NORM_EPS, Grid, VisionConfig

POSITIONS = "vision_tower.patch_embed.pos_emb.weight"


@dataclass(frozen=True)
class VisionBucket:
    """The shape of a graph.

    Attributes:
        patches: that it takes, all frames counted.
        frames: of every item: 1 for images, `pos_emb_time` for video chunks, whose missing frames are filled up.
    """

    patches: int
    frames: int = 1

    def tokens(self, config: VisionConfig) -> int:
        """Rows of the graph's result."""
        rows, columns = config.merge_kernel_size
        return self.patches // (self.frames * rows * columns)


def choose_bucket(grids: Sequence[Grid], buckets: Sequence[VisionBucket], config: VisionConfig) -> VisionBucket:
    """The smallest bucket that holds a pack.

    Raises:
        MediaError: there is none: nothing is cut off or left zero.
    """
    for grid in grids:
        config.check_grid(grid)
    longest = max(grid.frames for grid in grids)
    fitting = [
        bucket
        for bucket in buckets
        if bucket.frames >= longest and sum(padded_patches(grid, bucket) for grid in grids) <= bucket.patches
    ]
    if not fitting:
        needed = sum(grid.height * grid.width for grid in grids)
        compiled = ", ".join(f"{bucket.patches} of {bucket.frames} frames" for bucket in buckets)
        raise MediaError(f"{needed} patches of {longest} frames fit no compiled bucket ({compiled})")
    return min(fitting, key=lambda bucket: (bucket.patches, bucket.frames))


def padded_patches(grid: Grid, bucket: VisionBucket) -> int:
    """Patches of an item in a bucket, missing frames counted."""
    return bucket.frames * grid.height * grid.width


class VisionInputs:
    """Makes a graph's inputs; holds the learned positions on the host."""

    def __init__(self, config: VisionConfig, positions: Tensor) -> None:
        self.config = config
        self.embedding = PositionEmbedding(config, dtype=torch.float32)
        self.embedding.weight.data = positions.to(torch.float32)

    def __call__(self, pixels: Tensor, grids: Sequence[Grid], bucket: VisionBucket) -> tuple[Tensor, ...]:
        """Inputs of `KimiK25VisionGraph.forward`, in its order.

        Args:
            pixels: [T, 3, patch, patch], normalised, as `VisionTower.forward` takes them.

        Raises:
            MediaError: the pack does not fit the bucket, or the pixels are not the grids'.
        """
        config = self.config
        choose_bucket(grids, [bucket], config)
        if len(pixels) != sum(grid.patches for grid in grids):
            raise MediaError(f"{len(pixels)} patches for grids of {sum(grid.patches for grid in grids)}")
        size, width = bucket.patches, config.hidden_size
        cos, sin = rotation(config, grids)
        rows = torch.full((size,), -1, dtype=torch.int64)
        images = torch.zeros(size, dtype=torch.int32)  # what fills up attends to itself and is nobody's key
        shares = torch.zeros(size // bucket.frames, bucket.frames)
        first = row = 0
        for number, grid in enumerate(grids, start=1):
            count = padded_patches(grid, bucket)
            own = token_order(grid, config.merge_kernel_size, bucket.frames)
            rows[row : row + count] = torch.where(own >= 0, own + first, -1)
            images[row : row + count] = torch.where(own >= 0, number, 0)
            shares[row // bucket.frames : (row + count) // bucket.frames, : grid.frames] = 1 / grid.frames
            first, row = first + grid.patches, row + count
        there, index = (rows >= 0)[:, None], rows.clamp(min=0)

        def placed(values: Tensor) -> Tensor:
            return torch.where(there, values.flatten(1)[index], 0)

        positions: Tensor = self.embedding(grids)
        assert positions.shape[1] == width
        return placed(pixels), placed(positions), placed(cos), placed(sin), images, shares


def token_order(grid: Grid, merge: tuple[int, int], frames: int) -> Tensor:
    """For every place of an item in a graph the patch that stands there, -1 for a missing frame.

    Places go token by token, within it patch by patch of the merge, within that frame by frame.
    """
    rows, columns = merge
    numbers = torch.arange(grid.patches).view(grid.frames, grid.height // rows, rows, grid.width // columns, columns)
    ordered = numbers.permute(1, 3, 2, 4, 0).reshape(-1, grid.frames)
    return F.pad(ordered, (0, frames - grid.frames), value=-1).flatten()


class VisionBlock(nn.Module):
    """Pre-norm attention within each image and feed-forward; heads and feed-forward are this rank's share."""

    def __init__(self, config: VisionConfig, tp_degree: int, dtype: torch.dtype) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.softmax_scale = config.num_attention_heads // tp_degree, config.head_dim**-0.5
        column = {"bias": True, "gather_output": False, "dtype": dtype}
        row = {"bias": True, "input_is_parallel": True, "dtype": dtype}
        self.norm0 = nn.LayerNorm(width, eps=LAYER_NORM_EPS, dtype=dtype)
        self.q_proj = ColumnParallelLinear(width, width, **column)
        self.k_proj = ColumnParallelLinear(width, width, **column)
        self.v_proj = ColumnParallelLinear(width, width, **column)
        self.wo = RowParallelLinear(width, width, **row)
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS, dtype=dtype)
        self.fc0 = ColumnParallelLinear(width, config.intermediate_size, **column)
        self.fc1 = RowParallelLinear(config.intermediate_size, width, **row)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        """[1, N, D] to [1, N, D]; cos and sin float32 [N, 1, head_dim / 2], bias float32 [N, N]."""
        normed = self.norm0(x)
        q, k, v = (
            linear(normed)[0].unflatten(-1, (self.heads, -1)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (apply_rotary_interleaved(heads.float(), cos, sin).to(x.dtype) for heads in (q, k))
        scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)).float() * self.softmax_scale + bias
        attended = torch.matmul(scores.softmax(-1).to(x.dtype), v.transpose(0, 1)).transpose(0, 1)
        x = x + self.wo(attended.flatten(1)[None])
        out: Tensor = x + self.fc1(F.gelu(self.fc0(self.norm1(x)), approximate="tanh"))
        return out


class KimiK25VisionGraph(nn.Module):
    """Tower and projector for one bucket.

    Raises:
        ConfigError: heads, feed-forward or projector cannot be cut into `tp_degree`.
    """

    def __init__(self, config: KimiK2Config, tp_degree: int, dtype: torch.dtype) -> None:
        super().__init__()
        vision = config.vision
        if vision is None:
            raise ConfigError("missing: this member of the family takes no images", field="vision_config")
        for field in ("num_attention_heads", "intermediate_size", "merged_size"):
            if getattr(vision, field) % tp_degree:
                raise ConfigError(
                    f"{getattr(vision, field)} does not divide among {tp_degree} ranks", field=f"vision_config.{field}"
                )
        self.merge = vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
        self.dtype = dtype
        pixels, merged = 3 * vision.patch_size**2, vision.merged_size
        self.proj = nn.Linear(pixels, vision.hidden_size, dtype=dtype)
        self.blocks = nn.ModuleList(VisionBlock(vision, tp_degree, dtype) for _ in range(vision.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(vision.hidden_size, eps=LAYER_NORM_EPS, dtype=dtype)
        self.pre_norm = nn.LayerNorm(vision.hidden_size, eps=vision.projection_layer_norm_eps, dtype=dtype)
        self.in_proj = ColumnParallelLinear(merged, merged, bias=True, gather_output=False, dtype=dtype)
        self.out_proj = RowParallelLinear(merged, config.hidden_size, bias=True, input_is_parallel=True, dtype=dtype)

    def forward(
        self, pixels: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, images: Tensor, shares: Tensor
    ) -> Tensor:
        """Embeddings of a pack, [tokens, H]; rows of what fills the bucket up mean nothing.

        Args:
            pixels: [N, 3 * patch * patch]; positions: float32 [N, D].
            cos, sin: float32 [N, head_dim / 2].
            images: int32 [N], the number of each patch's image, 0 for what fills up.
            shares: float32 [N / frames, frames], weights of the frames: 1 / their number, 0 for a missing one.
        """
        x = self.proj(pixels.to(self.dtype)) + positions.to(self.dtype)
        # Patches that fill up see each other, since a row without a key would be NaN.
        apart = images[:, None] != images[None, :]
        bias = torch.where(apart, torch.finfo(torch.float32).min, 0.0).to(torch.float32)
        x, cos, sin = x[None], cos[:, None], sin[:, None]
        for block in self.blocks:
            x = block(x, cos, sin, bias)
        x = self.final_layernorm(x)[0].unflatten(0, tuple(shares.shape))
        pooled = (x * shares.to(x.dtype)[..., None]).sum(1) if shares.shape[1] > 1 else x[:, 0]
        merged = self.pre_norm(pooled).unflatten(0, (-1, self.merge)).flatten(1)
        out: Tensor = self.out_proj(F.gelu(self.in_proj(merged[None])))[0]
        return out


def input_shapes(
    config: VisionConfig, bucket: VisionBucket, pixels: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each input of a graph, in `forward`'s order."""
    count = bucket.patches
    angles = (count, config.head_dim // 2), torch.float32
    return [
        ((count, 3 * config.patch_size**2), pixels),
        ((count, config.hidden_size), torch.float32),
        angles,
        angles,
        ((count,), torch.int32),
        ((count // bucket.frames, bucket.frames), torch.float32),
    ]


def convert_vision_state_dict(stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A checkpoint's tower under the graph's names, uncut; the learned positions stay on the host."""
    state: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name == POSITIONS:
            continue
        tensor = tensor.to(dtype)
        short = name.removeprefix("vision_tower.").removeprefix("encoder.").removeprefix("mm_projector.")
        short = short.removeprefix("patch_embed.").replace("mlp.", "")
        if ".wqkv." in short:
            for projection, own in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
                state[short.replace("wqkv", projection)] = own.clone()
        elif name.startswith("mm_projector.proj."):
            state[short.replace("proj.0", "in_proj").replace("proj.2", "out_proj")] = tensor
        else:
            state[short] = tensor.flatten(1) if tensor.dim() == 4 else tensor
    return state


def load_vision(directory: str | Path, config: KimiK2Config) -> dict[str, Tensor]:
    """The tower's tensors of a checkpoint, by their own names.

    Raises:
        CheckpointError: (subclasses) one is missing, damaged or of the wrong shape.
    """
    with CheckpointReader.for_config(directory, config, vision=True) as reader:
        return {name: tensor.clone() for name, tensor in reader.stream(lambda name: VISION.match(name) is not None)}
