"""What is read is a regular file within a bound, what is written belongs to one name; no module does it otherwise."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kimi_k2
from kimi_k2.drafts.head import other_member
from kimi_k2.errors import CheckpointError, ConfigError
from kimi_k2.files import LOCK, open_output, parse_yaml, read_bytes
from kimi_k2.plan.deployment import Deployment
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import UNFINISHED, rank_file_name
from kimi_k2.sharding.presharder import Presharder

SOURCE = Path(kimi_k2.__file__).parent


def test_a_file_that_is_longer_than_it_says_is_read_to_its_bound() -> None:
    """Files of /proc have no size; this one has bytes."""
    with pytest.raises(ConfigError, match="at most 16 are read"):
        read_bytes(Path("/proc/self/status"), 16, ConfigError)


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize(
    "name", [LOCK, f"{UNFINISHED}.partial", f"weights/{rank_file_name(1)}.partial", f"weights/{rank_file_name(0)}"]
)
def test_no_link_in_the_output_is_written_through(
    fp8: Path, tmp_path: Path, name: str, link: Callable[[Path, Path], None]
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"not yours" * 1000)
    target = tmp_path / "out" / name
    target.parent.mkdir(parents=True)
    link(target, precious)
    with pytest.raises(
        (CheckpointError, ConfigError), match=r"is a link to another file|a hard link|files of something else"
    ) as refused:
        Presharder(fp8, tmp_path / "out", Layout(2)).run()
    assert "make room" not in str(refused.value)
    assert precious.read_bytes() == b"not yours" * 1000
    assert target.exists()


@pytest.mark.usefixtures("no_hang")
def test_a_pipe_is_no_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="got a pipe"):
        open_output(tmp_path / "pipe")


# Modules that read files of the package, of the machine or of a developer's own measurements, and why they may.
OWN = {
    "files": "the one place",
    "checkpoint/index": "open_tensors is the one place for safetensors",
    "cli/conversation": "--messages <(command) is a pipe; the read is bounded",
    "cli/errors": "/proc",
    "cli/commands/rehearse": "reports into a directory of its own",
    "config": "presets of the package",
    "kernels/comm/push_all_reduce": "/proc",
    "kernels/common/build": "sources of the package",
    "kernels/common/structure": "sources of the package",
    "kernels/common/tuning": "tables of the package, and where `tune` writes them",
    "neuron/contrib": "sources of an installed package",
    "neuron/sdk": "constraint files of the package",
    "nki/step_counts": "a table of the package",
    "parity/golden": "SafeTensors after open_regular",
    "parity/kernels": "a recording that the same command wrote",
    "plan/published": "a table of the package",
    "serving/paged/support": "source of an installed package",
    "serving/vllm/adapter": "sources of installed or unpacked packages",
    "tokenization/rendering": "/proc",
    "tokenization/chat": "a template of the package",
}
CALLS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "safe_open", "load_file"}
# Of other things than names of files, or methods that are called so.
OTHERS = {"Image", "av", "CheckpointIndex", "KimiK2", "NeuronApplication", "files", "cls", "self"}


# What yaml.safe_load takes, multiplies, or fails at with an error that is none of YAML's.
YAML = {
    "nested": "[" * 5000,
    "nested in blocks": "".join(f"{' ' * level}a:\n" for level in range(200)),
    "an alias": "a: &a [1]\nb: *a",
    "itself": "&a [*a]",
    "a bomb": "a: &a [x, x]\n"
    + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "a day that is none": "a: 2026-13-45",
    "a day": "a: 2026-01-02",
    "a number that is none": "a: !!int x",
    "a float that is none": "a: !!float x",
    "no value": "a: .nan",
    "not finite": "a: .inf",
    "bytes": "a: !!binary aGFsbG8=",
    "a set": "a: !!set {b}",
    "numbers for names": "1: 2",
    "a list for a name": "? [a]\n: b",
    "twice": "a: 1\na: 2",
    "an object": "a: !!python/object/apply:os.system [ls]",
    "two documents": "a: 1\n---\nb: 2",
    "a control character": "a: \x07",
    "open": "a: [",
    "a tab": "a:\n\t- b",
    "long": f"a: {'x' * 70_000}",
}


@pytest.mark.parametrize("kind", YAML)
def test_yaml_that_is_none_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as error:
        parse_yaml(YAML[kind].encode())
    assert "\n" not in str(error.value)
    preset = tmp_path / "mine.yaml"
    preset.write_text(YAML[kind])
    with pytest.raises(ConfigError, match=r"mine\.yaml: \S") as refused:
        Deployment.load(str(preset))
    assert "\n" not in str(refused.value)
    (tmp_path / "README.md").write_text(f"---\nbase_model: moonshotai/Kimi-K2-Thinking\n{YAML[kind]}\n---\n")
    (tmp_path / "kimi-k2.5").mkdir()
    other_member(tmp_path, tmp_path / "kimi-k2.5")  # a card that cannot be read says nothing


def test_yaml_of_json_s_values_is_read() -> None:
    assert parse_yaml(b"a: {b: [1, 2.5, true, null, 'x']}\n# end") == {"a": {"b": [1, 2.5, True, None, "x"]}}


def opened(path: Path) -> Iterator[str]:
    """Calls in a module that open a file by its name."""
    tree = ast.parse(path.read_text())
    bounded = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(".files")
        for alias in node.names
    }
    bounded |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in CALLS - bounded:
            yield function.id
        elif isinstance(function, ast.Attribute) and function.attr in CALLS:
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            if owner not in OTHERS:
                yield f"{owner}.{function.attr}"


def test_no_module_opens_files_past_the_one_place() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).with_suffix("").as_posix()
        # The NxDI class knows NxDI, torch and safetensors alone.
        if not module.startswith(("bench/", "neuron/nxdi/", "contrib_model/")) and (calls := list(opened(path))):
            found[module] = calls
    assert found.keys() == OWN.keys(), {m: found.get(m) for m in found.keys() ^ OWN.keys()}
