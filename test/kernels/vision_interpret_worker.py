"""Runs the tower's Triton kernel in Triton's interpreter and prints its relative error against float64."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from kimi_k2.kernels.vision.rotate import rotated_qkv

generator = torch.Generator().manual_seed(0)
worst = 0.0
for tokens, heads, size in ((5, 16, 72), (3, 3, 16), (1, 1, 4)):
    qkv = torch.randn(tokens, 3, heads, size, generator=generator)
    angles = torch.randn(tokens, 1, size // 2, generator=generator) * 50
    pairs = torch.view_as_complex(qkv.double().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(()).double(), angles.double())[:, None]).flatten(-2)
    found = rotated_qkv(qkv.clone(), angles.cos(), angles.sin())
    for part, wanted in zip(found, (turned[:, 0], turned[:, 1], qkv[:, 2]), strict=True):
        worst = max(worst, float((part.double() - wanted).norm() / wanted.norm()))
print(worst)
