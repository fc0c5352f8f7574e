"""One pass of each graph."""

from examples.generate import greedy


def test_smoke(app):
    tokens, seconds = greedy(app, [1, 2, 3], 3)
    assert len(tokens) == len(seconds) == 3
    assert all(0 <= token < app.config.vocab_size for token in tokens)


def test_prompt_of_one_token(app):
    assert len(greedy(app, [1], 2)[0]) == 2


def test_same_again(app):
    """The same answer, whatever was generated between."""
    prompt = list(range(100, 116))
    first, _ = greedy(app, prompt, 24)
    greedy(app, prompt[::-1], 24)
    assert greedy(app, prompt, 24)[0] == first
