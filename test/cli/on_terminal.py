"""Runs many commands in one process whose output is a terminal: `python on_terminal.py DIRECTORY`.

Prints `<<< NAME` in front of what each prints. The directory has a checkpoint of K2.5 in BF16.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from kimi_k2.cli.app import main
from kimi_k2.cli.display import JsonView, PanelsView, PlainView, TerminalView
from kimi_k2.cli.errors import errors_handled
from kimi_k2.errors import CheckpointError, DoesNotFitError, KimiK2Warning
from kimi_k2.terminal import new_console, say
from kimi_k2.tokenization.deltas import Content, Reasoning, ToolCallArguments, ToolCallStart

# Colours, a C1 control, an override, an isolate, a mark, a bell, a deletion, a carriage return, a line separator.
EVIL = "ev\x1b[31mil\x9b2J\u202eabc\u2066\u200f\x07\x7f\r\u2028"
NAME = EVIL.replace("\r", "")
ROOT = Path(sys.argv[1])
NUMBERS = count()
SOURCE = ROOT / "source"


def copy(name: str) -> Path:
    target = ROOT / f"{name}-{NAME}"
    shutil.copytree(SOURCE, target)
    return target


def edited(file: str, change: Callable[[dict[str, Any]], object], *command: str) -> Callable[[], None]:
    """A command on a checkpoint one of whose JSON files is changed."""

    def run() -> None:
        directory = copy(f"{file}{next(NUMBERS)}")
        path = directory / file
        raw = json.loads(path.read_text()) if path.exists() else {}
        change(raw)
        path.write_text(json.dumps(raw))
        main(command[0], arguments=[str(directory), *command[1:]])

    return run


def written(file: str, text: str, *command: str) -> Callable[[], None]:
    def run() -> None:
        directory = copy(f"{file}{next(NUMBERS)}")
        (directory / file).write_text(text, encoding="utf-8", errors="surrogatepass")
        main(command[0], arguments=[str(directory), *command[1:]])

    return run


def plain(*arguments: str) -> Callable[[], None]:
    return lambda: main(arguments[0], arguments=list(arguments[1:]))


def tensor_of_evil_name() -> None:
    directory = copy("tensor")
    shard = next(directory.glob("*-1-of-*.safetensors"))
    held = load_file(shard)
    held[f"model.{EVIL}.weight"] = next(iter(held.values())).clone()
    save_file(held, shard)
    (directory / "model.safetensors.index.json").unlink()
    for other in list(directory.glob("*.safetensors")):
        if other != shard:
            other.unlink()
    shard.rename(directory / "model.safetensors")
    main("inspect", arguments=[str(directory)])


def shard_of_evil_name(*options: str) -> Callable[[], None]:
    def run() -> None:
        directory = copy(f"shard{next(NUMBERS)}")
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        name = next(iter(index["weight_map"].values()))
        (directory / name).rename(directory / f"{NAME}.safetensors")
        index["weight_map"] = {k: f"{NAME}.safetensors" if v == name else v for k, v in index["weight_map"].items()}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        main("inspect", arguments=[str(directory), *options])

    return run


class _Reply:
    text = EVIL
    tokens, logprobs, finish_reason = 1, (), "stop"

    class message:  # noqa: N801
        reasoning_content = content = EVIL
        tool_calls = ()

        @staticmethod
        def to_openai() -> dict[str, str]:
            return {"content": EVIL}


DELTAS = [Reasoning(EVIL), Content(EVIL), ToolCallStart(0, "id", EVIL), ToolCallArguments(0, EVIL)]


def viewed(make: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        view, reply = make(), _Reply()
        view.show(0, reply, DELTAS)
        view.ended(0, reply)
        view.close({0: reply})

    return run


class _Prompt:
    ids = (1,)


def raised(error: Exception) -> Callable[[], None]:
    def run() -> None:
        with errors_handled():
            raise error

    return run


def warned(category: type[Warning]) -> Callable[[], None]:
    def run() -> None:
        with errors_handled():
            warnings.warn(EVIL, category, stacklevel=1)

    return run


def logged() -> None:
    """As NxDI logs: by a logger of its own whose handler we did not make."""
    log = logging.getLogger("Neuron")
    log.addHandler(logging.StreamHandler())
    with errors_handled():
        try:
            raise KeyError(EVIL)
        except KeyError:
            log.exception("Removing redundant keys: %s", EVIL)


def variable() -> None:
    os.environ[f"KIMI_K2_{NAME.upper()}"] = "1"
    try:
        main("doctor", arguments=[])
    finally:
        del os.environ[f"KIMI_K2_{NAME.upper()}"]


def preset(text: str) -> Callable[[], None]:
    def run() -> None:
        path = ROOT / f"{next(NUMBERS)}-{NAME}.yaml"
        path.write_text(text)
        main("plan", arguments=["kimi-k2-instruct-0905", "--preset", str(path)])

    return run


def messages(content: Any) -> Callable[[], None]:
    def run() -> None:
        path = ROOT / f"{next(NUMBERS)}-{NAME}.json"
        path.write_text(json.dumps(content) if not isinstance(content, str) else content)
        main("generate", arguments=[str(SOURCE), "--messages", str(path), "--max-new-tokens", "2"])

    return run


def field(*path: str, value: Any = EVIL) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        for name in path[:-1]:
            raw = raw[name]
        raw[path[-1]] = value

    return change


GENERATE = ("generate", "-p", "a", "--max-new-tokens", "2")
PLACES: dict[str, Callable[[], None]] = {
    "no such directory": plain("inspect", f"/nowhere/{NAME}"),
    "a file of that name": plain("inspect", f"/dev/null/{NAME}"),
    "a tensor": tensor_of_evil_name,
    "the title of inspect": lambda: main("inspect", arguments=[str(copy("title"))]),
    "a shard in a table": shard_of_evil_name("--tensors"),
    "a shard in JSON": shard_of_evil_name("--tensors", "--json"),
    "a shard that is not there": edited(
        "model.safetensors.index.json", field("weight_map", "lm_head.weight", value=f"{NAME}.safetensors"), "inspect"
    ),
    "a shard that is none": edited("model.safetensors.index.json", field("weight_map", "lm_head.weight"), "inspect"),
    "an index that is no JSON": written("model.safetensors.index.json", f'{{"{EVIL}', "inspect"),
    "a field": edited("config.json", field(EVIL), "inspect"),
    "model_type": edited("config.json", field("text_config", "model_type"), "inspect"),
    "architectures": edited("config.json", field("architectures", value=[EVIL]), "inspect"),
    "rope_type": edited("config.json", field("text_config", "rope_scaling", "type"), "inspect"),
    "a rope field": edited("config.json", field("text_config", "rope_scaling", EVIL), "inspect"),
    "quant_method": edited("config.json", field("quantization_config", value={"quant_method": EVIL}), "inspect"),
    "a module's expression": edited(
        "config.json",
        field("quantization_config", value={"quant_method": "fp8", "modules_to_not_convert": [f"({EVIL}"]}),
        "inspect",
    ),
    "hidden_act": edited("config.json", field("text_config", "hidden_act"), "inspect"),
    "vision_config": edited("config.json", field("vision_config", EVIL), "inspect"),
    "a note": edited("config.json", field(f"{NAME}_info", value={}), "inspect"),
    "the name in chat's first line": edited("config.json", field("_name_or_path", value=f"kimi-k2.5/{EVIL}"), "chat"),
    "generation_config.json": edited("generation_config.json", field(EVIL), *GENERATE),
    "eos_token_id": edited("generation_config.json", field("eos_token_id"), *GENERATE),
    "an idle temperature": edited("generation_config.json", field("temperature", value=0.3), *GENERATE),
    "tokenizer_config.json": edited("tokenizer_config.json", field(EVIL), *GENERATE),
    "a special token": edited("tokenizer_config.json", field("bos_token"), *GENERATE),
    "special_tokens_map.json": edited("special_tokens_map.json", field("pad_token"), *GENERATE),
    "a template's error": written("chat_template.jinja", f"{{{{ raise_exception('{EVIL}') }}}}", *GENERATE),
    "a template that is none": written("chat_template.jinja", f"{{% {EVIL} %}}", *GENERATE),
    "a picture": plain("generate", str(SOURCE), "-p", "a", "--image", f"/nowhere/{NAME}.png"),
    "preprocessor_config.json": edited(
        "preprocessor_config.json", field("media_proc_cfg", "image_mean"), *GENERATE, "--image", "/dev/null"
    ),
    "a role": messages([{"role": EVIL, "content": "a"}]),
    "messages that are none": messages(f'[{{"{EVIL}'),
    "a field of a preset": preset(f"{json.dumps(EVIL)}: 1\n"),
    "a preset that is none": preset(f"a: [{NAME.replace(chr(27), '')}\n"),
    "a preset that is not there": plain("plan", "kimi-k2-instruct-0905", "--preset", EVIL),
    "a draft": plain("generate", str(SOURCE), "-p", "a", "--draft", f"/nowhere/{NAME}"),
    "an option": plain("inspect", str(SOURCE), f"--{EVIL}"),
    "a value": plain("make-checkpoint", "/nowhere/x", "--set", f"{EVIL}=1"),
    "a choice": plain("generate", str(SOURCE), "--dtype", EVIL),
    "a variable": variable,
    "one reply": viewed(lambda: TerminalView(new_console())),
    "replies in panels": viewed(lambda: PanelsView(new_console(), [EVIL])),
    "replies as JSON": viewed(lambda: JsonView([_Prompt()], None, deltas=True)),  # type: ignore[list-item, arg-type]
    "a reply as it is": viewed(lambda: PlainView(1)),
    "a note of ours": warned(KimiK2Warning),
    "a note of others": warned(UserWarning),
    "a library's log": logged,
    "our error": raised(CheckpointError(EVIL, file=EVIL, tensor=EVIL)),
    "what does not fit": raised(DoesNotFitError(EVIL)),
    "an error of the disk": raised(OSError(5, "Input/output error", EVIL)),
    "a bug": raised(ValueError(EVIL)),
    "half a character": lambda: say("ev\ud800il"),
    "ranks": plain("verify", f"/nowhere/{NAME}"),
    "an output": plain("convert", str(SOURCE), f"/dev/null/{NAME}", "--tp", "1"),
}

if __name__ == "__main__":
    for place, call in PLACES.items():
        print(f"<<< {place}", flush=True)
        with suppress(SystemExit):
            call()
        sys.stdout.flush()
        sys.stderr.flush()
