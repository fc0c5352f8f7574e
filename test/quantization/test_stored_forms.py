"""Stored formats of others: each is what its own library says, loads, runs and converts.

The tiny checkpoints are written by the library that defines a format, where there is one on PyPI for a CPU
(compressed-tensors), or by its rule.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import kimi
from rewritten import rewritten, tensors_of
from safetensors.torch import save_file
from torch import Tensor

from kimi_k2.checkpoint.names import expected_tensors
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, UnexpectedTensorError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.apply import load_rank
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.quantization.modules import names_module
from kimi_k2.quantization.mxfp4 import pack_e2m1, unpack_e2m1
from kimi_k2.quantization.stored import StoredFormat, format_of, formats, parse_quantization
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config
from kimi_k2.tokenization.tokenizer import KimiTokenizer

IDS = torch.arange(3, 20)[None]
LIBRARY = (
    "fp8-channel",
    "fp8-tensor",
    "fp8-block",
    "nvfp4-packed",
    "mxfp4-packed",
    "int4-zero",
    "int4-channel",
    "int4",
)
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
FORMS = (*LIBRARY, *MODELOPT, "nvfp4", "mxfp4", "awq", "gptq", "int4-64", "int4-128", "toy-int8")
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def form(name: str, **fields: Any) -> StoredFormat:
    """A format, with groups that divide the tiny model's widths: of 32, or of what the name ends with."""
    if name.startswith("int4-") and name[5:].isdecimal():
        name, fields["group_size"] = "int4", int(name[5:])
    if name in MODELOPT:
        name, fields["quant_algo"] = "modelopt-fp8", name
    if "group_size" in formats()[name].model_fields:
        fields.setdefault("group_size", 32)
    return formats()[name](**fields)


def arguments(held: StoredFormat) -> dict[str, Any]:
    """The weights' arguments in a config group."""
    found: dict[str, Any] = held.to_hf_dict()["config_groups"]["group_0"]["weights"]
    return found


