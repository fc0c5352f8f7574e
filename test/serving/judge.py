"""A model of a rank's sizes for servers on a GPU, and how far their greedy answers are from float32's."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.vision import MediaRows
from kimi_k2.model.decoder import KimiK2ForCausalLM

# The kernels' sizes, as one of eight ranks of the real model has them; few layers, experts and tokens.
SIZES = {
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 16,
    "moe_intermediate_size": 256, "intermediate_size": 512, "vocab_size": 1024,
}  # fmt: skip
ROUNDING = 0.1  # of a logit: the mean of an answer's gaps that rounding explains; another context's are 0.3 and more


CUT = ("num_attention_heads", "num_key_value_heads", "moe_intermediate_size", "intermediate_size")


def slice_config(name: str, ranks: int = 1, of: int = 8) -> KimiK2Config:
    """A published model's configuration with a rank's sizes on each of `ranks`: of `of` ranks, `SIZES` of eight."""
    sizes = {field: size * ranks * 8 // of if field in CUT else size for field, size in SIZES.items()}
    return KimiK2Config.load(name).model_copy(update={**sizes, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})


class Judge:
    """The plain model in float32 or 64; each token of an answer is judged after those that were chosen before it."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = KimiK2ForCausalLM.from_pretrained(directory, device=self.device, dtype=dtype)

    def logprobs(self, prompt: list[int], tokens: list[int], rows: MediaRows | None = None) -> Tensor:
        """[tokens, vocab_size]; a prompt may have media."""
        given = torch.tensor([prompt + tokens[:-1]], device=self.device)
        media = None if rows is None else (rows.padded(given.shape[1]).to(self.device), rows.features)
        logits: Tensor = self.model(given, media=media)
        return logits[0, len(prompt) - 1 :].log_softmax(-1).cpu()

    def chosen(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """[tokens], of those that were chosen."""
        return self.logprobs(prompt, tokens).gather(-1, torch.tensor(tokens)[:, None])[:, 0]

    def gaps(self, prompt: list[int], tokens: list[int], rows: MediaRows | None = None) -> Tensor:
        """How far below the best token each chosen one is."""
        logprobs = self.logprobs(prompt, tokens, rows)
        return logprobs.amax(-1) - logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]

    def errors(self, prompt: list[int], tokens: list[int], said: list[float]) -> Tensor:
        """Of the log-probabilities that the server gave for its tokens."""
        return (torch.tensor(said) - self.chosen(prompt, tokens)).abs()
