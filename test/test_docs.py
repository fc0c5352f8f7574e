"""README and docs: links lead somewhere, commands and their options exist, and those that can run do."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import typer
from command import kimi
from forked import python
from packaging.requirements import Requirement
from PIL import Image
from typer.main import get_command

from kimi_k2.cli import app
from kimi_k2.files import Json

ROOT = Path(__file__).parents[1]
ShellCommands = Callable[[str], list[list[str]]]
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("contrib/models/*/README.md"))]
BLOCK = re.compile(r"^ *```(?:sh|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SECTIONS = ("## On any Linux machine", "## Prove and plan")


def inline_commands(text: str) -> list[list[str]]:
    """`kimi-k2 ...` and `python scripts/...` in running text and tables."""
    spans = re.findall(r"`((?:kimi-k2 |python scripts/|scripts/|pytest )[^`\n]+)`", text)
    return [shlex.split(span) for span in spans]


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


def test_tests_that_documents_name_are_there() -> None:
    """By its file, and what -k chooses by a word of its source."""
    for path in DOCS:
        for name, chosen in re.findall(r"\b(test_\w+[.]py)`?(?: -k (\w+))?", path.read_text(encoding="utf-8")):
            there = [file for folder in ("test", "contrib") for file in (ROOT / folder).glob(f"**/{name}")]
            assert any(chosen in file.read_text(encoding="utf-8") for file in there), (path.name, name, chosen)


@pytest.fixture(scope="module")
def tables() -> Json:
    return runpy.run_path(str(ROOT / "scripts" / "tables.py"))


def test_figures_are_as_recorded_and_computed(tables: Json) -> None:
    """`python scripts/tables.py` after a change of docs/measured.json or of the planner."""
    for name, path in tables["documents"]().items():
        text = path.read_text(encoding="utf-8")
        assert text == tables["rendered"](text, name), name


def test_pictures_are_as_planned_and_measured(tables: Json) -> None:
    readme = README.read_text(encoding="utf-8")
    for name, drawing in tables["pictures"]().items():
        kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
        told = [re.findall(r"<text[^>]*>([^<]+)<", text) for text in (kept, drawing)]
        assert told[0] == told[1] and len(told[0]) > 12, "python scripts/tables.py"
        assert f"](docs/{name})" in readme


@pytest.mark.parametrize("name", ["README.md", *(path.name for path in DOCS if path.parent.name == "docs")])
def test_a_figure_changed_by_hand_is_seen(name: str, tables: Json) -> None:
    """Twenty drawn of all numbers outside commands, tables that are rendered among them."""
    text = tables["documents"]()[name].read_text(encoding="utf-8")
    found_under = json.loads((ROOT / "docs" / "figures.json").read_text(encoding="utf-8"))["stated"][name]
    recorded = {heading: entry["numbers"] for heading, entry in found_under.items()}
    assert tables["stated"](text, name) == recorded, "python scripts/tables.py --record"
    assert all(entry["source"] for entry in found_under.values())
    code = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--[^>]*-->|^#.*$", re.DOTALL | re.MULTILINE)
    prose = code.sub(lambda found: "`" * len(found[0]), text)
    found = list(tables["STATED"].finditer(prose))
    for number in np.random.default_rng(49).permutation(len(found))[:20]:
        first = found[number].start()
        changed = text[:first] + str((int(text[first]) + 1) % 10) + text[first + 1 :]
        try:
            seen = tables["stated"](changed, name) != recorded or tables["rendered"](changed, name) != changed
        except ValueError:
            seen = True
        assert seen, text[first - 30 : first + 20]


def check_options(words: list[str], command: Any) -> None:
    """Every option that the words give belongs to the command."""
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words[: words.index("--")] if "--" in words else words:  # behind it: another program's
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{command.name} has no {word}"


def check_whole(words: list[str], command: Any) -> None:
    """The command takes the words as they are: nothing is missing, and every value is one that its option takes."""
    try:
        command.make_context(command.name, list(words))
    except typer.BadParameter as error:  # the examples' files are not here, or something else has their names
        assert error.message.endswith((" does not exist.", " is a file.", " is a directory.")), (words, error.message)


@cache
def usage(script: str) -> str:
    """What a script says of its options, and its source."""
    command, source = [*python(), str(ROOT / script), "--help"], (ROOT / script).read_text(encoding="utf-8")
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout + source


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path, shell_commands: ShellCommands) -> None:
    text = path.read_text(encoding="utf-8")
    listed = shell_commands(text)
    group: Any = get_command(app)
    checked = 0
    for number, words in enumerate(listed + inline_commands(text)):
        if words[:2] == ["torchrun", "--nproc-per-node"]:
            words = words[4:] if words[3] == "--no-python" else ["python", *words[3:]]
        program = Path(words[0]).name
        if program == "kimi-k2":
            command, options = group, words[1:]
            while hasattr(command, "commands") and options and options[0] in command.commands:
                command, options = command.commands[options[0]], options[1:]
            if command.name == "bench":
                command = command.commands["sweep"]  # the default
            if hasattr(command, "commands"):  # a group that is spoken of, not called
                options = [word for word in options if word != "--help"]
                assert all(word.startswith("--") for word in options), words
                check_options(options, command)
                continue
            check_options(options, command)
            if number < len(listed):  # running text may leave out what goes without saying
                check_whole(options[: options.index("|")] if "|" in options else options, command)
        elif program == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif words[:2] == ["python", "-m"]:
            engine = words[2].partition(".")[0]
            if engine not in ("vllm", "sglang") or importlib.util.find_spec(engine):  # not needed by the tests
                assert importlib.util.find_spec(words[2]) is not None, words
        elif words[0].startswith(("python", "scripts/")):
            script = next(word for word in words if word.startswith(("scripts/", "examples/")))
            if path.is_relative_to(ROOT / "contrib"):  # run in the folder that the README is of
                script = str(path.parent / script)
            for word in words:
                assert not word.startswith("--") or word in usage(script), f"{script} has no {word}"
        elif program == "pytest":
            for word in words[1:]:
                if "/" in word and not word.startswith("-"):
                    assert (ROOT / word).exists() or (path.parent / word).exists(), word
        else:
            continue
        checked += 1
    assert checked or not listed


# Every block of commands by document and number, and how it is tried here. `dry`: its `kimi-k2` lines run in their dry
# form (`dry_form`); `parsed`: their options are checked by `test_commands_exist`, and why no more; else the test that
# replays the block. On 2026-11-28 README's blocks and all that need neither weights nor a device ran as printed in
# environments of exactly the install lines above them, and the examples that need no server too.
WEIGHTS = "parsed: needs published weights"
BLOCKS = {
    "README.md": (
        "test/test_docs.py::test_the_first_commands_run",
        "dry",
        "dry",
        "test/test_docs.py::test_the_first_commands_run",
    ),
    "cli.md": (
        WEIGHTS,
        WEIGHTS,
        WEIGHTS,
        "test/cli/test_rehearse.py::test_the_way_of_a_preset",
        "dry",
        "test/bench/test_tool_criteria.py::test_no_openai_server",
    ),
    "engines.md": (
        "parsed: vLLM's own command, published weights",
        "test/serving/test_http.py::test_",
        "test/serving/test_http.py::test_",
        "parsed: vLLM's own command, eight and sixteen GPUs",
        "test/serving/test_quality.py::test_every_field_of_both",
    ),
    "h200.md": (
        "test/parallel/test_h200_page.py::test_on_two_cpu_ranks",
        "parsed: compiles kernels",
        "test/parallel/test_h200_page.py::test_on_two_cpu_ranks",
        "test/parallel/test_h200_page.py::test_on_one_gpu",
        "test/parallel/test_h200_page.py::test_tuning_and_timing_say_that_they_need_a_gpu",
        "test/parallel/test_h200_page.py::test_tuning_and_timing_say_that_they_need_a_gpu",
        "parsed: the tests of a GPU themselves",
    ),
    "measurements.md": ("parsed: 22 GB",),
    "parsers.md": ("parsed: vLLM's own command, published weights",),
    "trainium.md": (
        "test/cli/test_rehearse.py::test_one_chip_without_a_chip",
        "dry",
        "test/nxd/test_readme_steps.py::test_",
        "test/nxd/test_readme_steps.py::test_",
        "test/nxd/test_readme_steps.py::test_",
        "test/nxd/test_readme_steps.py::test_",
        "test/nxd/test_vllm.py::test_",
        "test/nxd/test_vllm.py::test_",
        "parsed: makes the environment of make test-nxd",
        "test/nxd/test_commands.py::test_",
        "dry",
        "test/nxd/test_decode_layers.py::test_",
        "dry",
    ),
    "vision.md": ("test/test_docs.py::test_the_first_commands_with_images_run",),
    "vllm-neuron.md": ("dry",),
    "contrib/models/Kimi-K2-Instruct-0905/README.md": (
        "parsed: the folder's own examples, published weights",
        "parsed: the folder's own tests; unit tests are in make test-nxd",
    ),
}
TRIED = ("plan", "compile", "convert", "doctor", *(["serve"] if importlib.util.find_spec("vllm") else []))


def blocks_of(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def test_every_block_of_commands_is_in_the_table() -> None:
    counted = {str(path.relative_to(ROOT)).removeprefix("docs/"): len(blocks_of(path)) for path in DOCS}
    assert {name: count for name, count in counted.items() if count} == {name: len(of) for name, of in BLOCKS.items()}
    for how in (how for of in BLOCKS.values() for how in of if "::" in how):
        file, _, name = how.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), how


def dry_form(words: list[str], tiny: Path) -> list[str]:
    """Of a command on published weights the form that reads none and needs no device."""
    names = {"/models/Kimi-K2-Instruct-0905": "kimi-k2-instruct-0905", "moonshotai/Kimi-K2-Thinking": str(tiny)}
    names |= {"/models/Kimi-K2-Thinking": str(tiny), "/models/Kimi-K2.5": str(tiny)} if words[1] == "serve" else {}
    words = [names.get(word, word) for word in words[1:] if word not in ("--download", "--hlo-only")]
    if words[0] == "compile":
        kept = {"--preset", "--draft", "--draft-tokens"}
        words = [*words[:2], *(w for a, b in itertools.pairwise(words[2:]) if a in kept for w in (a, b))]
    at = words.index("--") if "--" in words else len(words)
    extra = {"convert": ["--dry-run"], "compile": ["--dry-run"], "serve": ["--dry-run", "--backend", "cpu"]}
    return [*words[:at], *extra.get(words[0], []), *words[at:]]


def test_blocks_in_their_dry_form(tiny: Path, shell_commands: ShellCommands) -> None:
    ran = 0
    for path in DOCS:
        of = BLOCKS.get(str(path.relative_to(ROOT)).removeprefix("docs/"), ())
        for how, block in zip(of, blocks_of(path), strict=bool(of)):
            if how != "dry":
                continue
            for words in shell_commands(f"```sh\n{block}```"):
                if words[0] != "kimi-k2" or words[1] not in TRIED:
                    continue
                done = kimi(*dry_form(words, tiny / "tiny"), status=None)
                assert done.exit_code == 0 or words[1] == "doctor", (words, done.output, done.exception)
                ran += 1
    assert ran > 8


def test_the_first_commands_run(tmp_path: Path, shell_commands: ShellCommands) -> None:
    """What the README says for any machine, in a directory of its own."""
    text = README.read_text(encoding="utf-8")
    commands = [
        words
        for section in SECTIONS
        for words in shell_commands(text[text.index(section) :].split("\n## ")[0])
        if words[0] != "pip"
    ]
    for words in commands:
        assert words[0] == "kimi-k2", words
        if words[1] == "rehearse":  # test/cli/test_rehearse.py
            continue
        arguments = [word.replace("/tmp/", f"{tmp_path}/") for word in words[1:]]
        kimi(*arguments)
    assert [words[1] for words in commands][-4:] == ["plan", "rehearse", "parity", "parity"]


def test_what_pip_is_told_to_install_is_there() -> None:
    """Extras of the project, its requirement files, and packages by names that pip reads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [line for path in DOCS for line in re.findall(r"^ *pip install (.*)$", path.read_text(), re.MULTILINE)]
    assert len(lines) >= 10
    for line in lines:
        words = iter(shlex.split(line.partition("&&")[0], comments=True))
        for word in words:
            if word in ("-r", "-c"):
                assert (ROOT / next(words)).is_file(), line
            elif word.startswith(".[") or ("[" in word and word.startswith("kimi-k2")):
                extras = word[word.index("[") + 1 : -1].split(",")
                assert set(extras) <= set(project["optional-dependencies"]), line
            elif not word.startswith(("-", ".")):
                Requirement(word)


