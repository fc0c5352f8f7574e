"""Generations with a draft in the graph; tokens, acceptance and what the head drafted go to a file.

    WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 python fused_worker.py job.json

The job names a checkpoint, a head, `cpu_deployment`'s arguments, batches of prompts with parameters, and for each batch
an oracle in place of what the head drafts: replies, and the share of them that it gets wrong; or by token the one that
it drafts behind that. What the head would have drafted is noted all the same. With `executed` the graphs are lowered
and run on XLA's CPU, all ranks in this process, and NxDI's HuggingFaceGenerationAdapter speaks too.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import environment

JOB: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
EXECUTED: bool = JOB.get("executed", False)
if EXECUTED:
    os.environ["PJRT_DEVICE"] = "CPU"
    environment.prepare(cpu=False)

import torch  # noqa: E402

from kimi_k2.config import KimiK2Config  # noqa: E402
from kimi_k2.engine.sampler import SamplingParams  # noqa: E402
from kimi_k2.neuron.application import NeuronApplication, cpu_deployment  # noqa: E402
from kimi_k2.neuron.compile import build_application, draft_options  # noqa: E402
from kimi_k2.plan.deployment import Deployment, OnDeviceSampling  # noqa: E402


class Oracle:
    """Stands between a draft model and what is drafted."""

    def __init__(self, model: Any) -> None:
        self.batch: dict[str, Any] = {}
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
        made, at = own.clone(), positions[:, 0].tolist()
        for row, text in enumerate(self.batch.get("oracle", [])):
            token = text[at[row] + 2] if at[row] + 2 < len(text) else 0
            made[row] = token ^ 1 if self.random.random() < self.batch["wrong"] else token  # in the vocabulary too
        for row, token in enumerate(tokens[:, 0].tolist() if "table" in self.batch else ()):
            made[row] = self.batch["table"].get(str(token), 0)
        self.notes.append((at, own.flatten().tolist(), made.flatten().tolist()))
        return made


def load() -> NeuronApplication:
    """The application of the job."""
    sampling = OnDeviceSampling(**JOB.get("sampling", {}))
    options = {**draft_options(JOB["draft_tokens"]), **JOB.get("overrides", {})}
    if not EXECUTED:
        preset = cpu_deployment(Deployment.load(JOB["preset"]), sampling=sampling, **JOB["deployment"])
        return NeuronApplication.load(JOB["checkpoint"], preset, None, draft=JOB["draft"], **options)
    import executed

    environment.leave_out_the_kernel()  # XLA executes none
    os.environ["WORLD_SIZE"] = str(JOB["neuron_config"]["tp_degree"])
    preset = cpu_deployment(Deployment.load(JOB["preset"]), sampling=sampling, **JOB["deployment"])
    del os.environ["WORLD_SIZE"]
    config, options = KimiK2Config.from_pretrained(JOB["checkpoint"]), {**options, "disable_argmax_kernel": True}
    app = build_application(preset, config, JOB["checkpoint"], draft=JOB["draft"], **options)
    executed.load(app)
    return NeuronApplication(app, "executed graphs")


def speak(app: NeuronApplication, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """Tokens of each sequence."""
    replies: list[list[int]] = [[] for _ in prompts]
    for step in app.stream(prompts, params):
        for reply, token in zip(replies, step.tokens, strict=True):
            reply += [] if token is None else [token]
    return replies


def adapted(app: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens by NxDI's adapter, which stops where a whole step would be too many."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import GenerationConfig

    ids = torch.tensor([prompt])
    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, top_k=1, eos_token_id=[-5], pad_token_id=0)
    adapter = HuggingFaceGenerationAdapter(app)
    app.reset()
    out = adapter.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=options,
        prompt_lookup_num_tokens=app.neuron_config.speculation_length,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def wrongly_cut(app: Any) -> list[str]:
    """Tensors of the draft's loaded modules, cut by NxD, that are others than those beside converted files."""
    contrib, fused = environment.contrib("draft_config"), app.fused_spec_config
    whole = contrib.draft_state_dict(fused.draft_model_path, fused.draft_config)
    own = contrib.of_rank(whole, torch.distributed.get_rank(), app.neuron_config.tp_degree)
    held = app.models[0].model.draft_model.state_dict()
    return [name for name, tensor in own.items() if not torch.equal(tensor, held[name])]


def main() -> None:
    torch.set_num_threads(1)
    app = load()
    models = {} if EXECUTED else {id(wrapper.model): wrapper.model for wrapper in app.app.models}
    oracles = [Oracle(model.draft_model) for model in models.values()]
    answers = []
    for batch in JOB["batches"]:
        for oracle in oracles:
            oracle.batch, oracle.notes = batch, []
        params = SamplingParams(**batch["params"])
        answer: dict[str, Any] = {"replies": [], "accepted": 0, "drafted": 0}
        for _ in range(batch.get("times", 1)):
            answer["replies"] += speak(app, batch["prompts"], params)
            assert app.stats is not None
            answer["accepted"] += sum(app.stats.accepted)
            answer["drafted"] += sum(app.stats.drafted)
        if EXECUTED and environment.adapter_runs():
            answer["adapted"] = adapted(app.app, batch["prompts"][0], params.max_new_tokens)
        answers.append({**answer, "notes": [note for oracle in oracles for note in oracle.notes]})
    if not EXECUTED:
        cut: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(cut, wrongly_cut(app.app))
        answers.append({"cut": [name for names in cut for name in names]})
    if EXECUTED or torch.distributed.get_rank() == 0:
        torch.save(answers, JOB["output"])
    if not EXECUTED:
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
