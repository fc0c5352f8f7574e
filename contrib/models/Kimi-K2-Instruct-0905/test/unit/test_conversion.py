"""Stored and held forms, and how ranks cut them."""

from types import SimpleNamespace

import pytest
import torch

E4M3 = torch.float8_e4m3fn
BLOCKWISE = SimpleNamespace(
    quantized=True,
    quantization_type="blockwise_symmetric",
    quantization_block_size=[64, 64],
    torch_dtype=torch.bfloat16,
)
CHANNELWISE = SimpleNamespace(quantized=True, quantization_type="expert_wise_per_channel_symmetric")


def all_codes():
    """Every finite e4m3 value, [127 * 2] as [2, 127]."""
    codes = torch.arange(256, dtype=torch.uint8)
    return codes[(codes & 0x7F) != 0x7F].view(E4M3).view(2, 127)


def test_halved_blocks_are_exact_but_for_odd_subnormals():
    from src.quantization import StoredForm, held

    weight = torch.zeros(128, 128)
    weight[:2, :127] = all_codes().float()
    stored = {"weight": weight.to(E4M3), "weight_scale_inv": torch.full((1, 1), 0.5)}
    found = held(stored, StoredForm(block=(128, 128)), BLOCKWISE)
    assert found["scale"].shape == (2, 2)
    assert torch.equal(found["scale"], torch.ones(2, 2))
    assert found["weight"].float().abs().max() == 224
    back = found["weight"].float() * 2
    off = back != weight
    assert (weight[off].abs() < 2**-5).all()
    assert ((weight[off] / 2**-9) % 2 == 1).all()
    assert int(off.sum()) == 16  # of 254 codes: the odd ones below 2^-5, of both signs


def test_int4_is_what_compressed_tensors_packs():
    from src.quantization import StoredForm, dequantized

    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (6, 64), generator=generator)
    scale = torch.rand(6, 2, generator=generator).to(torch.bfloat16)
    packed = torch.zeros(6, 8, dtype=torch.int64)
    for nibble in range(8):
        packed |= (values.view(6, 8, 8)[..., nibble] + 8) << (4 * nibble)
    words = packed.to(torch.int32) if packed.max() < 2**31 else (packed - (packed >= 2**31) * 2**32).to(torch.int32)
    stored = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([6, 64])}
    expected = values.float() * scale.float().repeat_interleave(32, dim=1)
    assert torch.equal(dequantized(stored, StoredForm(group=32)), expected)


def test_channels_end_at_240():
    from src.quantization import StoredForm, held

    plain = torch.randn(8, 32)
    plain[3] = 0
    found = held({"weight": plain}, StoredForm(), CHANNELWISE)
    assert found["scale"].shape == (8, 1)
    assert found["weight"].float().abs().max() == 240
    torch.testing.assert_close(found["weight"].float() * found["scale"], plain, rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), None])
def test_a_scale_of_another_shape_is_refused(shape):
    from src.quantization import StoredForm, dequantized

    stored = {"weight": torch.zeros(256, 128).to(E4M3)}
    if shape:
        stored["weight_scale_inv"] = torch.ones(shape)
    with pytest.raises(ValueError, match="expected"):
        dequantized(stored, StoredForm(block=(128, 128)))


@pytest.mark.parametrize("sections", [1, 2])
def test_cut_takes_each_section_by_itself(sections):
    from src.checkpoint import cut

    tensor = torch.arange(2 * 12).view(2, 12)
    pieces = [cut(tensor, 1, sections, tp_rank, 3) for tp_rank in range(3)]
    joined = [
        torch.cat([piece.chunk(sections, dim=1)[section] for piece in pieces], dim=1) for section in range(sections)
    ]
    assert torch.equal(torch.cat(joined, dim=1), tensor)
