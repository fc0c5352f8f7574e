"""Answers in several languages say what they must, and do not repeat themselves."""

import pytest
from examples.generate import greedy

PROMPTS = {
    "english": ("What is the capital of France? Answer in one sentence.", ("Paris",)),
    "german": ("Was ist die Hauptstadt von Japan? Antworte in einem Satz.", ("Tokio", "Tokyo")),
    "chinese": ("中国的首都是哪里？用一句话回答。", ("北京",)),
    "arithmetic": ("What is 17 times 23? Answer with the number alone.", ("391",)),
    "code": ("Write a Python function that returns the sum of a list. Code alone.", ("def ",)),
}


def repeats(tokens: list[int], most: int = 4) -> bool:
    """Whether a token, or a run of up to eight, follows itself more than `most` times."""
    for size in range(1, 9):
        for start in range(len(tokens) - size * (most + 1) + 1):
            run = tokens[start : start + size]
            if all(tokens[start + size * n : start + size * (n + 1)] == run for n in range(1, most + 1)):
                return True
    return False


@pytest.mark.parametrize("name", PROMPTS)
def test_coherence(app, tokenizer, name):
    question, answers = PROMPTS[name]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    tokens, _ = greedy(app, prompt, 96, stop=(tokenizer.eos_token_id,))
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert any(answer in text for answer in answers), text
    assert not repeats(tokens), text
