"""Assisted decoding by NxDI's HuggingFaceGenerationAdapter in CPU mode: a target with steps of several tokens, a draft.

    WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 python assisted_worker.py job.json

The job is worker.py's, with `draft` (a checkpoint), `prompt` and `new_tokens`; the answer holds the generated
tokens and how many steps the target took.
"""

from __future__ import annotations

from typing import Any

import environment
import torch
import worker


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Tokens of the target, helped by the draft."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

    target = worker.build(job)
    options = {name: value for name, value in job["neuron_config"].items() if name != "speculation_length"}
    draft = worker.build({**job, "checkpoint": job["draft"], "neuron_config": options})
    steps = []
    target.speculation_model.register_forward_pre_hook(lambda *_: steps.append(1))
    assistant = HuggingFaceGenerationAdapter(draft)
    assistant.generation_config.num_assistant_tokens = target.neuron_config.speculation_length
    ids = torch.tensor([job["prompt"]])
    out = HuggingFaceGenerationAdapter(target).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=job["new_tokens"],
        do_sample=False,
        assistant_model=assistant,
        eos_token_id=[511],
        pad_token_id=0,
    )
    return {"tokens": out[0].tolist(), "steps": len(steps)}


if __name__ == "__main__":
    environment.serve(generate)
