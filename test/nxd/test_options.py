"""Every option of NxDI is in the table once, and what the model does not follow is refused by name."""

from __future__ import annotations

from typing import Any

import environment
import pytest

from kimi_k2.errors import ConfigError

options: Any = environment.contrib("options") if environment.missing() is None else None
DRAFT: dict[str, Any] = {
    **dict.fromkeys(("enable_fused_speculation", "enable_eagle_speculation", "is_eagle3"), True),
    "speculation_length": 4, "on_device_sampling_config": {},
}  # fmt: skip
OTHER = {None: "other", False: True, True: False, "right": "left", "f32": "bf16"}


def other(taken: tuple[Any, ...]) -> Any:
    """A value that is not taken."""
    first = taken[0]
    return first + 2 if type(first) is int else OTHER.get(first, "other")


def test_the_table_lists_every_field_once() -> None:
    from neuronx_distributed_inference.models.config import MoENeuronConfig

    fields = set(vars(MoENeuronConfig()))
    tables = [set(options.TESTED), set(options.INHERITED), set(options.REFUSED)]
    assert sum(len(table) for table in tables) == len(set.union(*tables))
    assert fields - set.union(*tables) == set()
    older = {"enable_ve_data_parallel"} - fields  # NxDI 0.8 (SDK 2.28) lacks it
    assert set.union(*tables) - fields == older


def test_defaults_are_taken() -> None:
    from neuronx_distributed_inference.models.config import MoENeuronConfig

    options.check(vars(MoENeuronConfig()))


def test_a_field_of_a_newer_release_is_inherited_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(options, "_defaults", lambda: {"new_field": 7})
    with caplog.at_level("INFO"):
        options.check({"new_field": 7})
    assert "new_field: 7" in caplog.text
    with pytest.raises(ConfigError, match=r"new_field.*expected 7, the release's default, got 8"):
        options.check({"new_field": 8})
    with pytest.raises(ConfigError, match="no such option"):
        options.check({"other_field": 7})


def test_what_is_not_followed_is_refused() -> None:
    config = environment.contrib("config")
    for name, (taken, _) in options.REFUSED.items():
        with pytest.raises(ConfigError, match=name):
            config.KimiK2NeuronConfig(**{name: other(taken)})


@pytest.mark.parametrize(("given", "field"), [
    ({"no_such_option": 1}, "no_such_option"),
    ({"output_logits": True}, "output_logits"),
    ({"tp_degree": 2, "world_size": 4}, "world_size"),
    ({"async_mode": True}, "on_device_sampling_config"),
    ({"is_continuous_batching": True, "batch_size": 2, "apply_seq_ids_mask": False}, "apply_seq_ids_mask"),
    ({"is_eagle3": True}, "enable_fused_speculation"),
    ({**DRAFT, "is_eagle3": False}, "is_eagle3"),
    ({**DRAFT, "enable_eagle_speculation": False}, "enable_eagle_speculation"),
    ({**DRAFT, "speculation_length": 0}, "speculation_length"),
    ({**DRAFT, "on_device_sampling_config": None}, "on_device_sampling_config"),
    ({**DRAFT, "sequence_parallel_enabled": True}, "sequence_parallel_enabled"),
    ({**DRAFT, "output_logits": True}, "output_logits"),
    ({**DRAFT, "async_mode": True}, "async_mode"),
    ({"blockwise_matmul_config": {"use_shard_on_block_dynamic_while": True}}, "use_shard_on_block_dynamic_while"),
])  # fmt: skip
def test_combinations(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        environment.contrib("config").KimiK2NeuronConfig(**given)
