"""The router beside transformers'; the bias selects and does not weigh."""

import pytest
import torch
from tiny import TINY, application, reference


@pytest.fixture
def routers(one_rank):
    from src.moe import KimiK2Router

    own, theirs = KimiK2Router(application(TINY).config), reference().model.layers[1].mlp.gate
    own.linear_router.weight.data = theirs.weight.data.clone()
    own.e_score_correction_bias.data = theirs.e_score_correction_bias.data.clone()
    return own, theirs


@torch.inference_mode()
def test_choice_and_weights(routers):
    own, theirs = routers
    tokens = torch.randn(64, TINY["hidden_size"])
    _, weights, chosen = own(tokens)
    found = theirs(tokens[None])
    expected_chosen, expected = found if len(found) == 2 else found[-2:]
    (numbers, order), (wanted, theirs_order) = chosen.sort(dim=1), expected_chosen.sort(dim=1)
    assert torch.equal(numbers, wanted)
    torch.testing.assert_close(weights.gather(1, order), expected.float().gather(1, theirs_order))


@torch.inference_mode()
def test_the_bias_is_no_part_of_a_weight(routers):
    own, _ = routers
    tokens = torch.randn(64, TINY["hidden_size"])
    _, weights, chosen = own(tokens)
    own.e_score_correction_bias.data += 0.5  # of all alike: the same are chosen
    _, shifted, again = own(tokens)
    assert torch.equal(chosen, again)
    torch.testing.assert_close(shifted, weights)
    own.e_score_correction_bias.data[0] += 10
    _, _, forced = own(tokens)
    assert (forced == 0).any(dim=1).all()