def python_of(name: str, directory: Path) -> CodeType:
    """The Python of a document, with /tmp/ as another directory."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    path = directory / f"{Path(name).name}.py"  # kernels of NKI are read from their file
    path.write_text(code[1].replace("/tmp/", f"{directory}/"))
    return compile(path.read_text(), str(path), "exec")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints and files that the documents speak of."""
    directory = tmp_path_factory.mktemp("documents")
    for name, model in (("tiny", "kimi-k2-instruct-0905"), ("k25", "kimi-k2.5")):
        kimi("make-checkpoint", directory / name, "--model", model)
    Image.new("RGB", (60, 40), "red").save(directory / "a.png")
    frames = [Image.new("RGB", (32, 32), (level, 0, 0)) for level in (0, 80, 160, 240)]
    frames[0].save(directory / "b.gif", save_all=True, append_images=frames[1:], duration=250)
    return directory


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vision.md", ""),
        ("parsers.md", "weather"),
        ("../src/nki_emulator/README.md", ""),
        ("cli.md", "True"),
    ],
)
def test_python_of_the_documents_runs(
    name: str, says: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny)
    given: Json = {}
    exec(python_of(name, tiny), given)
    printed = capsys.readouterr().out
    assert bool(printed) == (not name.startswith("../src"))
    assert says in printed
    if name.startswith("../src"):
        assert given["twice"](np.full((4, 8), 3.0, np.float32)).tolist() == [[6.0] * 8] * 4


@pytest.mark.skipif(os.environ.get("KIMI_K2_SLOW") != "1", reason="slow: runs with KIMI_K2_SLOW=1")
def test_the_first_commands_with_images_run(
    tiny: Path, shell_commands: ShellCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block of docs/vision.md; `compile` needs NxD, and is test/nxd's."""
    monkeypatch.chdir(tiny)
    text = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
    commands = shell_commands(text[: text.index("```python")])[1:]  # behind pip's
    assert [words[1] for words in commands] == ["make-checkpoint", "generate", "chat", "plan", "compile"]
    for words in commands[:-1]:
        named = {"/tmp/k25": str(tiny / "again"), "b.mp4": "b.gif"}
        arguments = [named.get(word, word) for word in words[1:]]
        kimi(*arguments, input="/image a.png\nWhat is this?\n")
