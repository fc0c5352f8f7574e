"""One rank of NeuronKimiK25ForConditionalGeneration in NxD's CPU mode: a mixed batch, prefill and forced decode."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import environment

environment.prepare()

import torch  # noqa: E402

from kimi_k2.vision_config import Grid  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    config_module, vision = environment.contrib("config"), environment.contrib("vision")
    options = {**job["neuron_config"], "torch_dtype": torch.float32}
    neuron = config_module.KimiK2NeuronConfig(on_cpu=True, **options)
    config = config_module.KimiK2InferenceConfig(neuron, load_config=config_module.load_kimi_config(job["checkpoint"]))
    application = environment.contrib("modeling_kimi_k25").NeuronKimiK25ForConditionalGeneration
    app = application(job["checkpoint"], config)
    app.to_cpu()
    app.load_vision([vision.VisionBucket(*bucket) for bucket in job["buckets"]])
    case = torch.load(job["case"])
    media = [[(pixels, Grid(*grid)) for pixels, grid in own] for own in case["media"]]
    logits = [app.prefill(case["prompts"], media).logits[:, -1]]
    lengths = torch.tensor([len(prompt) for prompt in case["prompts"]])
    for step in range(len(case["forced"][0])):
        at = lengths + step
        mask = (torch.arange(int(at.max()) + 1) < at[:, None]).to(torch.int32)
        tokens = torch.tensor([[row[step]] for row in case["forced"]])
        logits.append(app(input_ids=tokens, attention_mask=mask, position_ids=at[:, None]).logits[:, -1])
    if torch.distributed.get_rank() == 0:
        torch.save(torch.stack(logits), job["output"])
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
