"""`verify-tools`' client, and the table of `vllm bench serve`'s results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.serving import markdown
from kimi_k2.bench.tools.verify import Endpoint

Serve = Callable[[Callable[[str, str | None, Any], tuple[int, str]]], str]


def test_no_openai_server(serve: Serve) -> None:
    for url in (serve(lambda *_: (200, "<html>")), "http://127.0.0.1:9"):
        with pytest.raises(SweepError, match="expected OpenAI's list of models"):
            Endpoint(url).model()


def test_the_url_and_the_key(serve: Serve) -> None:
    url = serve(lambda path, key, fields: (200, json.dumps({"data": [{"id": f"{path} {key}"}]})))
    for form in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
        assert Endpoint(form).model() == "/v1/models None"
    assert Endpoint(url, "key").model() == "/v1/models Bearer key"


def result(**changes: Any) -> dict[str, Any]:
    """As `vllm bench serve` 0.32 writes it (`vllm/benchmarks/serve.py`), without E2EL, its default."""
    times = {f"{kind}_{name}_ms": 1.0 for kind in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl")}
    fields = {"completed": 4, "num_prompts": 4, "model_id": "kimi", "max_concurrency": 2, "total_input_tokens": 256}
    rates = {"request_throughput": 1.0, "output_throughput": 32.0, "total_token_throughput": 96.0}
    return {**times, **fields, **rates, "total_output_tokens": 128, **changes}


def test_a_table_of_results(tmp_path: Path) -> None:
    files = []
    drawn: list[dict[str, Any]] = [{"max_concurrency": 16}, {"mean_ttft_ms": 12.345}, {"max_concurrency": None}]
    for number, changes in enumerate(drawn):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(result(**changes)))
    lines = markdown(files).splitlines()
    ones, rates = "1.00, 1.00, 1.00", "1.00 | 32.00 | 96.00"
    assert lines[4:] == [
        f"| kimi |  | 64.0 | 32.0 | {ones} | {ones} | {ones} |  | {rates} |",
        f"| kimi | 2 | 64.0 | 32.0 | 12.35, 1.00, 1.00 | {ones} | {ones} |  | {rates} |",
        f"| kimi | 16 | 64.0 | 32.0 | {ones} | {ones} | {ones} |  | {rates} |",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (result(completed=3), "1 of 4 requests failed"),
        ({"completed": 1}, "no field 'num_prompts'$"),
        ([], "vllm bench serve"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(content))
    with pytest.raises(SweepError, match=message):
        markdown([file])
