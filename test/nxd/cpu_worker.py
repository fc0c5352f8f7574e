"""One rank of NeuronKimiK2ForCausalLM in NxD's CPU mode: prefill, then forced decode steps; logits go to a file.

    WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 python cpu_worker.py job.json

The job names the checkpoint, the neuron config, the sequences (prompts and the tokens to force) and the output file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import environment

environment.prepare()

import torch  # noqa: E402


def build(job: dict[str, Any]) -> Any:
    """The application in CPU mode, weights loaded."""
    config_module = environment.contrib("config")
    modeling = environment.contrib("modeling_kimi_k2")
    options = dict(job["neuron_config"])
    options["torch_dtype"] = getattr(torch, options.get("torch_dtype", "float32"))
    neuron = config_module.KimiK2NeuronConfig(on_cpu=True, **options)
    config = config_module.KimiK2InferenceConfig(neuron, load_config=config_module.load_kimi_config(job["checkpoint"]))
    app = modeling.NeuronKimiK2ForCausalLM(job["checkpoint"], config)
    app.to_cpu()
    return app


@torch.inference_mode()
def run(app: Any, prompts: list[list[int]], forced: list[list[int]], arrival: list[int] | None = None) -> torch.Tensor:
    """Logits [steps, B, vocab] of the last prompt token and of each forced token.

    With `arrival` the sequences are prefilled one by one in that order, each into its own cache line (continuous
    batching); otherwise all at once.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    slots = torch.arange(width)
    mask = (slots < lengths[:, None]).to(torch.int32)
    # NxDI's convention for right padding: position 1 marks a pad.
    positions = torch.where(mask.bool(), slots.expand_as(ids), torch.ones_like(ids))
    if arrival is None:
        logits = [app(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]]
    else:
        rows: dict[int, torch.Tensor] = {}
        for row in arrival:
            line = slice(row, row + 1)
            out = app(
                input_ids=ids[line],
                attention_mask=mask[line],
                position_ids=positions[line],
                seq_ids=torch.tensor([row]),
            )
            rows[row] = out.logits[0, -1]
        logits = [torch.stack([rows[row] for row in sorted(rows)])]
    for step in range(len(forced[0])):
        at = lengths + step
        total = int(at.max()) + 1
        mask = (torch.arange(total) < at[:, None]).to(torch.int32)
        tokens = torch.tensor([[row[step]] for row in forced])
        out = app(input_ids=tokens, attention_mask=mask, position_ids=at[:, None])
        logits.append(out.logits[:, -1])
    return torch.stack(logits)


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    app = build(job)
    results = []
    for case in job["cases"]:
        app.reset()
        results.append(run(app, case["prompts"], case["forced"], case.get("arrival")))
    if torch.distributed.get_rank() == 0:
        torch.save(results, job["output"])
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
