"""Logits beside transformers', by NxDI's own tool with its tolerances.

Needs graphs that return logits (examples/compile.py --output-logits) and KIMI_K2_GOLDEN: a file of torch.save with
`prompt`, token numbers, and `logits`, float32 [steps, 1, vocab_size], of transformers' greedy continuation.
"""

import os

import pytest
import torch

GOLDEN = os.environ.get("KIMI_K2_GOLDEN")


@pytest.mark.skipif(not GOLDEN, reason="needs KIMI_K2_GOLDEN, logits of transformers' own model")
def test_logits(app):
    from neuronx_distributed_inference.utils.accuracy import check_accuracy_logits_v2
    from transformers import GenerationConfig

    golden = torch.load(GOLDEN)
    ids = torch.tensor([golden["prompt"]])
    check_accuracy_logits_v2(
        app,
        golden["logits"],
        ids,
        torch.ones_like(ids),
        GenerationConfig(do_sample=False, pad_token_id=app.config.pad_token_id),
        num_tokens_to_check=len(golden["logits"]),
    )
