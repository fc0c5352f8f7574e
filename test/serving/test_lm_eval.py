"""EleutherAI's lm_eval against vLLM's server with our model: what it scores is what the model wrote.

The recipe of docs/engines.md on a checkpoint that answers "=7" to everything. KIMI_K2_LM_EVAL is its command, which
may be of another environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest

from kimi_k2.tokenization.special_tokens import IM_END, IM_MIDDLE

needs.engine("vllm")
COMMAND = os.environ.get("KIMI_K2_LM_EVAL") or shutil.which("lm_eval")
if COMMAND is None:
    pytest.skip("needs lm_eval (docs/engines.md), or KIMI_K2_LM_EVAL", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).with_name("lm_eval")
SEVENS = 3 / 5  # of the questions in sums.jsonl, those whose answer is 7


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A directory with the tokenizer alone, as lm_eval's transformers may not know the config, and the server's URL."""
    from scripted import write_scripted_checkpoint
    from vllm_server import serving

    directory = tmp_path_factory.mktemp("served")
    write_scripted_checkpoint(directory / "model", f"=7{IM_END}", after=(":", IM_MIDDLE))
    with serving(directory / "model", directory / "log") as url:
        (directory / "tokenizer").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy2(directory / "model" / name, directory / "tokenizer" / name)
        yield directory / "tokenizer", url


@pytest.mark.parametrize(
    ("model", "path", "task", "options"),
    [
        ("local-completions", "completions", "kimi_k2_sums", ()),
        ("local-completions", "completions", "kimi_k2_choice", ()),
        ("local-chat-completions", "chat/completions", "kimi_k2_sums", ("--apply_chat_template",)),
    ],
)
def test_score(
    model: str, path: str, task: str, options: tuple[str, ...], served: tuple[Path, str], tmp_path: Path
) -> None:
    directory, url = served
    arguments = f"model=kimi,base_url={url}/{path},tokenizer={directory},tokenizer_backend=huggingface,max_length=2048"
    assert COMMAND is not None
    command = [COMMAND, "--model", model, "--model_args", arguments, "--tasks", task, "--include_path", str(TASKS),
               "--output_path", str(tmp_path), *options]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **offline, "HF_HOME": str(tmp_path / "cache"), "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)  # the command may be of another environment
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (written,) = tmp_path.rglob("results_*.json")
    (result,) = json.loads(written.read_text())["results"].values()
    scores = [result[name] for name in ("exact_match,strict-match", "acc,none") if name in result]
    assert scores == [pytest.approx(SEVENS)]
