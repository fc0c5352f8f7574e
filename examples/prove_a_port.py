"""Two implementations, module by module: python examples/prove_a_port.py CHECKPOINT [BACKEND].

BACKEND is the port: transformers, cuda or neuron. The reference is the plain model on the CPU in float32. Compared are
every layer's attention, router, experts and output, and the logits, for a prompt and forced decode steps.
"""

import sys

from kimi_k2.config import KimiK2Config
from kimi_k2.parity.compare import compare
from kimi_k2.parity.logits import random_tokens
from kimi_k2.parity.run import run
from kimi_k2.parity.trace import Inputs

checkpoint, backend = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "transformers"
config = KimiK2Config.from_pretrained(checkpoint)
tokens = random_tokens(config.vocab_size, 24, 0)
inputs = Inputs(tokens[:16], tokens[16:], None, 16)
result = compare(
    run(backend, checkpoint, inputs, "float32"), run("cpu", checkpoint, inputs, "float32"), config, "float32"
)
print(f"{backend}: {'agrees with the reference' if result.passed else f'differs first at {result.first}'}")
sys.exit(not result.passed)
