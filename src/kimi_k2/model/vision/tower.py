"""The vision tower: patches to tokens of `merged_size` values. Module names are the checkpoint's.

Where a patch is: a learned map of positions resampled to each image's grid, frames' sinusoids, and 2D RoPE.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k2.errors import MediaError
from kimi_k2.ops.vision import Segments, add_layer_norm, gelu_linear, rotated_attention
from kimi_k2.vision_config import LAYER_NORM_EPS, Grid, VisionConfig


class PositionEmbedding(nn.Module):
    """A learned map [height, width, D], resampled bicubically, plus a sinusoid of the frame for videos."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        shape = (config.pos_emb_height, config.pos_emb_width, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """float32 [patches of all grids, D], frame by frame, row by row."""
        maps: dict[tuple[int, int], Tensor] = {}
        embeddings = []
        for grid in grids:
            size = (grid.height, grid.width)
            if size not in maps:
                maps[size] = self.resampled(size)
            if grid.frames == 1:  # an image has no time
                embeddings.append(maps[size])
            else:
                frames = time_embedding(grid.frames, self.config.hidden_size, self.weight.device)
                embeddings.append((maps[size] + frames[:, None]).flatten(0, 1))
        return torch.cat(embeddings)

    def resampled(self, size: tuple[int, int]) -> Tensor:
        """The map for a grid of `size` (height, width), in float32: [height * width, D]."""
        learned = self.weight.to(torch.float32)
        if size != tuple(learned.shape[:2]):
            # By rows, then by columns, as two GEMMs: `upsample_bicubic2d` of 1152 channels took 10 ms a map on an H200,
            # half the time of images of 448 pixels.
            height, width = learned.shape[:2]
            rows = bicubic_matrix(height, size[0], learned.device)
            columns = bicubic_matrix(width, size[1], learned.device)
            learned = torch.einsum("hi,ijd->hjd", rows, learned)
            learned = torch.einsum("wj,hjd->hwd", columns, learned)
        return learned.reshape(-1, learned.shape[-1])


@functools.lru_cache(maxsize=64)  # the host launches it more slowly than a GPU runs it, and sizes come again
def bicubic_matrix(input_size: int, wanted: int, device: torch.device) -> Tensor:
    """float32 [wanted, input_size]: `F.interpolate(mode="bicubic", align_corners=False)` of one axis, as a matrix."""
    identity = torch.eye(input_size, device=device)[None, None]
    return F.interpolate(identity, size=(wanted, input_size), mode="bicubic", align_corners=False)[0, 0]


def time_embedding(frames: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Sines, then cosines, of a frame's number at `width` / 2 frequencies from 1 to nearly 1/10000: float32 [F, D]."""
    frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width))
    angles = torch.outer(torch.arange(frames, dtype=torch.float32, device=device), frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def rotation(config: VisionConfig, grids: Sequence[Grid], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of 2D RoPE: pair 2i of a head turns with the column, pair 2i + 1 with the row.

    Returns:
        Two float32 [patches of all grids, head_dim / 2], made on the device, which so need not be waited for.
    """
    axis = config.head_dim // 2
    frequencies = 1.0 / (config.rope_theta ** (torch.arange(0, axis, 2, dtype=torch.float32, device=device) / axis))
    tables: dict[Grid, Tensor] = {}
    for grid in grids:
        if grid in tables:
            continue
        rows, columns = (torch.arange(side, dtype=torch.float32, device=device) for side in (grid.height, grid.width))
        by_row, by_column = torch.outer(rows, frequencies), torch.outer(columns, frequencies)
        shape = (grid.height, grid.width, len(frequencies))
        both = torch.stack((by_column[None].expand(shape), by_row[:, None].expand(shape)), dim=-1)
        tables[grid] = both.flatten(2).flatten(0, 1).repeat(grid.frames, 1)
    angles = torch.cat([tables[grid] for grid in grids])
    return angles.cos(), angles.sin()


# Of the last packs, 5 MB for 16384 patches: chunks of a video and equal images come again.
@functools.lru_cache(maxsize=8)
def layout(
    config: VisionConfig, grids: tuple[Grid, ...], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Segments]:
    """Angles [patches, 1, head_dim / 2] and segments of a pack, which depend on its grids alone."""
    cos, sin = rotation(config, grids, device)
    return (cos.unsqueeze(1), sin.unsqueeze(1)), Segments([grid.patches for grid in grids])


class ResidualNorm(nn.LayerNorm):
    """The norm of a residual sum."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """LayerNorm(x + delta) and x + delta, both [T, D]; without `delta` LayerNorm(x) and x."""
        if delta is None:
            normed: Tensor = super().forward(x)
            return normed, x
        return add_layer_norm(x, delta, self.weight, self.bias, self.eps)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its size, and the patch's position."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size, dtype=dtype)
        self.pos_emb = PositionEmbedding(config, dtype=dtype)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Pixels [T, 3, patch, patch] to [T, D]."""
        weight = self.proj.weight
        # Patches do not overlap, so that the convolution is one GEMM.
        x = F.linear(pixels.to(weight.dtype).flatten(1), weight.flatten(1), self.proj.bias)
        positions: Tensor = self.pos_emb(grids)
        return x + positions.to(x.dtype)


class FeedForward(nn.Module):
    """fc1(gelu_tanh(fc0(x)))."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size, dtype=dtype)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] to [T, D]."""
        out: Tensor = self.fc1(gelu_linear(x, self.fc0.weight, self.fc0.bias))
        return out


class EncoderBlock(nn.Module):
    """Pre-norm attention within each image and feed-forward, each with its residual."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.softmax_scale = config.num_attention_heads, config.head_dim**-0.5
        width = config.hidden_size
        self.norm0 = ResidualNorm(width, LAYER_NORM_EPS, dtype=dtype)
        self.wqkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.wo = nn.Linear(width, width, dtype=dtype)
        self.norm1 = ResidualNorm(width, LAYER_NORM_EPS, dtype=dtype)
        self.mlp = FeedForward(config, dtype=dtype)

    def forward(
        self, x: Tensor, delta: Tensor | None, turn: tuple[Tensor, Tensor], segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """The residual stream, whose last summand the norm after it adds: x and delta, both [T, D], to the same.

        Args:
            delta: None before the first block.
            turn: cos and sin, each float32 [T, 1, head_dim / 2].
        """
        normed, x = self.norm0(x, delta)
        normed, x = self.norm1(x, self.attend(normed, turn, segments))
        return x, self.mlp(normed)

    def attend(self, normed: Tensor, turn: tuple[Tensor, Tensor], segments: Segments) -> Tensor:
        """Attention of [T, D]; a function of its own, so that nothing of it is alive in the feed-forward."""
        qkv = self.wqkv(normed).unflatten(-1, (3, self.heads, -1))
        out: Tensor = self.wo(rotated_attention(qkv, *turn, segments, self.softmax_scale).flatten(1))
        return out


class Encoder(nn.Module):
    """All blocks and the final norm."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(config, dtype=dtype) for _ in range(config.num_hidden_layers))
        self.final_layernorm = ResidualNorm(config.hidden_size, LAYER_NORM_EPS, dtype=dtype)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], segments: Segments) -> Tensor:
        """[T, D] to [T, D]; arguments as for EncoderBlock."""
        delta: Tensor | None = None
        for block in self.blocks:
            x, delta = block(x, delta, turn, segments)
        normed: Tensor = self.final_layernorm(x, delta)[0]
        return normed


