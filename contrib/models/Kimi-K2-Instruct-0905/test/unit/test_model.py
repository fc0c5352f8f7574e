"""The whole model on a CPU beside transformers', in float32: the same tokens, logits within 2e-5."""

import pytest
import torch
from safetensors.torch import save_file
from tiny import TINY, application, reference

TOLERANCE = 2e-5


@pytest.fixture
def checkpoint(tmp_path):
    model = reference()
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    return model, str(tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize("length", [1, 2, 37], ids=["one token", "two", "37"])
def test_logits(checkpoint, one_rank, length):
    model, path = checkpoint
    app = application(TINY, path)
    app.to_cpu()
    prompt = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(length))
    tokens, rows = prompt, []
    for _ in range(8):
        first = tokens.shape[1] - 1 if rows else 0
        mask = torch.ones(1, first or length, dtype=torch.int32)
        positions = torch.arange(first, tokens.shape[1])[None]
        logits = app(input_ids=tokens[:, first:], attention_mask=mask, position_ids=positions).logits[:, -1]
        rows.append(logits)
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    expected = model(tokens[:, :-1]).logits[:, length - 1 :]
    torch.testing.assert_close(torch.stack(rows, dim=1), expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(expected.argmax(-1), tokens[:, length:])


def test_a_missing_weight_is_named(checkpoint, one_rank):
    model, path = checkpoint
    kept = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    name = "model.layers.1.self_attn.o_proj.weight"
    del kept[name]
    save_file(kept, f"{path}/model.safetensors")
    with pytest.raises(ValueError, match=f"{name}: missing"):
        application(TINY, path).to_cpu()
