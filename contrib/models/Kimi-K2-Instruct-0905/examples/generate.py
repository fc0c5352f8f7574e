"""Generate greedily with a compiled Kimi-K2.

python examples/generate.py /models/Kimi-K2-Instruct-0905 /compiled "The capital of France is"
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ENVIRONMENT = {
    "NEURON_LOGICAL_NC_CONFIG": "2",
    "NEURON_RT_VIRTUAL_CORE_SIZE": "2",  # the same under its older name
    "NEURON_RT_EXEC_TIMEOUT": "1800",  # seconds, default 30: the first execution loads a terabyte
    "LOCAL_WORLD_SIZE": "64",  # NxD's process groups read it
    "XLA_HANDLE_SPECIAL_SCALAR": "1",  # NxD's tests of quantized experts set both
    "UNSAFE_FP8FNCAST": "1",  # e4m3fn is taken for e4m3: no value above 240 is in the weights
}


def set_environment() -> None:
    """Variables that must be set before NxD is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def load(compiled: str):
    """The application of a compiled model, its weights on the device."""
    set_environment()
    from src import NeuronKimiK2ForCausalLM

    app = NeuronKimiK2ForCausalLM(compiled)
    app.load(compiled)
    return app


@torch.inference_mode()
def greedy(app, prompt: list[int], steps: int, stop: tuple[int, ...] = ()) -> tuple[list[int], list[float]]:
    """Token numbers of one sequence, and the seconds of each; the first is the time to the first token."""
    app.reset()
    tokens: list[int] = []
    seconds: list[float] = []
    ids, first = torch.tensor([prompt]), 0
    while len(tokens) < steps and (not tokens or tokens[-1] not in stop):
        began = time.perf_counter()
        # A step's own token is not in the mask of the cache.
        mask = torch.ones(1, first or len(prompt), dtype=torch.int32)
        more = {"sampling_params": torch.tensor([[1.0, 1.0, 1.0]])} if app.on_device_sampling else {}
        positions = torch.arange(first, first + ids.shape[1])[None]
        out = app(input_ids=ids, attention_mask=mask, position_ids=positions, seq_ids=torch.tensor([0]), **more)
        token = out.tokens.flatten()[-1] if app.on_device_sampling else out.logits[0, -1].argmax()
        tokens.append(int(token))
        seconds.append(time.perf_counter() - began)
        first += ids.shape[1]
        ids = torch.tensor([[tokens[-1]]])
    return tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory, for its tokenizer")
    parser.add_argument("compiled", help="what compile.py wrote")
    parser.add_argument("prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True)
    app = load(options.compiled)
    messages = [{"role": "user", "content": options.prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    tokens, _ = greedy(app, prompt, options.new_tokens, stop=(tokenizer.eos_token_id,))
    print(tokenizer.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
