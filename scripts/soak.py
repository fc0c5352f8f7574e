"""Convert, kill, resume, damage, verify, generate and chat at random; memory and open files are watched.

    python scripts/soak.py --minutes 15 [--seed 0]

Conversions that are killed are processes of their own; everything else runs here, again and again, so that what a
command leaves behind adds up. Ends with status 1 at the first result that is wrong, or if memory or open files keep
growing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import psutil
import torch
import typer
from typer.testing import CliRunner

from kimi_k2.cli import app
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

MODELS = ("kimi-k2-instruct-0905", "kimi-k2-thinking", "kimi-k2.5")
LAYOUTS = (
    ["--tp", "2"],
    ["--tp", "1", "--ep", "2", "--experts", "blockwise"],
    ["--tp", "2", "--ep", "2", "--experts", "bf16", "--no-report"],
    ["--tp", "1", "--target", "cuda", "--experts", "stored"],
    ["--tp", "4"],
)
# Growth between the second and the last quarter of the run: caches fill up in the first.
MEMORY, FILES = 30e6, 2


class WrongError(Exception):
    """A result is not what it must be."""


def invoke(*words: object, text: str | None = None, status: int = 0) -> str:
    """Output of a command, run here."""
    done = CliRunner().invoke(app, [str(word) for word in words], input=text)
    if done.exit_code != status:
        raise WrongError(f"{words}: status {done.exit_code}: {done.output[-1000:]} {done.exception!r}")
    return done.output + str(done.exception or "")


def weights(directory: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((directory / "weights").iterdir())
    }


class Soak:
    """The actions; each draws what it needs.

    Args:
        work: directory for everything that is written.
        draw: source of chance.
    """

    def __init__(self, work: Path, draw: random.Random) -> None:
        self.work, self.draw = work, draw
        self.checkpoints: list[Path] = []
        self.expected: dict[tuple[Path, int], dict[str, str]] = {}
        self.done: Counter[str] = Counter()
        for seed, model in enumerate(MODELS):
            self.checkpoints.append(work / model)
            sizes = {
                "num_hidden_layers": 3,
                "n_routed_experts": 8,
                "moe_intermediate_size": 512,
                "intermediate_size": 512,
            }
            write_synthetic_checkpoint(work / model, tiny_config(model, **sizes), seed=seed)

    def step(self) -> None:
        """One action."""
        action = self.draw.choice([self.convert_and_kill, self.generate, self.chat, self.inspect, self.damage])
        self.done[action.__name__] += 1
        action()

    def _job(self) -> tuple[Path, int, Path]:
        """A checkpoint, a layout that suits it, and an empty directory; what must come out is known afterwards."""
        source, number = self.draw.choice(self.checkpoints), self.draw.randrange(len(LAYOUTS))
        if (source, number) not in self.expected:
            whole = self.work / "whole"
            invoke("convert", source, whole, *LAYOUTS[number])
            self.expected[source, number] = weights(whole)
            shutil.rmtree(whole)
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        return source, number, out

    def _check(self, source: Path, number: int, out: Path) -> None:
        if weights(out) != self.expected[source, number]:
            raise WrongError(f"{source.name} {LAYOUTS[number]}: other bytes than an unbroken run's")
        invoke("verify", out)

    def convert_and_kill(self) -> None:
        """Up to four kills at any moment, then to the end."""
        source, number, out = self._job()
        command = [sys.executable, "-c", "from kimi_k2.cli import main; main()", "convert", str(source), str(out)]
        command += LAYOUTS[number]
        for _ in range(self.draw.randrange(1, 5)):
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
                limit = time.monotonic() + 60
                while child.poll() is None and not out.exists() and time.monotonic() < limit:
                    time.sleep(0.002)  # Python starts
                time.sleep(self.draw.random() ** 2 * 1.5)
                self.done["kill" if child.poll() is None else "ended before the kill"] += 1
                child.kill()
            if child.returncode not in (0, -9):
                raise WrongError(f"convert ended with {child.returncode}")
            if child.returncode == 0:
                self._check(source, number, out)
        invoke("convert", source, out, *LAYOUTS[number])
        self._check(source, number, out)

    def damage(self) -> None:
        """A finished file loses a byte, or its end, or itself; `verify` says so, and `convert` mends what it can."""
        source, number, out = self._job()
        invoke("convert", source, out, *LAYOUTS[number])
        path = self.draw.choice(sorted((out / "weights").iterdir()))
        way = self.draw.choice(["byte", "end", "all"])
        if way == "byte":
            with path.open("r+b") as file:
                file.seek(self.draw.randrange(path.stat().st_size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1 << self.draw.randrange(8)]))
        elif way == "end":
            os.truncate(path, self.draw.randrange(path.stat().st_size))
        else:
            path.unlink()
        if path.name not in invoke("verify", out, status=1):
            raise WrongError(f"verify does not name {path.name}")
        if way != "byte":  # its size and header are right: only verify reads bytes
            invoke("convert", source, out, *LAYOUTS[number])
            self._check(source, number, out)

    def generate(self) -> None:
        """Same seed, same text; greedy or drawn, one prompt or three."""
        words = ["generate", self.draw.choice(self.checkpoints), "--max-new-tokens", self.draw.randrange(1, 24)]
        for _ in range(self.draw.choice([1, 3])):
            words += ["-p", "x" * self.draw.randrange(1, 200)]
        words += self.draw.choice([[], ["--temperature", "0.9", "--seed", "3"], ["--json"], ["--keep-quantized"]])
        first, second = (invoke(*words).split("TTFT")[0] for _ in range(2))
        if first != second and "--json" not in words:
            raise WrongError(f"{words}: {first!r} and then {second!r}")

    def chat(self) -> None:
        """A conversation."""
        lines = ["Hello", "/help", "/system Be brief.", "And now?", "/nonsense", "/quit"]
        invoke("chat", self.draw.choice(self.checkpoints), "--max-new-tokens", "8", text="\n".join(lines) + "\n")

    def inspect(self) -> None:
        """What a checkpoint holds and how it would be cut."""
        source = self.draw.choice(self.checkpoints)
        invoke("inspect", source, *self.draw.choice([[], ["--json"], ["--tensors"], ["--tp", "2"]]))


def main() -> None:
    """Run until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="kimi-k2-soak-"))
    own = psutil.Process()
    samples: list[tuple[float, int, int]] = []
    start = time.monotonic()
    try:
        soak = Soak(work, random.Random(arguments.seed))
        while (minutes := (time.monotonic() - start) / 60) < arguments.minutes:
            soak.step()
            gc.collect()
            samples.append((minutes, own.memory_info().rss, own.num_fds()))
        quarter = len(samples) // 4
        if not quarter:
            raise WrongError("too short to see growth")
        early, late = samples[quarter : 2 * quarter], samples[-quarter:]
        memory, files = (median(one[i] for one in late) - median(one[i] for one in early) for i in (1, 2))
        typer.echo(f"{len(samples)} actions in {minutes:.1f} minutes: {dict(soak.done)}")
        for name, part in (("second", early), ("last", late)):
            rss, fds = (median(one[i] for one in part) for i in (1, 2))
            most = max(one[1] for one in part)
            typer.echo(f"{name} quarter: {rss / 1e6:.0f} MB resident, at most {most / 1e6:.0f}; {fds:.0f} open files")
        if memory > MEMORY or files > FILES:
            raise WrongError(f"growth: {memory / 1e6:.1f} MB, {files:.0f} open files")
        typer.echo("PASS")
    except WrongError as error:
        sys.exit(f"FAIL after {(time.monotonic() - start) / 60:.1f} minutes, seed {arguments.seed}: {error}")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
