"""What clients of `vllm serve` see of a rank's slice of Kimi-K2, stock vLLM and our plugin one after the other.

    python scripts/vllm_http.py DIRECTORY fp8 --layers 12 --device 0

Two servers on one GPU, random weights; requests come over HTTP, and text goes back in a stream, by `kimi-k2 bench
--endpoint`: time to the first token, and a token after it. `vllm_table.py` times the engine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from vllm_slice import NAMES, engine_arguments, replace_loader, write_model
from vllm_table import PLUGINS, SETTINGS

from kimi_k2.synthetic.vocabulary import write_synthetic_vocabulary
from kimi_k2.tokenization.tokenizer import PATTERN


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A vocabulary of made-up tokens, as vLLM's tokenizers read it."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    write_synthetic_vocabulary(directory, vocab_size)
    made = TikTokenConverter(str(directory / "tiktoken.model"), pattern=PATTERN).converted()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(directory)


def serve(kind: str, layers: int, port: int, pages: int) -> None:
    """`vllm serve` in this process, until it is ended."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the engine's process has the replaced loader too
    replace_loader()
    directory, config = write_model(kind, layers)
    sys.argv = ["vllm", "--model", str(directory), "--served-model-name", "slice", "--port", str(port)]
    sys.argv += ["--host", "127.0.0.1", "--disable-uvicorn-access-log"]
    for name, value in engine_arguments(config, pages).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            sys.argv.append(f"--{'' if value else 'no-'}{flag}")
        else:
            sys.argv += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


class Server:
    """One of the two, in processes of its own."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name = name
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self.port = listening.getsockname()[1]
        command = [sys.executable, __file__, str(given.directory), given.experts, "--serve", str(self.port)]
        command += ["--layers", str(given.layers), "--pages", str(given.pages)]
        chosen = {"VLLM_PLUGINS": PLUGINS[name], "CUDA_VISIBLE_DEVICES": given.device}
        with (given.directory / f"http-{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **SETTINGS, **chosen}, start_new_session=True
            )

    def wait(self, until: float) -> bool:
        """Until it answers; False if it has ended, or the time is over."""
        while self.process.poll() is None and time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        return False

    def ask(self, given: argparse.Namespace) -> dict[int, dict[str, Any]]:
        """What `kimi-k2 bench` says of each concurrency: seconds, by metric and statistic."""
        out = given.directory / f"http-{self.name}"
        (out / "serving.json").unlink(missing_ok=True)  # of another run
        command = [sys.executable, str(Path(__file__).with_name("benchmark.py")), str(given.model), "--out", str(out)]
        command += ["--endpoint", f"http://127.0.0.1:{self.port}", "--batch-sizes", ",".join(map(str, given.requests))]
        command += ["--warmup", "1", "--runs", "2"]
        command += ["--prompt-lengths", str(given.input), "--output-lengths", str(given.output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self.name}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        cells = json.loads((out / "serving.json").read_text())["cells"]
        return {cell["concurrency"]: cell["summary"] for cell in cells if cell["status"] == "ok"}

    def end(self) -> None:
        """With all of its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)


def main() -> None:
    """Print a line for each concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="for logs and figures")
    parser.add_argument("experts", choices=NAMES)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="0", help="GPU that holds both")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64], help="at a time")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--pages", type=int, default=1300, help="of the cache, 64 tokens each")
    parser.add_argument("--ready", type=float, default=600, help="seconds within which the servers must answer")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be one of the servers")
    given = parser.parse_args()
    if given.serve:
        return serve(given.experts, given.layers, given.serve, given.pages)
    given.directory.mkdir(parents=True, exist_ok=True)
    given.model, config = write_model(given.experts, given.layers)
    write_tokenizer(given.model, config.vocab_size)
    servers, until = [Server(name, given) for name in PLUGINS], time.monotonic() + given.ready
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    try:
        for server in servers:
            if not server.wait(until):
                raise SystemExit(f"{server.name}: no server; its log is in {given.directory}")
        stock, ours = (server.ask(given) for server in servers)
        (given.directory / "http.json").write_text(json.dumps({"stock": stock, "ours": ours}, indent=1))
        for count in given.requests:
            for metric in ("ttft", "tpot"):
                one, two = stock[count][metric]["median"] * 1e3, ours[count][metric]["median"] * 1e3
                sys.stdout.write(f"median {metric} of {count:2}: {one:8.3f} / {two:8.3f} ms  {one / two:.2f}\n")
    finally:
        for server in servers:
            server.end()
    return None


if __name__ == "__main__":
    main()
