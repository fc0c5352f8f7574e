"""Prefill and forced decode steps through a loaded application, on gloo ranks and on executed graphs alike."""

from __future__ import annotations

from typing import Any

import environment
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
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    slots = torch.arange(width)
    mask = (slots < lengths[:, None]).to(torch.int32)
    # NxDI's convention for right padding: position 1 marks a pad.
    positions = torch.where(mask.bool(), slots.expand_as(ids), torch.ones_like(ids))
    if arrival is None:
        logits = [app(input_ids=ids, attention_mask=mask, position_ids=positions, **more).logits[:, -1]]
    else:
        rows: dict[int, torch.Tensor] = {}
        for row in arrival:
            line = slice(row, row + 1)
            out = app(
                input_ids=ids[line],
                attention_mask=mask[line],
                position_ids=positions[line],
                seq_ids=torch.tensor([row]),
                sampling_params=torch.ones(1, 3),
            )
            rows[row] = out.logits[0, -1]
        logits = [torch.stack([rows[row] for row in sorted(rows)])]
    return torch.stack([*logits, *forced_steps(app, lengths, forced, **more)])


def forced_steps(app: Any, lengths: torch.Tensor, forced: list[list[int]], **more: torch.Tensor) -> list[torch.Tensor]:
    """Logits [B, vocab] of each forced token after sequences of these lengths; `more` goes to every call."""
    logits = []
    for step in range(len(forced[0])):
        at = lengths + step
        mask = (torch.arange(int(at.max()) + 1) < at[:, None]).to(torch.int32)
        tokens = torch.tensor([[row[step]] for row in forced])
        out = app(input_ids=tokens, attention_mask=mask, position_ids=at[:, None], **more)
        logits.append(out.logits[:, -1])
    return logits


def media_of(case: dict[str, Any]) -> list[list[tuple[torch.Tensor, Grid]]]:
    """Pixels and grids of each prompt of a saved case."""
    return [[(pixels, Grid(*grid)) for pixels, grid in own] for own in case["media"]]


@torch.inference_mode()
def run_media(app: Any, case: dict[str, Any]) -> torch.Tensor:
    """Logits [steps, B, vocab] of prompts with media and of each forced token."""
    first = app.prefill(case["prompts"], media_of(case)).logits[:, -1]
    lengths = torch.tensor([len(prompt) for prompt in case["prompts"]])
    return torch.stack([first, *forced_steps(app, lengths, case["forced"])])


@torch.inference_mode()
def run_drafted(
    app: Any, prompts: list[list[int]], forced: list[list[int]], width: int, accepted: list[int]
) -> torch.Tensor:
    """The same logits from steps of `width` tokens each, of which in turn `accepted[i]` are forced and the rest drafts.

    Drafts are other tokens than the forced ones; the next step overwrites what they left in the cache.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    first = run(app, prompts, [[] for _ in prompts])
    logits, done = [first[0]], 0
    for keep in accepted:
        tokens = torch.tensor([row[done : done + width] for row in forced])
        tokens[:, keep:] = (tokens[:, keep:] + 1) % 512
        at = lengths + done
        mask = (torch.arange(int(at.max()) + 1) < at[:, None]).to(torch.int32)
        out = app(input_ids=tokens, attention_mask=mask, position_ids=at[:, None] + torch.arange(width))
        logits.extend(out.logits[:, :keep].unbind(dim=1))
        done += keep
    return torch.stack(logits)


@torch.inference_mode()
def decode_from(app: Any, start: int, forced: list[list[int]]) -> torch.Tensor:
    """Logits [steps, B, vocab] of forced tokens at positions `start` and on; the caches are full up to there."""
    logits = []
    app.kv_cache_populated = True
    for step in range(len(forced[0])):
        at = start + step
        mask = torch.ones(len(forced), at, dtype=torch.int32)
        tokens = torch.tensor([[row[step]] for row in forced])
        out = app(input_ids=tokens, attention_mask=mask, position_ids=torch.full((len(forced), 1), at))
        logits.append(out.logits[:, -1])
    return torch.stack(logits)


@torch.inference_mode()
def captured(app: Any, prompt: list[int], forced: list[int]) -> list[torch.Tensor]:
    """What each captured module gave at every position of a prompt and of forced tokens, [S, width]."""
    ids = torch.tensor([prompt])
    out = app(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(len(prompt))[None])
    found = [[tensor.reshape(-1, tensor.shape[-1])[: len(prompt)] for tensor in out.captured_tensors]]
    for at, token in enumerate(forced, start=len(prompt)):
        mask = torch.ones(1, at, dtype=torch.int32)
        out = app(input_ids=torch.tensor([[token]]), attention_mask=mask, position_ids=torch.tensor([[at]]))
        found.append([tensor.reshape(1, -1) for tensor in out.captured_tensors])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]
