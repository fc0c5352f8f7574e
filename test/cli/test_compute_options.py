"""In which dtypes a command computes: defaults on a GPU, the KV cache's own, what `--verbose` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import kimi

from kimi_k2.api import KimiK2, Neuron, compute_defaults
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.model.cache import kv_cache_dtype
from kimi_k2.model.decoder import KimiK2ForCausalLM

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("backend", "dtype", "keep", "expected"),
    [
        ("cuda", None, None, ("bfloat16", True)),
        ("cuda", None, False, ("bfloat16", False)),
        ("cuda", "float32", None, ("float32", False)),
        ("cpu", None, None, ("float32", False)),
        ("cpu", "bfloat16", True, ("bfloat16", True)),
    ],
)
def test_a_gpu_computes_with_kernels_unless_told(
    backend: str, dtype: str | None, keep: bool | None, expected: tuple[str, bool]
) -> None:
    assert compute_defaults(backend, dtype, keep) == expected


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("neuron", {"neuron": Neuron("trn2-tp32-ep2")}),
        ("neuron", {"backend": "neuron"}),
        ("keep_quantized", {"keep_quantized": False, "ranks": Path("ranks")}),
        ("ranks", {"backend": "neuron", "neuron": Neuron("trn2-tp32-ep2"), "ranks": Path("ranks")}),
        ("kv_cache_dtype", {"backend": "neuron", "neuron": Neuron("trn2-tp32-ep2"), "kv_cache_dtype": "fp8"}),
    ],
)
def test_options_of_another_backend_are_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught, KimiK2.open("nowhere", **options):
        pass
    assert caught.value.field == field


def with_scheme(checkpoint: Path, scheme: object) -> dict[str, object]:
    raw: dict[str, object] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    holder = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    assert isinstance(holder, dict)
    holder["quantization_config"]["kv_cache_scheme"] = scheme
    return raw


def test_the_checkpoints_own_cache_dtype(thinking: Path) -> None:
    config = KimiK2Config.from_dict(with_scheme(thinking, SCHEME))
    assert config.kv_cache_fp8 and KimiK2Config.from_dict(config.to_hf_dict()).kv_cache_fp8
    assert not KimiK2Config.from_dict(with_scheme(thinking, None)).kv_cache_fp8
    assert kv_cache_dtype("auto", config) == kv_cache_dtype("fp8", config) == torch.float8_e4m3fn
    assert kv_cache_dtype("bfloat16", config) == torch.bfloat16
    with torch.device("meta"):
        model = KimiK2ForCausalLM(config)
    assert model.kv_cache_dtype == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="int3"):
        kv_cache_dtype("int3", config)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"num_bits": 4}, "num_bits"), ({"type": "int"}, "type"), ({"strategy": "channel"}, "strategy")],
)
def test_another_scheme_is_named(thinking: Path, change: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_scheme.{field}"):
        KimiK2Config.from_dict(with_scheme(thinking, SCHEME | change))
    with pytest.raises(ConfigError, match="kv_cache_scheme"):
        KimiK2Config.from_dict(with_scheme(thinking, "fp8"))


def test_generate_says_what_it_computed_in(checkpoints: dict[str, Path]) -> None:
    given = ["generate", str(checkpoints["fp8"]), "-p", "Hello", "--max-new-tokens", "3", "--verbose"]
    plain = kimi(*given)
    assert "float32 on cpu, weights dequantized, KV cache float32" in plain.output
    fp8 = kimi(*given, "--kv-cache-dtype", "fp8_e4m3", "--keep-quantized")
    assert "float32 on cpu, weights as stored, KV cache float8_e4m3fn" in fp8.output
    assert "mla_absorbed_attention: plain" in fp8.output


def test_generate_in_batch_invariant_mode(fp8: Path) -> None:
    """The replies of the same prompts, alone and in any chunks; the mode ends with the command that asked for it."""
    given = "generate", fp8, "--max-new-tokens", "3", "--verbose", "-p", "Hello"
    normal, alone = (kimi(*given, *more) for more in ([], ["--batch-invariant"]))
    assert normal.exit_code == alone.exit_code == 0, alone.output
    with KimiK2.open(fp8, batch_invariant=True, chunk_size=2) as chunked:
        reply = chunked.chat([{"role": "user", "content": "Hello"}], max_new_tokens=3)
    assert reply.text.strip() == alone.stdout.strip()
    assert "batch-invariant mode" in alone.output
    assert "batch-invariant mode" not in normal.output
    kimi(*given, "--batch-invariant", "--backend", "neuron", "--on-cpu", status=2)
