"""Time vLLM on one GPU with a rank's slice of Kimi-K2 and random weights: its own model, or ours.

Run it once for each, and compare: `VLLM_PLUGINS=kimi_k2_parsers vllm_slice.py fp8 stock.json` is vLLM's own model,
`VLLM_PLUGINS=kimi_k2 vllm_slice.py fp8 ours.json` ours; `vllm_table.py` runs both in turns. The engine runs in a
process of its own, as `vllm serve` has it, and CUDA graphs are on. Steps are timed by the engine's own stamps. Figures
are written as they come. With vLLM's variables of a data-parallel rank (`VLLM_DP_SIZE` and others) it is one of those
that share the routed experts of a model of whole width.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.synthetic.config import hf_config

NAMES = {"fp8": "kimi-k2-instruct-0905", "int4": "kimi-k2-thinking"}
# One of eight tensor-parallel ranks; the head's rows too.
SLICE = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 256, "intermediate_size": 2304,
    "vocab_size": 20480, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
OF = 8  # the ranks that it is one of
LAYERS, CHUNK, CONTEXTS, CONCURRENCY = 12, 8192, (1024, 8192), (1, 4, 16, 64)
PROMPTS = {1024: 5, 8192: 5, 32768: 3}  # tokens: repetitions
PAGES = 8500  # of 64 tokens: 64 requests of 8k


def fill(name: str, tensor: torch.Tensor) -> None:
    """Values of a trained model's size, so that routing is about uniform; vLLM's own choose the same experts always."""
    last = name.rpartition(".")[2]
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)  # below 2, no NaN
    elif tensor.dtype == torch.int32 and "packed" in last:
        tensor.random_(-(2**31), 2**31 - 1)
    elif not tensor.is_floating_point() or "rotary" in name or "cos" in name or "inv_freq" in name:
        return
    elif "e_score_correction_bias" in name:
        tensor.normal_(0, 0.01)
    elif "scale" in last:
        tensor.fill_(0.02 if tensor.dtype == torch.float32 else 0.0025)
    elif "norm" in name:
        tensor.fill_(1)
    elif any(part in last for part in ("weight", "proj", "bias")):
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


class Timer:
    """Requests of random tokens, timed step by step.

    Attributes:
        new: tokens of a request that are timed; None for 128, of 16 requests and more 80.
    """

    def __init__(self, engine: Any, new: int | None = None) -> None:
        self.engine, self.new, self.draw, self.count = engine, new, random.Random(0), 0
        self.stamp, self.receive = 0.0, engine.engine_core.get_output
        engine.engine_core.get_output = self.stamped

    def stamped(self) -> Any:
        """A step's outputs; when they were made is kept."""
        outputs = self.receive()
        self.stamp = outputs.timestamp
        return outputs

    def run(self, requests: int, length: int, new: int, temperature: float = 0.0) -> tuple[float, float]:
        """Milliseconds until the first token, and a token once all requests decode (NaN for few tokens)."""
        from vllm import SamplingParams

        got: dict[str, int] = {}
        inside: list[tuple[float, int]] = []  # when a step ended, and the tokens that each request then had
        sampling = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [[self.draw.randrange(10, 20000) for _ in range(length)] for _ in range(requests)]
        start, first = time.perf_counter(), float("nan")
        for prompt in prompts:
            self.count += 1
            self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, sampling)
            got[str(self.count)] = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                got[output.request_id.split("-")[0]] = len(output.outputs[0].token_ids)
            fewest, most = min(got.values()), max(got.values())
            if most and first != first:
                first = time.perf_counter() - start
            if fewest >= 4 and most < new and (not inside or fewest > inside[-1][1]):
                inside.append((self.stamp, fewest))
        if len(inside) < 5:
            return first * 1e3, float("nan")
        return first * 1e3, (inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1]) * 1e3


def write_model(kind: str, layers: int, ranks: int = 1) -> tuple[Path, KimiK2Config]:
    """A directory with the configuration of a slice; see `start`."""
    widths = {name: size if name.endswith("token_id") else size * ranks for name, size in SLICE.items()}
    config = KimiK2Config.load(NAMES[kind]).model_copy(update={**widths, "num_hidden_layers": layers})
    # vLLM finds what it has compiled by the model's path, among others: so the path is the same each time.
    directory = Path(tempfile.gettempdir()) / f"kimi-k2-slice-{kind}-{layers}-{ranks}"
    directory.mkdir(exist_ok=True)
    partial = directory / f"config.{os.getpid()}.partial"  # another engine may start at the same time
    partial.write_text(json.dumps(hf_config(config)))
    partial.replace(directory / "config.json")
    return directory, config


def engine_arguments(config: KimiK2Config, pages: int, requests: Sequence[int] = CONCURRENCY) -> dict[str, Any]:
    """Of vLLM's engine: a cache of so many pages, graphs of the batches that are timed."""
    sizes = sorted({*CONCURRENCY, *requests})
    return {
        "load_format": "dummy", "dtype": "bfloat16", "trust_remote_code": True, "enable_prefix_caching": False,
        "max_model_len": 33024, "max_num_seqs": sizes[-1], "max_num_batched_tokens": CHUNK,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": pages * 64 * config.cache_dim * 2 * config.num_hidden_layers,
        "compilation_config": {"cudagraph_capture_sizes": sizes},
    }  # fmt: skip


