"""TPOT and TTFT on one GPU or, under torchrun, on several: from pre-sharded files, or with synthetic weights."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from kimi_k2.config import KimiK2Config
from kimi_k2.kernels.bench.model import launches, make_step, synthetic_rank, time_prefill, time_step
from kimi_k2.ops import registry
from kimi_k2.parallel.load import load_rank
from kimi_k2.parallel.ranks import join_ranks, leave_ranks, world_size
from kimi_k2.sharding.layout import Layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="configs/h200-*.yaml")
    parser.add_argument(
        "--config", default="kimi-k2-instruct-0905", help="directory with config.json, or a preset's name"
    )
    parser.add_argument("--weights", type=Path, help="output of convert --target cuda; without: synthetic")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has; the total is then extrapolated")
    parser.add_argument("--stand-in", action="store_true", help="one GPU as rank 0 of the target, nothing is sent")
    parser.add_argument("--batch", type=int, help="sequences, instead of the target's")
    parser.add_argument("--context", type=int, help="cached tokens, instead of the target's")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prefill that TTFT is of; 0 for none")
    parser.add_argument("--kernels", help="op=name,…: pins, as KIMI_K2_KERNELS")
    parser.add_argument("--verbose", action="store_true", help="print the chosen kernels")
    parser.add_argument("--launches", action="store_true", help="print what one step launches, by time")
    arguments = parser.parse_args()
    if arguments.kernels:
        registry.pin(arguments.kernels)
    target = yaml.safe_load(arguments.target.read_text())
    layout = Layout(target["moe_tp"], target["moe_ep"], target="cuda", experts="stored")
    config = KimiK2Config.load(arguments.config)
    whole = config.num_hidden_layers
    config = config.model_copy(update={"num_hidden_layers": arguments.layers or whole})
    rank, _ = join_ranks("cuda")
    communicate = not arguments.stand_in and layout.ranks > 1
    if communicate and world_size() != layout.ranks:
        parser.error(f"the target has {layout.ranks} ranks: torchrun --nproc-per-node {layout.ranks}, or --stand-in")
    if arguments.weights:
        model = load_rank(arguments.weights, config, layout, rank, device="cuda")
    else:
        model = synthetic_rank(config, layout, rank, communicate=communicate)
    batch, context = arguments.batch or target["batch_size"], arguments.context or target["context"]
    times = time_step(model, batch, context, communicate=communicate)
    ttft, prefill_layer = time_prefill(model, batch, arguments.prompt) if arguments.prompt else (0.0, 0.0)
    lines = launches(make_step(model, batch, context, communicate=communicate)) if arguments.launches else []
    if rank == 0:
        print("\n".join(times.lines()))
        missing = whole - config.num_hidden_layers
        if missing:
            print(f"extrapolated: TPOT {(times.step + missing * times.moe_layer) / 1e3:.3f} ms over {whole} layers")
        if arguments.prompt:
            each = f"MoE layer {prefill_layer / 1e3:.3f} ms"
            print(f"measured: TTFT {ttft / 1e3:.2f} ms of {arguments.prompt} tokens, {each}")
            if missing:
                print(f"extrapolated: TTFT {(ttft + missing * prefill_layer) / 1e3:.1f} ms over {whole} layers")
        print("\n".join(lines), end="\n" if lines else "")
        if arguments.verbose:
            print(registry.explain())
    leave_ranks()


if __name__ == "__main__":
    main()
