"""The vision tower: patches to tokens of `merged_size` values. Module names are the checkpoint's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k2.errors import MediaError
from kimi_k2.model.vision.positions import PositionEmbedding, rotation
from kimi_k2.ops.vision import Segments, rotated_qkv, segment_attention
from kimi_k2.vision_config import LAYER_NORM_EPS, Grid, VisionConfig


class Affine(nn.Linear):
    """y = x W^T + b, no gradient."""

    def __init__(self, columns: int, rows: int, *, dtype: torch.dtype) -> None:
        super().__init__(columns, rows, dtype=dtype)
        self.requires_grad_(False)


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last dimension with weight and bias, no gradient."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__(size, eps=eps, dtype=dtype)
        self.requires_grad_(False)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its size, and the patch's position."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size, dtype=dtype)
        self.proj.requires_grad_(False)
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
        self.fc0 = Affine(config.hidden_size, config.intermediate_size, dtype=dtype)
        self.fc1 = Affine(config.intermediate_size, config.hidden_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] to [T, D]."""
        out: Tensor = self.fc1(F.gelu(self.fc0(x), approximate="tanh"))
        return out


class EncoderBlock(nn.Module):
    """Pre-norm attention within each image and feed-forward, each with its residual."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.softmax_scale = config.num_attention_heads, config.head_dim**-0.5
        width = config.hidden_size
        self.norm0 = LayerNorm(width, LAYER_NORM_EPS, dtype=dtype)
        self.wqkv = Affine(width, 3 * width, dtype=dtype)
        self.wo = Affine(width, width, dtype=dtype)
        self.norm1 = LayerNorm(width, LAYER_NORM_EPS, dtype=dtype)
        self.mlp = FeedForward(config, dtype=dtype)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], segments: Segments) -> Tensor:
        """[T, D] to [T, D].

        Args:
            turn: cos and sin, each float32 [T, 1, head_dim / 2].
        """
        qkv = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1))
        attended = segment_attention(*rotated_qkv(qkv, *turn), segments, self.softmax_scale)
        x = x + self.wo(attended.flatten(1))
        fed: Tensor = self.mlp(self.norm1(x))
        return x + fed


class Encoder(nn.Module):
    """All blocks and the final norm."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(config, dtype=dtype) for _ in range(config.num_hidden_layers))
        self.final_layernorm = LayerNorm(config.hidden_size, LAYER_NORM_EPS, dtype=dtype)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], segments: Segments) -> Tensor:
        """[T, D] to [T, D]; arguments as for EncoderBlock."""
        for block in self.blocks:
            x = block(x, turn, segments)
        normed: Tensor = self.final_layernorm(x)
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
        cos, sin = (part.unsqueeze(1).to(pixels.device) for part in rotation(config, grids))
        segments = Segments([grid.patches for grid in grids], pixels.device)
        x = self.encoder(self.patch_embed(pixels, grids), (cos, sin), segments)
        return torch.cat(
            [
                merge_patches(part, grid, config.merge_kernel_size)
                for part, grid in zip(x.split(segments.lengths), grids, strict=True)
            ]
        )


def merge_patches(x: Tensor, grid: Grid, merge: tuple[int, int]) -> Tensor:
    """Average over frames and lay the patches of each token together: [patches, D] to [tokens, merge, D]."""
    rows, columns = merge
    cut = x.view(grid.frames, grid.height // rows, rows, grid.width // columns, columns, -1)
    pooled = cut.mean(dim=0) if grid.frames > 1 else cut[0]
    return pooled.transpose(1, 2).reshape(-1, rows * columns, x.shape[-1])
