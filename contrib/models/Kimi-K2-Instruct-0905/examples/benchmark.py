"""Time a compiled Kimi-K2: to the first token, per output token, and over answers of several lengths.

python examples/benchmark.py /compiled
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.generate import greedy, load


def measure(app, prompt_length: int, lengths: list[int], runs: int = 5) -> dict:
    """Milliseconds; a step's time is without the first, which is the prefill's.

    Args:
        app: the loaded application.
        prompt_length: tokens of the prompt; longer than what is compiled is cut.
        lengths: tokens of answers; those that do not fit behind the prompt are left out.
        runs: prompts for the time to the first token.
    """
    neuron = app.neuron_config
    prompt = [100 + index % 1000 for index in range(min(prompt_length, neuron.max_context_length))]
    greedy(app, prompt, 2)  # not timed: the first pass of each graph
    first = [1e3 * greedy(app, prompt, 1)[1][0] for _ in range(runs)]
    sweep = {}
    steps: list[float] = []
    for length in lengths:
        if len(prompt) + length > neuron.seq_len or length < 2:
            continue
        _, seconds = greedy(app, prompt, length)
        steps = [1e3 * second for second in seconds[1:]]
        sweep[length] = statistics.median(steps)
    if not sweep:
        raise SystemExit(f"no length of {lengths} fits behind {len(prompt)} tokens in seq_len {neuron.seq_len}")
    # TPOT is of the last, longest answer.
    ordered = sorted(steps)
    return {
        "prompt_tokens": len(prompt),
        "ttft_ms": statistics.median(first),
        "tpot_ms": statistics.median(steps),
        "tpot_p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "tokens_per_second": 1e3 / statistics.fmean(steps),
        "tpot_ms_by_length": sweep,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compiled", help="what compile.py wrote")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    options = parser.parse_args()
    print(json.dumps(measure(load(options.compiled), options.prompt_length, options.lengths), indent=2))


if __name__ == "__main__":
    main()
