"""A tool loop against a server of `kimi-k2 serve DIRECTORY`: python examples/serve_with_tools.py URL MODEL QUESTION.

The model asks for the weather, this program answers, and the model answers the question.
"""

import json
import sys
import urllib.request
from typing import Any

TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def ask(url: str, model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The server's message to a conversation."""
    body = {"model": model, "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), header)
    with urllib.request.urlopen(request) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


url, model, question = sys.argv[1:]
messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
while True:
    message = ask(url, model, messages)
    messages.append(message)  # reasoning and calls go back as they came
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        city = json.loads(call["function"]["arguments"])["city"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"18 degrees and dry in {city}"})
print(message["content"])
