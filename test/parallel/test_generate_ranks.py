"""generate, bench and parity with `--ranks` under torchrun against one process with the checkpoint."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from command import kimi
from forked import python
from processes import KIMI, TORCHRUN, run

from kimi_k2.bench.results import load_results
from kimi_k2.checkpoint.index import header_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError, KimiK2Warning
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.neuron import application
from kimi_k2.neuron.application import NeuronApplication
from kimi_k2.parallel.ranks import Rank, load_ranks
from kimi_k2.parity.golden import load_golden
from kimi_k2.plan.deployment import Deployment
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import MANIFEST, _own_checksum, made_layout, rank_file_name
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint


@pytest.fixture(scope="module")
def halves(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(wide, tmp_path_factory.mktemp("halves"), 2)


@pytest.fixture(scope="module")
def one(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(wide, tmp_path_factory.mktemp("one"), 1)


def converted(source: Path, out: Path, moe_tp: int, moe_ep: int = 1) -> Path:
    Presharder(source, out, Layout(moe_tp, moe_ep, target="cuda", experts="stored")).run()
    return out


def test_text_is_that_of_one_process(wide: Path, halves: Path) -> None:
    options = ["generate", wide, "-p", "What is MLA?", "-p", "Hello", "--max-new-tokens", 6, "--temperature", 0.5]
    alone, together = kimi(*options), run(*TORCHRUN, *KIMI, *options, "--ranks", halves)
    assert together.returncode == 0, together.stderr[-3000:]
    assert alone.stdout == together.stdout
    assert together.stderr.count("TTFT") == 1


def test_nothing_of_the_group_outlives_it(wide: Path, halves: Path) -> None:
    """Threads of gloo that run while the interpreter ends abort it, seldom, after everything went well."""
    counted = (
        "import sys, time; from pathlib import Path; from kimi_k2.parallel import ranks; old = ranks.leave_ranks\n"
        "def threads(): return sum('gloo' in path.read_text() for path in Path('/proc/self/task').glob('*/comm'))\n"
        "def leave():\n"
        "    before = threads(); old()\n"
        "    [time.sleep(0.05) for _ in range(20) if threads()]  # a thread that ends is listed a moment longer\n"
        "    sys.stderr.write(f'gloo: {before > 0} {threads()}\\n')\n"
        "ranks.leave_ranks = leave; from kimi_k2.cli import main; main()"
    )
    options = ["generate", wide, "-p", "Hello", "--max-new-tokens", 6]
    done = run(*TORCHRUN, *python(), "-c", counted, *options, "--ranks", halves, "--draft", "ngram")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == kimi(*options).stdout  # drafts change nothing
    assert done.stderr.count("gloo: True 0") == 2, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_generation_on_gpus_ends(for_gpus: KimiK2Config, tmp_path: Path) -> None:
    """Over NCCL, with decode steps in a graph: what every rank keeps must be gone when they part."""
    write_synthetic_checkpoint(tmp_path / "source", for_gpus)
    ranks = converted(tmp_path / "source", tmp_path / "ranks", 2)
    options = [tmp_path / "source", "--ranks", ranks, "--dtype", "bfloat16"]
    cells = ["--output-lengths", "2,8", "--batch-sizes", "1,2", "--runs", 1, "--out", tmp_path / "sweep"]
    commands = (
        ["generate", *options, "--backend", "cuda", "-p", "Hello", "--max-new-tokens", 8],
        ["bench", *options, "--backend", "cuda", *cells],
    )
    with ThreadPoolExecutor() as at_once:
        generated, swept = at_once.map(lambda command: run(*TORCHRUN, *KIMI, *command), commands)
    assert generated.returncode == 0, generated.stderr[-3000:]
    assert generated.stderr.count("TTFT") == 1
    assert swept.returncode == 0, swept.stderr[-3000:]
    assert load_results(tmp_path / "sweep" / "sweep.json")["environment"]["graph"]


def test_sweep_of_ranks(wide: Path, halves: Path, tmp_path: Path) -> None:
    """The second cell is too long for the model: recorded, and the others go on with rank 0."""
    config = json.loads((wide / "config.json").read_text())
    too_long = config["max_position_embeddings"]
    options = ["--output-lengths", f"2,{too_long},3", "--prompt-lengths", 4, "--runs", 2, "--out", tmp_path]
    done = run(*TORCHRUN, *KIMI, "bench", wide, "--ranks", halves, *options)
    assert done.returncode != 0  # a cell failed
    assert "1 of 3 cells failed" in done.stderr, done.stderr[-3000:]
    results = load_results(tmp_path / "sweep.json")
    assert [cell["status"] for cell in results["cells"]] == ["ok", "ok", "failed"]
    assert (results["environment"]["moe_tp"], results["environment"]["moe_ep"]) == (2, 1)


def test_a_lost_rank_ends_the_sweep(wide: Path, halves: Path, tmp_path: Path) -> None:
    """Rank 1 fails in the middle of a generation, which rank 0 does not: torchrun ends both, finished cells stay."""
    broken = (
        "import os; from kimi_k2.engine import generate as g; old = g.token_steps\n"
        "def stream(*a, **k):\n"
        "    for n, step in enumerate(old(*a, **k)):\n"
        "        if os.environ['RANK'] == '1' and n == 3: raise RuntimeError('out of memory')\n"
        "        yield step\n"
        "g.token_steps = stream; from kimi_k2.cli import main; main()"
    )
    options = ["--output-lengths", "2,6", "--prompt-lengths", 4, "--runs", 1, "--out", tmp_path]
    done = run(*TORCHRUN, *python(), "-c", broken, "bench", wide, "--ranks", halves, *options)
    assert done.returncode != 0
    assert "RanksLostError" in done.stderr, done.stderr[-3000:]
    assert "a bug in kimi-k2" not in done.stderr
    assert "error: RanksLostError: rank 1: out of memory; start the sweep again" in done.stderr
    cells = load_results(tmp_path / "sweep.json")["cells"]
    assert [(cell["output_length"], cell["status"]) for cell in cells] == [(2, "ok")]


@pytest.mark.parametrize(("moe_tp", "moe_ep"), [(2, 1), (1, 2)])
def test_golden_files_of_ranks(wide: Path, halves: Path, tmp_path: Path, moe_tp: int, moe_ep: int) -> None:
    """Every point, put together from the ranks, is one process's; captured by either, compared with the other."""
    ranks = halves if moe_ep == 1 else converted(wide, tmp_path / "ranks", moe_tp, moe_ep)
    options = ["--prompt-length", 9, "--steps", 2]
    alone, together = tmp_path / "alone", tmp_path / "together"
    kimi("parity", "capture", wide, alone, *options)
    done = run(*TORCHRUN, *KIMI, "parity", "capture", wide, together, *options, "--ranks", ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = load_golden(alone).trace.values, load_golden(together).trace.values
    assert first.keys() == second.keys()
    for point, value in first.items():
        assert (second[point].double() - value.double()).norm() <= 2e-5 * value.double().norm() + 1e-6, point
    compared = run(*TORCHRUN, *KIMI, "parity", "compare", alone, wide, "--backend", "cpu", "--ranks", ranks)
    assert compared.returncode == 0, compared.stdout[-3000:]
    refused = kimi("parity", "compare", alone, wide, "--backend", "transformers", "--ranks", ranks, status=1)
    assert "--ranks are of the plain model" in str(refused.exception)


def test_another_number_of_processes_is_refused(wide: Path, halves: Path) -> None:
    said = str(kimi("generate", wide, "-p", "Hello", "--ranks", halves, status=1).exception)
    assert "2 ranks in" in said and "but 1 processes" in said
    kimi("generate", wide, "--ranks", halves, status=2)  # no prompt


def test_layout_of_a_conversion(halves: Path, tmp_path: Path) -> None:
    assert made_layout(halves) == Layout(2, target="cuda", experts="stored")
    content = json.loads((halves / MANIFEST).read_text())
    del content["made_from"]["options"]["moe_ep"]
    rewrite(tmp_path, content)
    with pytest.raises(CorruptHeaderError, match="moe_ep"):
        made_layout(tmp_path)


def test_one_rank_needs_no_group(wide: Path, one: Path) -> None:
    model, rank = KimiK2ForCausalLM.from_pretrained(wide), load(one, wide)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    steps = list(rank.generator.stream([[3, 1, 4]], params))
    assert [[step.tokens[0] for step in steps]] == generate(model, [[3, 1, 4]], params)
    assert rank.number == 0
    with pytest.raises(ConfigError, match="expected cpu or cuda"):
        load_ranks(one, wide, model.config, torch.float32, "cuda:1")


def rewrite(directory: Path, content: dict[str, Any]) -> None:
    """A manifest with other content, and the checksum of that."""
    content["sha256"] = _own_checksum(content)
    (directory / MANIFEST).write_text(json.dumps(content))


def load(ranks: Path, checkpoint: Path) -> Rank:
    return load_ranks(ranks, checkpoint, KimiK2Config.from_pretrained(checkpoint), torch.float32, "cpu")


def nudged(shard: Path) -> None:
    """Training moves values all over a tensor: here one in 50 of one expert's, by a code."""
    data = bytearray(shard.read_bytes())
    header = header_bytes(shard)
    entries = json.loads(header[8:])
    name = next(name for name in entries if name.endswith("experts.5.up_proj.weight"))
    start, end = (len(header) + offset for offset in entries[name]["data_offsets"])
    for place in range(start, end, 50):
        data[place] ^= 1
    shard.write_bytes(data)


def test_weights_of_another_checkpoint_are_refused(
    wide: Path, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Path(shutil.copytree(one, tmp_path / "compiled"))
    (compiled / "model.pt").touch()
    built = Mock(side_effect=ConfigError("built"))
    monkeypatch.setattr(application, "build_application", built)
    monkeypatch.setattr("kimi_k2.neuron.contrib.missing", lambda: ())
    load_compiled = partial(NeuronApplication.load, preset=Deployment.load("trn2-tp32-ep2"), compiled=compiled)
    copy = Path(shutil.copytree(wide, tmp_path / "copy"))  # other times and inodes, the same bytes
    load(one, copy)
    with pytest.raises(ConfigError, match=r"^built$"):
        load_compiled(copy)
    nudged(copy / "model-2-of-2.safetensors")
    with pytest.raises(ConfigError, match=r"model-2-of-2.safetensors has other values"):
        load(one, copy)
    with pytest.raises(ConfigError, match=r"model-2-of-2.safetensors has other values"):
        load_compiled(copy)
    assert built.call_count == 1
    (copy / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-2-of-2.safetensors is not in"):
        load(one, copy)


def test_a_directory_without_weights_is_said_to_be_unchecked(wide: Path, one: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((wide / "config.json").read_bytes())
    with pytest.warns(KimiK2Warning, match="holds no weights: that .* was made from this checkpoint is not checked"):
        load(one, tmp_path)


def test_ranks_of_an_older_version(wide: Path, one: Path, tmp_path: Path) -> None:
    """Without samples the same files are told from others, and copies are not."""
    old = Path(shutil.copytree(one, tmp_path / "old"))
    content = json.loads((old / MANIFEST).read_text())
    for shard in content["made_from"]["source"]["shards"].values():
        del shard["sample"]
    rewrite(old, content)
    load(old, wide)
    copy = Path(shutil.copytree(wide, tmp_path / "copy"))
    with pytest.raises(ConfigError, match="an older version wrote it"):
        load(old, copy)


def test_damaged_values_are_found_and_made_again(wide: Path, one: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(one, tmp_path / "own"))
    path = own / "weights" / rank_file_name(0)
    right = path.read_bytes()
    path.write_bytes(right[:-3000] + bytes(2000) + right[-1000:])
    with pytest.raises(CheckpointError, match=r"tensor .* the manifest's checksum; .*--verify-output"):
        load(own, wide)
    layout = Layout(1, target="cuda", experts="stored")
    again = Presharder(wide, own, layout)
    again.run()
    assert again.looked_through
    assert path.read_bytes() != right
    Presharder(wide, own, layout).run(verify_output=True)
    assert path.read_bytes() == right
    load(own, wide)
    content = json.loads((own / MANIFEST).read_text())
    sums = content["checksums"][path.name]
    sums[next(iter(sums))] = "f" * 32
    rewrite(own, content)
    with pytest.raises(CheckpointError, match="does not come out as the manifest says"):
        Presharder(wide, own, layout).run(verify_output=True)


def test_files_for_trainium_are_refused(wide: Path, tmp_path: Path) -> None:
    Presharder(wide, tmp_path, Layout(1, experts="blockwise")).run()
    with pytest.raises(ConfigError, match="target"):
        load(tmp_path, wide)
