"""The examples run, on synthetic weights, and the Python of `kimi_k2` says what the command line says."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import kimi
from PIL import Image
from server import serving

import kimi_k2
from kimi_k2.errors import GenerationError

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
    return capsys.readouterr().out


def test_each_example_runs(
    fp8: Path, k25_int4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = {"serve_with_tools.py"}

    def run(name: str, *arguments: object) -> str:
        ran.add(name)
        return example(name, capsys, monkeypatch, *arguments)

    rows = run("plan_a_purchase.py", "kimi-k2-thinking", "h200-tp8", "h200-tp1").splitlines()
    assert any("h200-tp8" in row and "fits" in row for row in rows)
    assert any("h200-tp1" in row and "does not fit" in row for row in rows)
    tiny = tmp_path / "tiny.yaml"
    degrees = "tp_degree: 1\nmoe_tp_degree: 1\nmoe_ep_degree: 1\nbatch_size: 1\n"
    tiny.write_text(f"instance: h200\nexperts: stored\n{degrees}seq_len: 64\nmax_context_length: 64\n")
    assert "1 files" in run("convert_and_verify.py", fp8, tmp_path / "ranks", tiny)
    assert "agrees" in run("prove_a_port.py", fp8, "transformers")
    document = tmp_path / "document.txt"
    document.write_text("A long text. " * 40)
    assert "Why?" in run("long_document.py", fp8, document, "What?", "Why?")
    Image.new("RGB", (60, 40), "red").save(tmp_path / "a.png")
    assert run("image.py", k25_int4, tmp_path / "a.png", "What is this?")
    assert ran == {path.name for path in EXAMPLES.glob("*.py")}


def weather(path: str, authorization: str | None, fields: Any) -> tuple[int, str]:
    """Asks for the weather once, then says what it was told."""
    last = fields["messages"][-1]
    message: dict[str, Any] = {"role": "assistant", "content": f"It is {last['content']}."}
    if last["role"] == "user":
        called = {"name": "weather", "arguments": '{"city": "Bern"}'}
        message["tool_calls"] = [{"id": "functions.weather:0", "type": "function", "function": called}]
    return 200, json.dumps({"choices": [{"message": message}]})


def test_the_tool_loop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(weather) as url:
        assert (
            example("serve_with_tools.py", capsys, monkeypatch, url, "kimi", "?")
            == "It is 18 degrees and dry in Bern.\n"
        )


def test_python_and_the_command_line_say_the_same(thinking: Path) -> None:
    model = kimi_k2.KimiK2.from_pretrained(str(thinking))
    asked = ["generate", str(thinking), "-p", "Hello", "--max-new-tokens", "6"]
    assert kimi(*asked).stdout.strip() == model.chat("Hello", max_new_tokens=6).text.strip()
    replies = model.generate(["abc", "Hello there"], max_new_tokens=4)
    assert [reply.tokens for reply in replies] == [4, 4]
    raw = kimi(*asked[:2], "--raw", "-p", "abc", "--max-new-tokens", "4", status=None)
    assert raw.stdout.strip() == replies[0].text.strip()
    with pytest.raises(GenerationError, match="no such field: max_length"):
        model.generate("abc", max_length=4)


def test_plan_is_a_function_whatever_was_imported_before() -> None:
    report = kimi_k2.plan("kimi-k2-instruct-0905", "h200-tp8")
    printed = kimi("plan", "kimi-k2-instruct-0905", "--preset", "h200-tp8", "--json", status=None)
    assert json.loads(printed.stdout)["tpot"]["bound"] == report["tpot"]["bound"]
    code = "import sys, kimi_k2; from kimi_k2 import plan; assert callable(plan); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
