"""Applications of a job, and the logits of its cases, on gloo ranks and on executed graphs alike."""

from __future__ import annotations

from typing import Any

import environment
import schedule
import torch

from kimi_k2.vision_config import Grid


def application(job: dict[str, Any], on_cpu: bool, dtype: str) -> Any:
    """The job's NeuronKimiK2ForCausalLM, not loaded; `dtype` where its neuron config names none."""
    config_module, modeling = environment.contrib("config"), environment.contrib("modeling_kimi_k2")
    options = dict(job["neuron_config"])
    options["torch_dtype"] = getattr(torch, options.get("torch_dtype", dtype))
    neuron = config_module.KimiK2NeuronConfig(on_cpu=on_cpu, **options)
    config = config_module.KimiK2InferenceConfig(neuron, load_config=config_module.load_kimi_config(job["checkpoint"]))
    return modeling.NeuronKimiK2ForCausalLM(job["checkpoint"], config)


@torch.inference_mode()
def run(
    app: Any,
    prompts: list[list[int]],
    forced: list[list[int]],
    arrival: list[int] | None = None,
    adapters: list[int] | None = None,
) -> torch.Tensor:
    """Logits [steps, B, vocab] of the last prompt token and of each forced token.

    With `arrival` the sequences are prefilled one by one in that order, each into its own cache line (continuous
    batching); otherwise all at once.
    `adapters` are the sequences' LoRA adapters.
    """
    more = {} if adapters is None else {"adapter_ids": torch.tensor(adapters)}
    if arrival is None:
        first = schedule.prompts(app, prompts, **more)
    else:
        lines = schedule.Lines(app)
        rows = {row: lines.prefill(row, prompts[row], 0)[0] for row in arrival}
        first = torch.stack([rows[row] for row in sorted(rows)])
    return torch.stack([first, *forced_steps(app, [len(prompt) for prompt in prompts], forced, **more)])


def forced_steps(app: Any, lengths: list[int], forced: list[list[int]], **more: torch.Tensor) -> list[torch.Tensor]:
    """Logits [B, vocab] of each forced token after sequences of these lengths; `more` goes to every call."""
    return [
        schedule.decode(app, [[row[step]] for row in forced], [at + step for at in lengths], **more).logits[:, -1]
        for step in range(len(forced[0]))
    ]


def media_of(case: dict[str, Any]) -> list[list[tuple[torch.Tensor, Grid]]]:
    """Pixels and grids of each prompt of a saved case."""
    return [[(pixels, Grid(*grid)) for pixels, grid in own] for own in case["media"]]


@torch.inference_mode()
def run_media(app: Any, case: dict[str, Any]) -> torch.Tensor:
    """Logits [steps, B, vocab] of prompts with media and of each forced token."""
    first = app.prefill(case["prompts"], media_of(case)).logits[:, -1]
    return torch.stack([first, *forced_steps(app, [len(prompt) for prompt in case["prompts"]], case["forced"])])


@torch.inference_mode()
def captured(app: Any, prompt: list[int], forced: list[int]) -> list[torch.Tensor]:
    """What each captured module gave at every position of a prompt and of forced tokens, [S, width]."""
    ids = torch.tensor([prompt])
    out = app(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(len(prompt))[None])
    found = [[tensor.reshape(-1, tensor.shape[-1])[: len(prompt)] for tensor in out.captured_tensors]]
    for at, token in enumerate(forced, start=len(prompt)):
        out = schedule.decode(app, [[token]], [at])
        found.append([tensor.reshape(1, -1) for tensor in out.captured_tensors])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def result(app: Any, case: dict[str, Any]) -> Any:
    """What a job's case gives: logits, or the tensors that are captured; the caches are empty, or full to `start`."""
    if "start" in case:
        app.kv_cache_populated = True
        with torch.inference_mode():
            return torch.stack(forced_steps(app, [case["start"]] * len(case["forced"]), case["forced"]))
    if "steps" in case:
        return schedule.run(app, case["steps"])
    if "capture" in case:
        return captured(app, case["capture"], case.get("forced", []))
    return run(app, case["prompts"], case["forced"], case.get("arrival"), case.get("adapters"))
