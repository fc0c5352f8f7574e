"""Ways to drive the loaded application, on executed graphs in float32: what each gives beside the plain model.

python modes_worker.py CHECKPOINT OUTPUT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environment
import schedule
import torch
import worker
from cases import drawn
from harness import neuron_config, plain_model

SAMPLING = [[1.0, 1.0, 1.0], [5.0, 1.0, 0.7], [40.0, 0.8, 1.3], [20.0, 0.5, 1.0]]  # top_k, top_p, temperature


def loaded(checkpoint: str, tp: int, batch: int, **options: Any) -> Any:
    """An application on executed graphs."""
    chosen = {**neuron_config(tp, 1, batch, torch_dtype="float32"), "disable_argmax_kernel": True, **options}
    return worker.build({"checkpoint": checkpoint, "neuron_config": chosen})


def sampled_on_device(checkpoint: str, model: Any) -> tuple[list[int], list[int], float]:
    """Tokens by sampling parameters, what the plain logits give, and the logits' largest difference.

    NxDI's `deterministic` takes the middle of the distribution in place of a random number.
    """
    # Without the SDK's own top-k kernel, which is not Python.
    config = {"do_sample": True, "dynamic": True, "deterministic": True, "global_topk": 64}
    config["top_k_kernel_enabled"] = False
    app = loaded(checkpoint, 2, 1, on_device_sampling_config=config, output_logits=True)
    found, expected, worst = [], [], 0.0
    for params, row in zip(SAMPLING, drawn(4, 12), strict=True):
        given = torch.tensor([params])
        app.reset()
        ids = torch.tensor([row[:10]])
        where = torch.arange(10)[None]
        steps = [app(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=where, sampling_params=given)]
        steps.append(schedule.decode(app, [[row[10]]], [10], sampling_params=given))
        for step, length in zip(steps, (10, 11), strict=True):
            logits = model(torch.tensor([row[:length]]))[0, -1]
            found.append(int(step.tokens.flatten()[0]))
            expected.append(middle(logits, *params))
            worst = max(worst, float((step.logits.flatten() - logits).abs().max()))
    return found, expected, worst


def middle(logits: torch.Tensor, top_k: float, top_p: float, temperature: float) -> int:
    """Top-k, temperature, then the token at half of the probability; top-p as NxDI has it, without the last token."""
    values, tokens = logits.topk(int(top_k))
    weights = (values / temperature).softmax(-1)
    kept = weights.cumsum(-1) <= max(top_p, float(weights[0]))
    kept[0] = True
    summed = weights.masked_fill(~kept, 0.0).cumsum(-1)
    return int(tokens[int((summed / summed[-1] < 0.5).sum())])


def generated(checkpoint: str, model: Any, *, asynchronous: bool) -> tuple[list[int], list[int]]:
    """Greedy text by NxDI's HuggingFaceGenerationAdapter, and by the plain model."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

    app = loaded(checkpoint, 1, 1, on_device_sampling_config={"top_k_kernel_enabled": False}, async_mode=asynchronous)
    (row,) = drawn(1, 8)
    ids = torch.tensor([row])
    out = HuggingFaceGenerationAdapter(app).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    expected = list(row)
    for _ in range(12):
        expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    return out[0].tolist(), expected


@torch.inference_mode()
def main() -> None:
    checkpoint, output, *chosen = sys.argv[1:]
    model = plain_model(Path(checkpoint))
    modes: dict[str, Callable[[str, Any], Any]] = {
        "sampled_on_device": sampled_on_device,
        "generated": lambda *given: generated(*given, asynchronous=False),
        "generated_asynchronously": lambda *given: generated(*given, asynchronous=True),
    }
    if not environment.adapter_runs():
        chosen = chosen or [name for name in modes if not name.startswith("generated")]
    torch.save({name: mode(checkpoint, model) for name, mode in modes.items() if name in (chosen or modes)}, output)


if __name__ == "__main__":
    main()
