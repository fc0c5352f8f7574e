"""Environment variables: a name that is none of ours, or a value of another form, is refused by name."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from command import kimi

from kimi_k2.engine.device import check_device
from kimi_k2.errors import ConfigError, KernelError
from kimi_k2.variables import FORMS, OF_TESTS, PREFIX, switch, whole

ROOT = Path(__file__).parents[1]


def test_the_documents_table_lists_them() -> None:
    table = re.findall(rf"^\| `{PREFIX}(\w+)` \|", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert table == list(FORMS)


MADE_UP = {"KIMI_K2_KERNEL", "KIMI_K2_VLLM_GPUS", "KIMI_K2_FOO", "KIMI_K2_", "KIMI_K2_kernels", "KIMI_K2_SLOWER"}


def test_unknown_names_are_refused_in_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [*ROOT.glob("test/**/*.py"), *ROOT.glob("contrib/**/*.py")]
    others = {word for path in files for word in re.findall(rf"\b({PREFIX}[A-Z_0-9]+)\b", path.read_text())}
    assert others - MADE_UP - {"KIMI_K2_MLA", PREFIX} <= {PREFIX + name for name in (*OF_TESTS, *FORMS)}
    for name in OF_TESTS:
        monkeypatch.setenv(PREFIX + name, "")
    kimi("inspect", "/dev/null", status=1)  # past the check
    for name in MADE_UP:
        with monkeypatch.context() as patch:
            patch.setenv(name, "plain")
            for command in ("doctor", "generate", "plan", "inspect", "convert"):
                refused = kimi(command, "x", "y", status=None).exception
                assert isinstance(refused, ConfigError) and refused.field == name


WRONG = {"EXPERTS": "zzz", "KERNELS": "=", "PARSERS": "yes", "SGLANG_GPU": "2", "VLLM_DECODE_GRAPHS": "on",
         "VLLM_GPU": "-1", "VLLM_GRAPH_TOKENS": "1e3"}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_no_command_runs_beside_a_wrong_value(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert WRONG.keys() | {"CACHE"} == FORMS.keys()
    monkeypatch.setenv(PREFIX + name, WRONG[name])
    for command in ("doctor", "generate", "plan"):
        refused = kimi(command, "x", status=None).exception
        assert isinstance(refused, ConfigError) and refused.field == PREFIX + name
        assert repr(WRONG[name]) in str(refused)


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (switch("KIMI_K2_PARSERS", True), whole("KIMI_K2_VLLM_GRAPH_TOKENS", 7)) == (True, 7)
    for value in ("no", "-1", "1e3"):
        monkeypatch.setenv("KIMI_K2_PARSERS", value)
        for read in (partial(switch, "KIMI_K2_PARSERS", True), partial(whole, "KIMI_K2_PARSERS", 7)):
            with pytest.raises(ConfigError) as caught:
                read()
            assert caught.value.field == "KIMI_K2_PARSERS"
    monkeypatch.setenv("KIMI_K2_PARSERS", "0")
    assert (switch("KIMI_K2_PARSERS", True), whole("KIMI_K2_PARSERS", 7)) == (False, 0)


@pytest.mark.parametrize("pins", ["nope=x", "route=wgmma", "all"])
def test_kernels_are_not_pinned_on_a_cpu(pins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_K2_KERNELS", "plain,route=plain,*=plain")
    check_device("cpu")
    monkeypatch.setenv("KIMI_K2_KERNELS", pins)
    with pytest.raises(KernelError, match=re.escape(repr(pins))):
        check_device("cpu")