def by_the_library(held: StoredFormat, stored: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """compressed-tensors' decompression; scales in float32 are multiplied in float32."""
    base = pytest.importorskip("compressed_tensors.compressors.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments(held)))
    compressor = base.BaseCompressor.get_value_from_registry(held.to_hf_dict()["format"])
    weight: Tensor = compressor.decompress(dict(stored), scheme)["weight"]
    return weight.to(dtype)


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("shape", [(130, 256), (16, 7168)])
def test_values_are_the_librarys(name: str, shape: tuple[int, int]) -> None:
    held = form(name)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[0])[:, None]
    stored = held.quantize(weight)
    # The compressor of four-bit floats knows BF16 alone.
    dtype = torch.bfloat16 if "fp4" in name else torch.float32
    widened = {
        suffix: tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
        for suffix, tensor in stored.items()
    }
    assert torch.equal(held.dequantize(stored, dtype), by_the_library(held, widened, dtype))
    error = (held.dequantize(stored, torch.float32) - weight).norm() / weight.norm()
    # One step a row of 7168 Gaussian values, whose largest is four deviations out, is 4 / 7 of one.
    assert error < {"fp8": 0.04, "int4-channel": 4 / 7 / 12**0.5 * 1.1}.get("fp8" if "fp8" in name else name, 0.13)
    assert torch.equal(held.dequantize(held.hold(stored), dtype), held.dequantize(stored, dtype))
    assert {suffix: tensor.shape for suffix, tensor in held.hold(stored).items()} == {
        spec.name.removeprefix("x."): spec.shape for spec in held.held("x", *shape)
    }


@pytest.mark.parametrize(("name", "fields"), [("awq", {}), ("gptq", {}), ("gptq", {"checkpoint_format": "gptq_v2"})])
def test_awq_and_gptq_by_their_packing(name: str, fields: dict[str, Any]) -> None:
    """(code - zero point) times scale, with codes where AutoAWQ's gemm and AutoGPTQ's packers put them."""
    held = form(name, **fields)
    stored = held.quantize(torch.randn(24, 96, generator=torch.Generator().manual_seed(1)))
    assert {suffix: tensor.shape for suffix, tensor in stored.items()} == {
        spec.name.removeprefix("x."): spec.shape for spec in held.specs("x", 24, 96)
    }
    if name == "gptq":
        assert torch.equal(stored["g_idx"], torch.arange(96, dtype=torch.int32) // 32)
    order = [0, 4, 1, 5, 2, 6, 3, 7] if name == "awq" else list(range(8))  # the nibble of a word that a column is in

    def nibbles(words: Tensor) -> Tensor:
        return words[..., None] >> 4 * torch.arange(8) & 15

    words = nibbles(stored["qweight"])
    codes = words[..., order].flatten(1) if name == "awq" else words.transpose(1, 2).flatten(0, 1)
    zeros = nibbles(stored["qzeros"])[..., order].flatten(1) + (name == "gptq" and not fields)
    group = torch.arange(96) // 32
    expected = (codes - zeros[group]) * stored["scales"][group].float()
    assert torch.equal(held.dequantize(stored, torch.float32), expected.T)


def test_nvfp4_in_float32_is_the_librarys_division() -> None:
    """Its compressor rounds to BF16, which would hide a product with the inverse."""
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    from compressed_tensors.quantization import QuantizationArgs

    held = formats()["nvfp4-packed"]()
    stored = held.quantize(torch.randn(64, 512, generator=torch.Generator().manual_seed(2)))
    values, scale = unpack_e2m1(stored["weight_packed"]), stored["weight_scale"].float()
    args, whole = QuantizationArgs(**arguments(held)), stored["weight_global_scale"]
    expected = forward.dequantize(values, scale, args=args, dtype=torch.float32, global_scale=whole)
    assert torch.equal(held.dequantize(stored, torch.float32), expected)


def test_e2m1_is_the_librarys() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    codes = torch.arange(256, dtype=torch.uint8)[None]
    values = unpack_e2m1(codes)
    assert torch.equal(values, helpers.unpack_fp4_from_uint8(codes, 1, 512, torch.float32))
    assert torch.equal(pack_e2m1(values), codes)
    fp4 = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    from compressed_tensors.quantization import QuantizationArgs

    drawn = torch.cat([torch.arange(-64, 65) / 8, torch.randn(999) * 3])[None]
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=drawn.shape[1])
    expected = fp4.quantize(drawn, torch.ones(1, 1), None, args)
    assert torch.equal(unpack_e2m1(pack_e2m1(drawn)), expected.to(torch.float32))


def test_nvfp4_of_modelopt_by_its_rule() -> None:
    """Value times (e4m3 scale times float32 scale), as modelopt's NVFP4QTensor.dequantize has it."""
    held = formats()["nvfp4"]()
    stored = held.quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(1)))
    assert [stored[name].dtype for name in held.suffixes] == [torch.uint8, torch.float8_e4m3fn, torch.float32]
    assert stored["weight_scale_2"].shape == ()
    scales = stored["weight_scale"].float() * stored["weight_scale_2"]
    values = unpack_e2m1(stored["weight"]) * scales.repeat_interleave(16, dim=1)
    assert torch.equal(held.dequantize(stored, torch.float32), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block", *MODELOPT])
def test_fp8_by_its_rule(name: str, dtype: torch.dtype) -> None:
    """Value times scale, in float64; scales of each exporter's shapes, modelopt's of a block with four dimensions."""
    held = form(name)
    stored = held.quantize(torch.randn(130, 256, generator=torch.Generator().manual_seed(1)))
    stored["weight_scale"] = stored["weight_scale"].to(dtype)
    scale = stored["weight_scale"].double()
    shapes = {"fp8-tensor": (1,), "fp8-block": (2, 2), "FP8": (), MODELOPT[1]: (130,), MODELOPT[2]: (2, 1, 2, 1)}
    assert scale.shape == shapes[name]
    if name in ("fp8-block", "FP8_PB_WO"):
        scale = scale.reshape(2, 1, 2, 1).expand(2, 128, 2, 128).reshape(256, 256)[:130]
    wanted = stored["weight"].double() * (scale[:, None] if scale.dim() == 1 and len(scale) > 1 else scale)
    assert torch.equal(held.dequantize(stored, torch.float32), wanted.float())
    kept = held.hold(stored)
    assert [(kept[spec.name[2:]].dtype, kept[spec.name[2:]].shape) for spec in held.held("x", 130, 256)] == [
        (spec.dtype, spec.shape) for spec in held.held("x", 130, 256)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint in each format; all that knows of the toy's is its file."""
    importlib.import_module("toy_format")
    root = tmp_path_factory.mktemp("forms")
    for seed, name in enumerate(FORMS):
        preset = "kimi-k2.5" if name == "nvfp4" else "kimi-k2-instruct-0905"
        config = tiny_config(preset, num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2)
        config = config.model_copy(update={"quantization": form(name)})
        write_synthetic_checkpoint(root / name, config, seed=seed)
    return {name: root / name for name in FORMS}


def unquantized(raw: dict[str, Any]) -> None:
    for holder in (raw, raw.get("text_config", {})):
        holder.pop("quantization_config", None)


def plain_copy(source: Path, target: Path) -> Path:
    """The same model in float32."""
    config = KimiK2Config.from_pretrained(source)

    def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        modules: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            module, _, suffix = name.rpartition(".")
            modules.setdefault(module, {})[suffix] = tensor
        rewritten_tensors: dict[str, Tensor] = {}
        for module, stored in modules.items():
            held = format_of(config.quantization, module.removeprefix(config.tensor_prefix))
            if held.method is None or "vision_tower" in module or "mm_projector" in module:
                rewritten_tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}
            else:
                rewritten_tensors[f"{module}.weight"] = held.dequantize(stored, torch.float32)
        return rewritten_tensors

    return rewritten(source, target, dequantized, unquantized)


@torch.inference_mode()
def continued(model: Any, tokenizer: KimiTokenizer, text: str, count: int) -> str:
    """The likeliest tokens after a text."""
    ids = tokenizer.encode(text)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[-count:])