def start(
    kind: str,
    layers: int,
    pages: int = PAGES,
    executor: str | None = None,
    ranks: int = 1,
    more: Mapping[str, Any] | None = None,
    requests: Sequence[int] = CONCURRENCY,
) -> Any:
    """An engine with random weights of `layers` layers of a rank's slice.

    Args:
        kind: which experts, `fp8` or `int4`.
        layers: how many.
        pages: of the cache, 64 tokens each.
        executor: vLLM's `distributed_executor_backend`; its own choice if None.
        ranks: GPUs, each of which has a rank's slice.
        more: other arguments of vLLM's engine.
        requests: at once, at most the largest of them.
    """
    from vllm import EngineArgs, LLMEngine

    replace_loader()
    directory, config = write_model(kind, layers, ranks if int(os.environ.get("VLLM_DP_SIZE", "1")) == 1 else OF)
    arguments = EngineArgs(
        model=str(directory), skip_tokenizer_init=True, distributed_executor_backend=executor,
        tensor_parallel_size=ranks, **{**engine_arguments(config, pages, requests), **(more or {})},
    )  # fmt: skip
    return LLMEngine.from_engine_args(arguments)


def warm(timer: Timer, concurrency: Sequence[int], prompts: Iterable[int]) -> None:
    """Build whatever is built when it first runs."""
    for requests in concurrency:
        for temperature in (0.0, 1.0):
            timer.run(requests, 1024, 8, temperature)
    for length in prompts:
        timer.run(1, length, 1)


def figures(
    timer: Timer,
    concurrency: Sequence[int],
    contexts: Sequence[int],
    prompts: Mapping[int, int],
    temperature: float = 0.0,
) -> Iterator[tuple[str, float]]:
    """What is timed and its milliseconds; `prompts` gives the repetitions of a length, temperature 0 is greedy."""
    how = f", temperature {temperature:g}" if temperature else ""
    for length in contexts:
        for requests in concurrency:
            new = -(-requests * length // CHUNK) + (timer.new or (128 if requests < 16 else 80))
            times = 2 if requests * length <= 8 * CHUNK else 1  # long prompts take longer than what is timed
            each = (timer.run(requests, length, new, temperature)[1] for _ in range(times))
            yield f"TPOT of {requests} at {length}{how}", min(each)
    for length, times in prompts.items():
        each = (timer.run(1, length, 1, temperature)[0] for _ in range(times))
        yield f"TTFT of {length} tokens{how}", statistics.median(each)


def write(timings: Iterable[tuple[str, float]], result: Path) -> None:
    """Print figures and keep all so far in a JSON file {what: milliseconds}."""
    so_far: dict[str, float] = {}
    for what, milliseconds in timings:
        so_far[what] = milliseconds
        sys.stdout.write(f"{what}: {milliseconds:.3f} ms\n")
        sys.stdout.flush()
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(so_far, indent=1))
        partial.replace(result)


def measure(timer: Timer, asked: Mapping[str, Any]) -> None:
    """A line: {"result": FILE, "requests": [...], "contexts": [...], "prompts": [...], "temperature": 0}."""
    times = {length: PROMPTS.get(length, 3) for length in asked["prompts"]}
    result = Path(asked["result"])
    partial = result.with_suffix(".so-far")
    timings = figures(timer, asked["requests"], asked["contexts"], times, asked.get("temperature", 0.0))
    write(timings, partial)
    partial.replace(result)


if __name__ == "__mp_main__":  # a process of vLLM's that is not forked
    replace_loader()
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the engine's process, which would hold the GPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", choices=NAMES)
    parser.add_argument("result", type=Path, help="JSON file to write: milliseconds by what was timed")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--requests", type=int, nargs="+", default=CONCURRENCY, help="at once, up to 64")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens before those that are timed")
    parser.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS), help="tokens until the first answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    parser.add_argument("--new", type=int, help="tokens of a request that are timed")
    parser.add_argument("--pages", type=int, default=PAGES, help="of the cache, 64 tokens each")
    parser.add_argument("--executor", choices=("uni", "mp"), help="vLLM's executor; mp is that of several ranks")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, each with a slice of its own")
    parser.add_argument("--engine", type=json.loads, default={}, help='more of its arguments: {"stream_interval": 8}')
    parser.add_argument("--by-line", action="store_true", help="write `{}` to the result once warm; then lines of JSON")
    args = parser.parse_args()
    options = args.pages, args.executor, args.ranks, args.engine, args.requests
    engine = start(args.experts, args.layers, *options)
    timer = Timer(engine, args.new)
    warm(timer, args.requests, args.prompts)
    if args.by_line:
        args.result.write_text("{}")
        for line in sys.stdin:
            measure(timer, json.loads(line))
    else:
        wanted = {"requests": args.requests, "contexts": args.contexts, "prompts": args.prompts}
        measure(timer, {**wanted, "temperature": args.temperature, "result": str(args.result)})