class VisionTower(nn.Module):
    """Images and video chunks of any sizes, packed one after another."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config, dtype=dtype)
        self.encoder = Encoder(config, dtype=dtype)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Tokens of the language model, before the projector.

        Args:
            pixels: [T, 3, patch, patch], normalised; grid by grid, frame by frame, row by row.
            grids: of each image or video chunk.

        Returns:
            [tokens, merge, D]: the patches that become a token, averaged over frames.

        Raises:
            MediaError: a grid is none that the tower takes, or the pixels are not those of the grids.
        """
        config = self.config
        for grid in grids:
            config.check_grid(grid)
        expected = (sum(grid.patches for grid in grids), 3, config.patch_size, config.patch_size)
        if not grids or tuple(pixels.shape) != expected:
            raise MediaError(f"pixels of {len(grids)} grids: expected {list(expected)}, got {list(pixels.shape)}")
        turn, segments = layout(config, tuple(grids), pixels.device)
        x = self.encoder(self.patch_embed(pixels, grids), turn, segments)
        return torch.cat(
            [
                merge_patches(rows, grid, config.merge_kernel_size)
                for rows, grid in zip(x.split(segments.lengths), grids, strict=True)
            ]
        )


def merge_patches(x: Tensor, grid: Grid, merge: tuple[int, int]) -> Tensor:
    """Average over frames and lay the patches of each token together: [patches, D] to [tokens, merge, D]."""
    rows, columns = merge
    cut = x.view(grid.frames, grid.height // rows, rows, grid.width // columns, columns, -1)
    pooled = cut.mean(dim=0) if grid.frames > 1 else cut[0]
    return pooled.transpose(1, 2).reshape(-1, rows * columns, x.shape[-1])