@pytest.mark.parametrize("name", FORMS)
def test_the_whole_way(written: dict[str, Path], tmp_path: Path, name: str) -> None:
    source = written[name]
    config = KimiK2Config.from_pretrained(source)
    assert config.quantization == form(name)
    # What `plan` and `inspect` count by, from the configuration alone.
    read = CheckpointReader.for_config(source, config, vision=True).tensors
    named = {spec.name: spec.nbytes for spec in expected_tensors(config)}
    assert named.items() <= {name: stored.nbytes for name, stored in read.items()}.items()
    reference = load_transformers_model(plain_copy(source, tmp_path / "plain"))
    with torch.inference_mode():
        expected = reference(IDS).logits
    for keep in (False, True):
        model = KimiK2ForCausalLM.from_pretrained(source, keep_quantized=keep)
        assert float((model(IDS) - expected).abs().max()) <= 1e-5
    layout = Layout(2, 1, "cuda", "stored")
    Presharder(source, tmp_path / "cuda", Layout(1, 1, "cuda", "stored")).run()
    rank = load_rank(tmp_path / "cuda", config, Layout(1, 1, "cuda", "stored"), 0, dtype=torch.float32)
    assert float((rank(IDS) - expected).abs().max()) <= 1e-2  # norms and embeddings are BF16 there
    if name not in ("fp8-block", "FP8_PB_WO", "int4-128"):  # whose blocks of 128 two ranks would cut
        Presharder(source, tmp_path / "two", layout).run()
    manifest = Presharder(source, tmp_path / "neuron", Layout(1, 2, experts="per_channel")).run()
    assert 0 < manifest["errors"]["total"]["relative_l2"] < 0.05
    generate = ["generate", str(source), "--raw", "-p", "hello", "--max-tokens", "4", "--dtype", "float32"]
    for command in (["inspect", str(source)], ["verify", str(tmp_path / "neuron")], generate):
        done = kimi(*command)
    assert done.stdout.strip() == continued(reference, KimiTokenizer.from_pretrained(source), "hello", 4).strip()


