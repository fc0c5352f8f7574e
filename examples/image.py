"""What is in a picture (K2.5 and newer): python examples/image.py CHECKPOINT PICTURE QUESTION."""

import sys

from kimi_k2 import KimiK2

checkpoint, picture, question = sys.argv[1:]
model = KimiK2.from_pretrained(checkpoint)
content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
print(model.chat([{"role": "user", "content": content}], thinking=False, max_new_tokens=32).text)
