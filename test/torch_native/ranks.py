"""One rank of a job: python ranks.py JOB.json RANK. Rank 0 of each replica writes tokens and logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import line
import torch
import torch.distributed as dist


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    tp, dp, ep = job["tp"], job["dp"], job["ep"]
    if tp * dp > 1:
        dist.init_process_group("gloo", init_method=f"file://{job['meeting']}", rank=rank, world_size=tp * dp)
    own, replicas = line.groups(rank, tp, dp)
    line.install(own, replicas, ep)
    raw = json.loads((Path(job["config"]) / "config.json").read_text())
    config = line.NeuronConfig(ep_degree=ep, quantization=job["quantization"])
    if job.get("sample"):
        config.on_device_sampling_config, config.max_logprobs = SimpleNamespace(all_greedy=True), -1
    hf = SimpleNamespace(to_dict=lambda: raw, dtype=job["dtype"])
    runner = line.Runner(
        Path(job["directory"]), hf, config, rank=rank % tp, padding=job["padding"], segment=job["segment"]
    )
    outputs = line.serve(runner, job["prompts"], job["wanted"])
    if rank % tp == 0:
        torch.save({"tokens": outputs, "logits": runner.logits}, f"{job['out']}.{rank // tp}")
    if tp * dp > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