def test_nvfp4_as_modelopt_leaves_it_beside_an_older_quantization(written: dict[str, Path], tmp_path: Path) -> None:
    """hf_quant_config.json alone, INT4 left in `text_config`, scales of activations and cache among the tensors."""
    source, directory, prefix = written["nvfp4"], tmp_path / "modelopt", "language_model."
    names = f"{prefix}{EXPERT}.input_scale", f"{prefix}model.layers.0.self_attn.k_scale"
    older = KimiK2Config.from_preset("kimi-k2.5").to_hf_dict()["quantization_config"]

    def left(raw: dict[str, Any]) -> None:
        unquantized(raw)
        raw["text_config"]["quantization_config"] = older

    rewritten(source, directory, lambda held: held | {name: torch.ones(()) for name in names}, left)
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": []}
    about = directory / "hf_quant_config.json"
    about.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.39"}, "quantization": said}))
    config = KimiK2Config.from_pretrained(directory)
    assert config.quantization == formats()["nvfp4"]()
    assert config.kv_cache_fp8
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {**json.loads(about.read_text()), "quant_method": "modelopt_fp4"}  # as vLLM has it
    assert KimiK2Config.from_engine(SimpleNamespace(to_dict=lambda: raw)) == config
    model = KimiK2ForCausalLM.from_pretrained(directory)
    assert torch.equal(model(IDS), KimiK2ForCausalLM.from_pretrained(source)(IDS))
    tensors = tensors_of(source) | {f"{prefix}{EXPERT}.output_scale": torch.ones(())}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UnexpectedTensorError):
        KimiK2ForCausalLM.from_pretrained(directory)
    for change, field in (
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo"),
        ({"smooth": 1}, "smooth"),
        ({"group_size": 32}, "group_size"),
    ):
        about.write_text(json.dumps({"quantization": said | change}))
        with pytest.raises(ConfigError) as caught:
            KimiK2Config.from_pretrained(directory)
        assert (caught.value.field, caught.value.file) == (f"quantization.{field}", str(about))


def test_groups_in_several_formats(tmp_path: Path) -> None:
    """Attention in FP8 a channel, routed experts in NVFP4, the rest in BF16."""
    configs = {name: formats()[name]().to_hf_dict() for name in ("fp8-channel", "nvfp4-packed")}
    targets = (["re:.*self_attn.*"], ["re:.*mlp\\.experts.*"])
    groups = {
        f"group_{number}": {**config["config_groups"]["group_0"], "targets": target, "format": config["format"]}
        for number, (config, target) in enumerate(zip(configs.values(), targets, strict=True))
    }
    raw = {**configs["fp8-channel"], "format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    held = parse_quantization(raw)
    assert parse_quantization(held.to_hf_dict()) == held
    root = "model.layers.1"
    found = {name: held.of(f"{root}.{name}").name for name in ("self_attn.o_proj", "mlp.experts.0.up_proj", "mlp.gate",
             "mlp.shared_experts.up_proj")}  # fmt: skip
    assert list(found.values()) == ["fp8-channel", "nvfp4-packed", "bf16", "bf16"]
    config = tiny_config(num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2)
    config = config.model_copy(update={"quantization": held})
    write_synthetic_checkpoint(tmp_path / "mixed", config, seed=1)
    assert KimiK2Config.from_pretrained(tmp_path / "mixed") == config
    with torch.inference_mode():
        expected = load_transformers_model(plain_copy(tmp_path / "mixed", tmp_path / "plain"))(IDS).logits
    for keep in (False, True):
        model = KimiK2ForCausalLM.from_pretrained(tmp_path / "mixed", keep_quantized=keep)
        assert float((model(IDS) - expected).abs().max()) <= 1e-5
    for target in ("cuda", "neuron"):
        kimi("convert", tmp_path / "mixed", tmp_path / target, "--tp", "2", "--target", target)


def test_experts_of_one_layer_in_several_formats_are_not_stacked(tmp_path: Path) -> None:
    held = formats()["fp8"](ignore=("model.layers.1.mlp.experts.2",))
    config = tiny_config(num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2)
    write_synthetic_checkpoint(tmp_path / "some", config.model_copy(update={"quantization": held}), seed=1)
    KimiK2ForCausalLM.from_pretrained(tmp_path / "some")(IDS)
    with pytest.raises(ConfigError, match=r"experts\.2\.gate_proj is stored as bf16, .* as fp8"):
        KimiK2ForCausalLM.from_pretrained(tmp_path / "some", keep_quantized=True)


def test_an_expression_of_modules_has_a_limit_of_time() -> None:
    """It is a stranger's; 34 letters take seconds."""
    with pytest.raises(ConfigError, match=r"timed out"):
        names_module(("re:(.|..)+[x-z]$",), "compressed", "a" * 34)
