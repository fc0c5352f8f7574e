"""Synthetic tiktoken vocabularies for synthetic checkpoints: deterministic, any size, any text round-trips."""

from __future__ import annotations

import base64
import random
from itertools import product
from pathlib import Path

from kimi_k2.checkpoint.writer import write_json
from kimi_k2.errors import TokenizerError
from kimi_k2.files import replace_file
from kimi_k2.tokenization.special_tokens import NUM_SPECIAL_SLOTS, PAD, UNK, special_tokens
from kimi_k2.tokenization.template import CONFIG_NAME
from kimi_k2.tokenization.tokenizer import VOCABULARY_NAME

_COMMON = b" etaoinshrdlucmfwypvbgkjqxz"


def synthetic_ranks(base: int, *, seed: int = 0) -> dict[bytes, int]:
    """A vocabulary of `base` tokens: all bytes, then ever longer strings of common letters, each mergeable.

    A BPE merge joins two known tokens, so every prefix of a token is a token too. Seed 0 takes the letters by their
    frequency in English, any other seed in an order of its own.
    """
    if base < 256:
        raise TokenizerError(f"a vocabulary needs the 256 single bytes, got a size of {base}")
    letters_in_order = random.Random(seed).sample(_COMMON, len(_COMMON)) if seed else _COMMON
    tokens = [bytes([byte]) for byte in range(256)]
    length = 2
    while len(tokens) < base:
        for letters in product(letters_in_order, repeat=length):
            tokens.append(bytes(letters))
            if len(tokens) == base:
                break
        length += 1
    return {token: rank for rank, token in enumerate(tokens)}


def write_synthetic_vocabulary(directory: Path, vocab_size: int, *, seed: int = 0) -> None:
    """Write `tiktoken.model` and `tokenizer_config.json` for `vocab_size` tokens, 256 special slots included.

    Raises:
        TokenizerError: vocab_size is below 512 (256 bytes and 256 special slots).
    """
    base = vocab_size - NUM_SPECIAL_SLOTS
    ranks = synthetic_ranks(base, seed=seed)
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    replace_file(directory / VOCABULARY_NAME, text)
    added = {str(token): {"content": name, "special": True} for name, token in special_tokens(base).items()}
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": UNK,
        "pad_token": PAD,
        "tokenizer_class": "TikTokenTokenizer",
        "model_max_length": 1_000_000,
    }
    write_json(directory / CONFIG_NAME, config)
