"""Runs the tower's Triton kernels in Triton's interpreter; prints the rotation's and the norm's error to float64."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from kimi_k2.kernels.vision.rowwise import add_layer_norm, rotated_qkv

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

worst = 0.0
for tokens, size in ((4, 1152), (3, 33), (1, 8)):
    x, delta = torch.randn(2, tokens, size, generator=generator) * 3 + 1
    weight, bias = torch.randn(2, size, generator=generator)
    summed = x.double() + delta.double()
    wanted = torch.nn.functional.layer_norm(summed, (size,), weight.double(), bias.double(), 1e-5)
    for part, right in zip(add_layer_norm(x, delta, weight, bias, 1e-5), (wanted, summed), strict=True):
        worst = max(worst, float((part.double() - right).norm() / right.norm()))
print(worst)
