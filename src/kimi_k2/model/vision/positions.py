"""Where a patch is: a learned map of positions resampled to each image's grid, frames' sinusoids, and 2D RoPE."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k2.vision_config import Grid, VisionConfig


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
        parts = []
        for grid in grids:
            size = (grid.height, grid.width)
            if size not in maps:
                maps[size] = self.resampled(size)
            if grid.frames == 1:  # an image has no time
                parts.append(maps[size])
            else:
                frames = time_embedding(grid.frames, self.config.hidden_size, self.weight.device)
                parts.append((maps[size] + frames[:, None]).flatten(0, 1))
        return torch.cat(parts)

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
def bicubic_matrix(given: int, wanted: int, device: torch.device) -> Tensor:
    """float32 [wanted, given]: `F.interpolate(mode="bicubic", align_corners=False)` of one axis, as a matrix."""
    identity = torch.eye(given, device=device)[None, None]
    return F.interpolate(identity, size=(wanted, given), mode="bicubic", align_corners=False)[0, 0]


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
    made: dict[Grid, Tensor] = {}
    for grid in grids:
        if grid in made:
            continue
        rows, columns = (torch.arange(side, dtype=torch.float32, device=device) for side in (grid.height, grid.width))
        by_row, by_column = torch.outer(rows, frequencies), torch.outer(columns, frequencies)
        shape = (grid.height, grid.width, len(frequencies))
        both = torch.stack((by_column[None].expand(shape), by_row[:, None].expand(shape)), dim=-1)
        made[grid] = both.flatten(2).flatten(0, 1).repeat(grid.frames, 1)
    angles = torch.cat([made[grid] for grid in grids])
    return angles.cos(), angles.sin()
