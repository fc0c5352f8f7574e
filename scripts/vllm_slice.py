"""vLLM's own model beside ours on one GPU, on a rank's slice of Kimi-K2 with random weights, timed by `vllm bench`.

    python scripts/vllm_slice.py fp8 DIRECTORY --layers 12
    python scripts/vllm_slice.py int4 DIRECTORY --requests 2 40 --contexts 10240 --prompts 10240
    python scripts/vllm_slice.py fp8 DIRECTORY --layers 6 --ranks 2 --engine '{"enable_expert_parallel": true}'

The engines run one after the other, each in a process that makes it once. `vllm bench latency` gives the seconds of a
batch: the TPOT is what more tokens of the same batch take once all requests decode, the TTFT that of one token.
DIRECTORY keeps its JSON files and each engine's log. Needs vLLM, this package and GPUs that hold the slice (12 layers:
33 GB with the cache of 64 requests of 8k).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.compressed_tensors import CompressedFormat
from kimi_k2.quantization.int4_group import DEFAULT_INT4_IGNORE
from kimi_k2.synthetic.config import hf_config, with_format

PLUGINS = {"stock": "kimi_k2_parsers", "ours": "kimi_k2"}
# DeepGEMM's own warm-up goes through all sizes one by one; FlashInfer's sampler is not part of the comparison.
SETTINGS = {"VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
# One of eight tensor-parallel ranks; the head's rows too.
SLICE = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 256, "intermediate_size": 2304,
    "vocab_size": 20480, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
CHUNK, TIMED = 8192, 96  # tokens of a prefill step; tokens of a request that a TPOT is of


def fill(name: str, tensor: torch.Tensor) -> None:
    """Values of a trained model's size, so that routing is about uniform; vLLM's own choose the same experts always."""
    last = name.rpartition(".")[2]
    if (
        tensor.dtype in (torch.float8_e4m3fn, torch.uint8) and "scale" in last
    ):  # a group's: 1, and all's is 128, or 2^-7
        tensor.view(torch.uint8).fill_(0x38 if tensor.is_floating_point() else 120)
    elif tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)  # below 2, no NaN
    elif "packed" in last and not tensor.is_floating_point():
        tensor.view(torch.uint8).random_(0, 256)
    elif not tensor.is_floating_point() or "rotary" in name or "cos" in name or "inv_freq" in name:
        return
    elif "e_score_correction_bias" in name:
        tensor.normal_(0, 0.01)
    elif "global_scale" in last:
        tensor.fill_(128)
    elif "scale" in last:
        tensor.fill_(0.02 if tensor.dtype == torch.float32 else 0.0025)
    elif "norm" in name:
        tensor.fill_(1)
    elif any(word in last for word in ("weight", "proj", "bias")):
        tensor.normal_(0, 0.02)


def load_weights(self: object, model: torch.nn.Module, model_config: object) -> None:
    """Fill every weight; those of our model are no submodule's."""
    module = getattr(model, "plain", model)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not tensor.is_meta:
                fill(name, tensor.data)


def replace_loader() -> None:
    """Ours in place of vLLM's loader of random weights; in the engine's process too."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = load_weights


def write_model(directory: Path, args: argparse.Namespace) -> KimiK2Config:
    """A directory with the configuration of a slice."""
    widths = {name: size if name.endswith("token_id") else size * args.ranks for name, size in SLICE.items()}
    whole = with_format(KimiK2Config.load("kimi-k2-instruct-0905"), args.experts)
    scheme = whole.quantization
    if isinstance(scheme, CompressedFormat):
        scheme = scheme.model_copy(update={"ignore": DEFAULT_INT4_IGNORE})
    config = whole.model_copy(update={**widths, "num_hidden_layers": args.layers, "quantization": scheme})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(config)))
    return config


def latency(directory: Path, config: KimiK2Config, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """What is timed and its milliseconds, by `vllm bench latency` in this process, with one engine for all."""
    from vllm import LLM
    from vllm.benchmarks import latency as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    longest = max([*args.contexts, *args.prompts])
    engine: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": longest + 4 * TIMED + max(args.requests) * longest // CHUNK,
        "max_num_seqs": max(args.requests), "max_num_batched_tokens": CHUNK, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": args.pages * 64 * config.cache_dim * 2 * config.num_hidden_layers,
        "compilation_config": {"cudagraph_capture_sizes": sorted({1, *args.requests})},
    } | args.engine  # fmt: skip
    fixed = ["--model", str(directory), "--load-format", "dummy", "--skip-tokenizer-init", "--trust-remote-code"]
    fixed += ["--disable-detokenize", "--tensor-parallel-size", str(args.ranks)]
    for name, value in engine.items():
        flag = f"--{name.replace('_', '-')}"
        fixed += [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    start, engines = LLM.from_engine_args, list[Any]()

    def once(arguments: Any) -> Any:
        engines.extend([] if engines else [start(arguments)])
        return engines[0]

    LLM.from_engine_args = once

    def seconds(batch: int, tokens: int, new: int) -> float:
        out = directory / f"{batch}-{tokens}-{new}.json"
        sizes = {"batch-size": batch, "input-len": tokens, "output-len": new, "num-iters": 5, "num-iters-warmup": 2}
        bench.main(parser.parse_args([*fixed, "--output-json", str(out), *(f"--{k}={v}" for k, v in sizes.items())]))
        taken: list[float] = json.loads(out.read_text())["latencies"]
        return min(taken)  # a batch's parts differ from time to time, and new sizes are compiled then

    for tokens in args.contexts:
        for batch in args.requests:
            few = batch * tokens // CHUNK + 16  # by then the last request decodes
            more = seconds(batch, tokens, few + TIMED) - seconds(batch, tokens, few)
            yield f"TPOT of {batch} at {tokens}", more / TIMED * 1e3
    for tokens in args.prompts:
        yield f"TTFT of {tokens} tokens", seconds(1, tokens, 1) * 1e3


def table(args: argparse.Namespace) -> Iterator[str]:
    """Both engines, one after the other; a line for each figure: stock / ours, and how much faster ours is."""
    figures = []
    for name, plugin in PLUGINS.items():
        directory = args.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "log").open("w") as log:
            environment = {**os.environ, **SETTINGS, "VLLM_PLUGINS": plugin}
            command = [sys.executable, *sys.argv, "--engine-of", name]
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
        figures.append(json.loads((directory / "figures.json").read_text()))
    stock, ours = figures
    for figure in stock:
        yield f"{figure:24} {stock[figure]:9.3f} / {ours[figure]:9.3f} ms  {stock[figure] / ours[figure]:.2f}"


def main() -> None:
    """The table; in a child one engine's figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", choices=("fp8", "int4", "bf16", "mxfp4-packed", "nvfp4-packed"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192], help="tokens before the timed ones")
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024, 8192, 32768], help="tokens that TTFT is of")
    parser.add_argument("--pages", type=int, default=8500, help="of the cache, 64 tokens each")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, each with a slice of its own")
    parser.add_argument("--engine", type=json.loads, default={}, help='more of its arguments: {"stream_interval": 8}')
    parser.add_argument("--engine-of", choices=PLUGINS, help="time this one alone; the table's own processes")
    args = parser.parse_args()
    if args.engine_of is None:
        for line in table(args):
            sys.stdout.write(f"{line}\n")
        return
    replace_loader()
    directory = args.directory / args.engine_of
    figures = dict(latency(directory, write_model(directory, args), args))
    (directory / "figures.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__mp_main__":  # a process of vLLM's that is not forked
    replace_loader()
if __name__ == "__main__":
    main()
