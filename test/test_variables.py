"""Environment variables: a name that is nearly ours, a switch or a number of another form is refused by name."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_k2.cli import app
from kimi_k2.engine.device import check_device
from kimi_k2.errors import ConfigError, KernelError
from kimi_k2.variables import NAMES, PREFIX, switch, whole

ROOT = Path(__file__).parents[1]


def test_the_documents_table_lists_them() -> None:
    table = re.findall(rf"^\| `{PREFIX}(\w+)` \|", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert table == list(NAMES)


def test_a_misspelled_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {word for path in ROOT.glob("test/**/*.py") for word in re.findall(rf"\b{PREFIX}\w+", path.read_text())}
    for name in others - {"KIMI_K2_KERNEL", "KIMI_K2_VLLM_GPUS"}:
        monkeypatch.setenv(name, "")
    assert CliRunner().invoke(app, ["inspect", "/dev/null"]).exit_code == 1  # past the check
    for name in ("KIMI_K2_KERNEL", "KIMI_K2_VLLM_GPUS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "plain")
            refused = CliRunner().invoke(app, ["doctor"]).exception
            assert isinstance(refused, ConfigError) and refused.field == name


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
