"""Generations of NeuronApplication, with a draft in the graph or without; what the head drafted beside the tokens.

An oracle may stand in place of what the head drafts: replies, and the share of them that it gets wrong; or by token the
one that it drafts behind that. What the head would have drafted is noted all the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import applications
import environment
import torch

from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import KimiK2Error
from kimi_k2.neuron.application import NeuronApplication

Asked = Mapping[str, Any]


class Oracle:
    """Stands between a draft model and what is drafted."""

    def __init__(self, model: Any) -> None:
        self.batch: Asked = {}
        self.random, self.notes = random.Random(1), []  # type: ignore[var-annotated]
        self._given: Sequence[torch.Tensor] = ()
        self._own = model._sample_on_device
        model._sample_on_device = self
        model.register_forward_pre_hook(lambda _, given: setattr(self, "_given", given))

    def __call__(self, *given: Any) -> torch.Tensor:
        """Of a draft pass the tokens; the position is that of the hidden state, two before the drafted token."""
        own: torch.Tensor = self._own(*given)
        tokens, _, positions, *_ = self._given
        if positions.shape[1] > 1:  # the prompt, or what was verified: nothing is drafted
            return own
        drafted, at = own.clone(), positions[:, 0].tolist()
        for row, text in enumerate(self.batch.get("oracle", [])):
            token = text[at[row] + 2] if at[row] + 2 < len(text) else 0
            drafted[row] = token ^ 1 if self.random.random() < self.batch["wrong"] else token  # in the vocabulary too
        for row, token in enumerate(tokens[:, 0].tolist() if "table" in self.batch else ()):
            drafted[row] = self.batch["table"].get(str(token), 0)
        self.notes.append((at, own.flatten().tolist(), drafted.flatten().tolist()))
        return drafted


def speak(app: NeuronApplication, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Any:
    """Tokens of each sequence, or an error's message."""
    replies: list[list[int]] = [[] for _ in prompts]
    try:
        for step in app.stream(prompts, params):
            for reply, token in zip(replies, step.tokens, strict=True):
                reply += [] if token is None else [token]
    except KimiK2Error as error:
        return str(error)
    return replies


def adapted(app: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **more: Any) -> list[list[int]]:
    """Greedy tokens by NxDI's own HuggingFaceGenerationAdapter; with drafts it stops where a step would be too many."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    ids, mask = (
        torch.tensor([[*text, *[0] * (width - len(text))] for text in rows])
        for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
    )
    ends: dict[str, Any] = {"eos_token_id": [-5], "pad_token_id": 0}
    greedy = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, top_k=1, **ends)
    app.reset()
    out = HuggingFaceGenerationAdapter(app).generate(ids, attention_mask=mask, generation_config=greedy, **more)
    found: list[list[int]] = out[:, width:].tolist()
    return found


def assisted(target: Asked, draft: Asked, prompt: list[int], new_tokens: int) -> tuple[list[int], int]:
    """A job: tokens of a target (jobs of applications.py) that a draft helps, and how many steps the target took."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

    app, steps = applications.build(target), list[int]()
    app.speculation_model.register_forward_pre_hook(lambda *_: steps.append(1))
    helper = applications.application(draft)
    helper.to_cpu()
    assistant = HuggingFaceGenerationAdapter(helper)
    assistant.generation_config.num_assistant_tokens = app.neuron_config.speculation_length
    return adapted(app, [prompt], new_tokens, assistant_model=assistant)[0], len(steps)


def by_adapter(job: Asked, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """A job of applications.py, spoken to by NxDI's adapter."""
    return adapted(applications.build(job), prompts, new_tokens)


def generations(job: Asked, batches: Sequence[Asked]) -> list[dict[str, Any]]:
    """A job: of each batch the replies, drafts, what was accepted, and the adapter's tokens where it is asked for."""
    app = NeuronApplication(applications.build(job), job["preset"])
    models = {} if environment.executed() else {id(model.model): model.model for model in app.app.models}
    oracles = [Oracle(model.draft_model) for model in models.values() if "draft" in job]
    answers = []
    for batch in batches:
        for oracle in oracles:
            oracle.batch, oracle.notes = batch, []
        params = SamplingParams(**{"ignore_eos": True, **batch["params"]})
        answer: dict[str, Any] = {"replies": [], "accepted": 0, "drafted": 0}
        for _ in range(batch.get("times", 1)):
            replies = speak(app, batch["prompts"], params)
            answer["replies"] = replies if isinstance(replies, str) else answer["replies"] + replies
            if app.stats is not None:
                answer["accepted"] += sum(app.stats.accepted)
                answer["drafted"] += sum(app.stats.drafted)
        if batch.get("adapter") and environment.adapter_runs():
            more = {"prompt_lookup_num_tokens": job["draft_tokens"] + 1} if "draft" in job else {}
            answer["adapted"] = adapted(app.app, batch["prompts"], params.max_new_tokens, **more)
        answers.append({**answer, "notes": [note for oracle in oracles for note in oracle.notes]})
    return answers
