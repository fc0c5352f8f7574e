"""Flash decoding (the latent cache split by positions) and sequence parallelism (prompts split); the plain model.

In CPU mode on gloo ranks, and executed from the lowered graphs. Each rank's own Python cannot show what torch_xla makes
of a collective: its release 2.9 has lost an all-reduce that was viewed after it had been written in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import SLOW, expected_logits, launch, plain_model, run_executed, sequences
from splits import BUCKETS, LAYOUTS, arguments, case_of

from kimi_k2.errors import ConfigError
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

TOLERANCE = 2e-5
CPU_MODE = (
    "flash TP2",
    "flash TP4 in groups of 2",
    "sequence TP2",
    "both TP2xEP2",
    pytest.param("flash TP2xEP2", marks=SLOW),
    pytest.param("sequence TP4", marks=SLOW),
)
LINES = ("flash part of the lines", "sequence part of the lines")
EXECUTED = (*LAYOUTS, *LINES, "flash several tokens", "sequence several tokens")


@pytest.mark.parametrize("name", CPU_MODE)
def test_cpu_mode(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Prompts of four lengths, together or each into its own line, and 16 steps of all."""
    case = case_of(name, sequences(4, 512))
    options = {key: value for key, value in arguments(name).items() if key not in BUCKETS}
    job = {"checkpoint": checkpoints["bf16"], "neuron_config": options, "cases": [case]}
    (logits,) = launch(job, tmp_path)
    plain = expected_logits(plain_model(checkpoints["bf16"]), case)
    print(f"\n{name}: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Every executed case's largest difference to the plain model, from one process."""
    directory = tmp_path_factory.mktemp("splits")
    write_synthetic_checkpoint(directory / "source", with_format(tiny_config(num_hidden_layers=2), "bf16"), seed=4)
    worker, output = Path(__file__).with_name("split_worker.py"), directory / "output.pt"
    run_executed([str(worker), str(directory / "source"), str(output)], ranks=4)
    result: dict[str, float] = torch.load(output)
    return result


@pytest.mark.parametrize("name", EXECUTED)
def test_executed(executed: dict[str, float], name: str) -> None:
    print(f"\n{name}: max |difference| to the plain model {executed[name]:.1e}")
    assert executed[name] <= TOLERANCE


FLASH, SEQUENCE = {"flash_decoding_enabled": True}, {"sequence_parallel_enabled": True}
LENGTHS = {"seq_len": 256, "max_context_length": 256}


@pytest.mark.parametrize(("given", "field"), [
    ({"num_cores_per_group": 2}, "num_cores_per_group"),
    (FLASH | {"num_cores_per_group": 3}, "num_cores_per_group"),
    (FLASH | {"num_cores_per_group": 1}, "num_cores_per_group"),
    (FLASH | {"seq_len": 258}, "seq_len"),
    (FLASH | {"token_generation_buckets": [130, 256]}, "token_generation_buckets"),
    (FLASH | {"context_encoding_buckets": [66, 256]}, "context_encoding_buckets"),
    (SEQUENCE | {"max_context_length": 254}, "max_context_length"),
    (SEQUENCE | {"context_encoding_buckets": [66, 256]}, "context_encoding_buckets"),
    (
        SEQUENCE | {"tensor_capture_config": {"modules_to_capture": ["norm"]}, "on_device_sampling_config": {}},
        "tensor_capture_config",
    ),
])  # fmt: skip
def test_what_does_not_divide_is_refused(given: dict[str, Any], field: str) -> None:
    neuron_config = environment.contrib("config").KimiK2NeuronConfig
    taken = {"tp_degree": 4, "enable_bucketing": True, **LENGTHS}
    neuron_config(**taken, **FLASH, **SEQUENCE)
    with pytest.raises(ConfigError, match=field):
        neuron_config(**{**taken, **given})
