"""The openai client against SGLang's server with our parser of tool calls in it.

SGLang 0.5.23 starts on a CPU with stand-ins for what PyPI lacks there: `sgl_kernel`, whose CPU build is compiled from
source, and torchvision without CUDA. It has no MLA on a CPU without that build, so a Llama of two layers that add
nothing writes the text; with Kimi-K2's tokenizer and chat template.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs sglang (docs/engines.md): not importable here: sglang", allow_module_level=True)

USER: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
# Any name may be imported; SGLang calls none of them on the way that is taken here.
STAND_IN = """
class _Name(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class StandIn(metaclass=_Name):
    def __init__(self, *_, **__):
        raise RuntimeError("a stand-in was called")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn
"""
STOOD_IN = {
    "sgl_kernel": ("",),
    "torchvision": (
        "",
        "io",
        "ops",
        "transforms",
        "transforms/functional",
        "transforms/v2",
        "transforms/v2/functional",
    ),
}


def write_stand_ins(directory: Path) -> None:
    """Of the packages that cannot be imported."""
    for package, modules in STOOD_IN.items():
        if importlib.util.find_spec(package) is None:
            for module in modules:
                (directory / package / module).mkdir(parents=True, exist_ok=True)
                (directory / package / module / "__init__.py").write_text('__version__ = "0"\n' + STAND_IN)


def write_scripted_llama(directory: Path, kimi: Path) -> None:
    """A Llama with embeddings, head and tokenizer of a scripted checkpoint."""
    weights: dict[str, torch.Tensor] = {}
    for file in kimi.glob("*.safetensors"):
        weights |= load_file(file)
    config = json.loads((kimi / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], 256, 2
    made = {name: weights[name] for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")}
    for number in range(layers):
        for name, rows, columns in (
            *((f"self_attn.{which}_proj", hidden, hidden) for which in "qkvo"),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            made[f"model.layers.{number}.{name}.weight"] = torch.zeros(rows, columns, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{number}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    directory.mkdir()
    save_file(made, directory / "model.safetensors", metadata={"format": "pt"})
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 12, "num_key_value_heads": 12, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", **{name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(llama))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(kimi / name, directory / name)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server whose model writes `scripted.SCRIPT`."""
    import openai
    from scripted import write_scripted_checkpoint
    from vllm_server import free_port, wait_for

    directory, port = tmp_path_factory.mktemp("served"), free_port()
    write_scripted_checkpoint(directory / "kimi")
    write_scripted_llama(directory / "model", directory / "kimi")
    write_stand_ins(directory / "stand_ins")
    log = directory / "log"
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(directory / "model"), "--device", "cpu",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "kimi", "--dtype", "bfloat16",
        "--max-total-tokens", "4096", "--context-length", "2048", "--skip-server-warmup",
        "--tool-call-parser", "kimi_k2_stream", "--reasoning-parser", "kimi_k2",
    ]  # fmt: skip
    path = os.pathsep.join((str(directory / "stand_ins"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path}
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=written, stderr=written, env=environment, start_new_session=True)
    try:
        wait_for(server, f"http://127.0.0.1:{port}/health_generate", log)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        assert "stand-in was called" not in log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "kimi", "messages": USER, "max_tokens": 50, "temperature": 0, "tools": TOOLS, **options}
    return client.chat.completions.create(**given)


def test_tool_call(client: Any) -> None:
    choice = chat(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Why"
    assert choice.message.content == "So"
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "run", "{}")
    assert call.id


def test_streamed_tool_call(client: Any) -> None:
    reasoning = content = arguments = ""
    starts, finished = [], []
    for chunk in chat(client, stream=True):
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            starts += [(call.index, call.function.name)] if call.function.name else []
            arguments += call.function.arguments or ""
        finished += [choice.finish_reason] if choice.finish_reason else []
    assert (reasoning, content, arguments) == ("Why", "So", "{}")
    assert starts == [(0, "run")]
    assert finished == ["tool_calls"]
