"""Times on the device, held to the best that was measured before; see expected.yaml."""

from pathlib import Path

import pytest
import yaml

EXPECTED = Path(__file__).with_name("expected.yaml")
SLOWER = 1.1  # what a run may be slower than the best before
LENGTHS = [16, 32, 64, 128, 256, 512]


@pytest.fixture(scope="module")
def measured(app):
    from examples.benchmark import measure

    return measure(app, 128, LENGTHS)


def hold(app, name: str, value: float, *, more_is_better: bool = False) -> None:
    """Compare with what expected.yaml has of this layout, and write what is better or the first."""
    neuron = app.neuron_config
    form = neuron.quantization_type if neuron.quantized else "bf16"
    key = f"tp{neuron.moe_tp_degree}-ep{neuron.moe_ep_degree}-{form}-b{neuron.batch_size}-{neuron.seq_len}"
    text = EXPECTED.read_text()
    figures = yaml.safe_load(text) or {}
    best = figures.setdefault(key, {}).get(name)
    print(f"\n{key} {name}: {value:.2f}, best before {best}")
    ratio = 1.0 if best is None else best / value if more_is_better else value / best
    if best is None or ratio < 1:
        figures[key][name] = round(value, 2)
        head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
        EXPECTED.write_text(head + yaml.safe_dump(figures))
    assert ratio <= SLOWER


def test_ttft(app, measured):
    hold(app, "ttft_ms", measured["ttft_ms"])


def test_tpot(app, measured):
    hold(app, "tpot_ms", measured["tpot_ms"])


def test_throughput(app, measured):
    hold(app, "tokens_per_second", measured["tokens_per_second"], more_is_better=True)


def test_output_lengths(app, measured):
    """A step's time does not grow with the answer by more than a tenth within one bucket of the cache."""
    sweep = measured["tpot_ms_by_length"]
    assert sweep, "no length fits behind the prompt"
    print(f"\nTPOT in ms by output length: {sweep}")
    bucket = min(app.neuron_config.token_generation_buckets or [app.neuron_config.seq_len])
    within = [time for length, time in sweep.items() if measured["prompt_tokens"] + length <= bucket]
    assert not within or max(within) <= SLOWER * min(within)
