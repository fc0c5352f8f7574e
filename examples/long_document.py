"""Questions about a long text: python examples/long_document.py CHECKPOINT FILE QUESTION ...

The prompt is read 4,096 tokens at a time, which bounds the memory of its activations. The KV cache is kept, so the
second question reads only what is new.
"""

import sys
from pathlib import Path

from kimi_k2 import KimiK2

checkpoint, file, *questions = sys.argv[1:]
model = KimiK2.from_pretrained(checkpoint, chunk_size=4096, keep_cache=True)
messages = [{"role": "user", "content": Path(file).read_text(encoding="utf-8")}]
for question in questions:
    messages.append({"role": "user", "content": question})
    reply = model.chat(messages, max_new_tokens=64)
    print(f"{question}\n{reply.message.content}")
    messages.append(reply.message.to_openai())
