"""Ways to drive the loaded application, on executed graphs in float32: what each gives beside the plain model.

python modes_worker.py CHECKPOINT OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import environment
import executed_worker
import torch
from harness import neuron_config, plain_model

SAMPLING = [[1.0, 1.0, 1.0], [5.0, 1.0, 0.7], [40.0, 0.8, 1.3], [20.0, 0.5, 1.0]]  # top_k, top_p, temperature


def loaded(checkpoint: str, tp: int, batch: int, **options: Any) -> Any:
    """An application on executed graphs."""
    chosen = {**neuron_config(tp, 1, batch, torch_dtype="float32"), "disable_argmax_kernel": True, **options}
    app = executed_worker.build({"checkpoint": checkpoint, "neuron_config": chosen})
    executed_worker.load(app)
    return app


def prefill(app: Any, tokens: list[int], line: int = 0, params: Any = None) -> Any:
    """One prompt into one cache line."""
    ids = torch.tensor([tokens])
    where = torch.arange(len(tokens))[None]
    return app(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=where,
        seq_ids=torch.tensor([line]),
        sampling_params=torch.ones(1, 3) if params is None else params,
    )


def decode(app: Any, tokens: list[list[int]], starts: list[int], lines: list[int], params: Any = None) -> Any:
    """One step of some lines; `tokens` may hold several a line."""
    ids, first = torch.tensor(tokens), torch.tensor(starts)
    mask = (torch.arange(int(first.max()) + 1) < first[:, None]).to(torch.int32)
    where = first[:, None] + torch.arange(ids.shape[1])
    return app(
        input_ids=ids,
        attention_mask=mask,
        position_ids=where,
        seq_ids=torch.tensor(lines),
        sampling_params=torch.ones(len(lines), 3) if params is None else params,
    )


def sequences(count: int, length: int) -> list[list[int]]:
    """Random tokens."""
    return torch.randint(0, 512, (count, length), generator=torch.Generator().manual_seed(3)).tolist()


def part_of_the_lines(checkpoint: str, model: Any) -> float:
    """Continuous batching: four prompts, then steps of some lines and of all, in several orders; largest difference."""
    batching = {"is_continuous_batching": True, "ctx_batch_size": 1, "tkg_batch_size": 4, "max_batch_size": 4}
    app = loaded(checkpoint, 2, 4, **batching)
    rows, at = sequences(4, 40), [9, 20, 13, 17]
    worst = 0.0
    for line in (2, 0, 3, 1):
        prefill(app, rows[line][: at[line]], line)
    for lines in ([2, 0], [2, 0], [3], [0, 1, 2, 3], [1, 3, 2], [3, 0, 2, 1], [0, 1, 2, 3]):
        out = decode(app, [[rows[n][at[n]]] for n in lines], [at[n] for n in lines], lines).logits[:, -1]
        for found, n in zip(out, lines, strict=True):
            at[n] += 1
            worst = max(worst, float((found - model(torch.tensor([rows[n][: at[n]]]))[0, -1]).abs().max()))
    return worst


def several_tokens_a_step(checkpoint: str, model: Any) -> float:
    """`speculation_length` tokens at once, and again over the positions of refused drafts; largest difference."""
    app = loaded(checkpoint, 2, 1, speculation_length=4)
    (row, drafts), worst = sequences(2, 40), 0.0
    prefill(app, row[:11])
    at = 11
    for keep in (4, 1, 2, 4):
        step = row[at : at + keep] + drafts[keep:4]  # drafts behind the accepted tokens
        out = decode(app, [step], [at], [0]).logits[0]
        expected = model(torch.tensor([row[:at] + step]))[0, at : at + 4]
        worst = max(worst, float((out - expected).abs().max()))
        at += keep
    return worst


def sampled_on_device(checkpoint: str, model: Any) -> tuple[list[int], list[int], float]:
    """Tokens by sampling parameters, what the plain logits give, and the logits' largest difference.

    NxDI's `deterministic` takes the middle of the distribution in place of a random number.
    """
    # Without the SDK's own top-k kernel, which is not Python.
    config = {"do_sample": True, "dynamic": True, "deterministic": True, "global_topk": 64}
    config["top_k_kernel_enabled"] = False
    app = loaded(checkpoint, 2, 1, on_device_sampling_config=config, output_logits=True)
    found, expected, worst = [], [], 0.0
    for params, row in zip(SAMPLING, sequences(4, 12), strict=True):
        given = torch.tensor([params])
        app.reset()
        steps = [prefill(app, row[:10], params=given)]
        steps.append(decode(app, [[row[10]]], [10], [0], given))
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
    (row,) = sequences(1, 8)
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
    modes = {
        "part_of_the_lines": part_of_the_lines,
        "several_tokens_a_step": several_tokens_a_step,
        "sampled_on_device": sampled_on_device,
        "generated": lambda *given: generated(*given, asynchronous=False),
        "generated_asynchronously": lambda *given: generated(*given, asynchronous=True),
    }
    if not environment.adapter_runs():
        chosen = chosen or [name for name in modes if not name.startswith("generated")]
    torch.save({name: mode(checkpoint, model) for name, mode in modes.items() if name in (chosen or modes)}, output)


if __name__ == "__main__":
    main()
