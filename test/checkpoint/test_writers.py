"""Checkpoints that other tools wrote: the same logits as the source, or refused by the tool's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import kimi
from rewritten import FILES, rewritten, tensors_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig, Form
from kimi_k2.drafts.head import Eagle3Head
from kimi_k2.engine.drafters import DraftCache
from kimi_k2.errors import CheckpointError, ConfigError, KimiK2Error, KimiK2Warning
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.quantization.modules import names_module
from kimi_k2.spellings import plain_name, spelled, writer
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format
from kimi_k2.synthetic.draft import draft_fields, write_synthetic_head

transformers = pytest.importorskip("transformers")

IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("writers") / "k2.5"
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2.5", num_hidden_layers=2), "bf16"), seed=3)
    return directory


def renamed(source: Path, target: Path, name: Callable[[str], str], **fields: Any) -> Path:
    return rewritten(
        source, target, lambda held: {name(key): tensor for key, tensor in held.items()}, lambda raw: raw.update(fields)
    )


def same_logits(source: Path, other: Path) -> bool:
    first, second = (KimiK2ForCausalLM.from_pretrained(path)(IDS) for path in (source, other))
    return torch.equal(first, second)


def same_tower(source: Path, other: Path) -> bool:
    first, second = (VisionModel.from_pretrained(path, dtype=torch.float32).state_dict() for path in (source, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def inspected(directory: Path) -> str:
    done = kimi("inspect", directory, "--json")
    return str(json.loads(done.stdout)["names"])


def nvidia(name: str) -> str:
    """NVFP4 of K2.5: SGLang's pull request 18370, vLLM's 33346."""
    return name.replace("language_model.model.layers.", "language_model.layers.")


def in_memory(name: str) -> str:
    """What transformers 5 calls the same tensors once they are loaded."""
    for theirs, other in (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")):
        name = other + name.removeprefix(theirs) if name.startswith(theirs) else name
    return f"model.{name}" if name.startswith(("vision_tower.", "mm_projector.")) else name


@pytest.mark.parametrize(
    ("spelling", "whose"),
    [(str, "Moonshot's K2.5"), (nvidia, "NVIDIA's K2.5"), (in_memory, "transformers' K2.5 in memory"),
     (plain_name, "Moonshot's K2")],
)  # fmt: skip
def test_names_of_other_writers(k25: Path, tmp_path: Path, spelling: Callable[[str], str], whose: str) -> None:
    directory = renamed(k25, tmp_path / "other", spelling)
    assert same_logits(k25, directory)
    assert inspected(directory) == whose
    assert same_tower(k25, directory)
    for target in ("cuda", "neuron"):
        kimi("convert", directory, tmp_path / target, "--tp", "1", "--target", target)


def test_lists_and_tensors_share_the_table(k25: Path) -> None:
    for stored in tensors_of(k25):
        name = plain_name(stored)
        assert plain_name(name) == name
        for other in spelled(name):
            assert plain_name(other) == name
            assert names_module((other.rpartition(".")[0],), "compressed", name.rpartition(".")[0])
    assert writer(["language_model.layers.0.x", "language_model.model.norm.weight"]) == "NVIDIA's K2.5"


def test_a_tensor_under_two_names_is_refused(k25: Path, tmp_path: Path) -> None:
    directory = renamed(k25, tmp_path / "two", str)
    held = load_file(directory / "model.safetensors")
    held["lm_head.weight"] = held["language_model.lm_head.weight"].clone()
    save_file(held, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="already in") as error:
        KimiK2ForCausalLM.from_pretrained(directory)
    assert error.value.tensor == "lm_head.weight"


def by_transformers(source: Path, target: Path, **options: Any) -> Path:
    """K2.5 loaded and saved by transformers' own class."""
    if not hasattr(transformers, "Kimi_K25ForConditionalGeneration"):
        pytest.skip("this transformers has no kimi_k25")
    transformers.Kimi_K25ForConditionalGeneration.from_pretrained(source).save_pretrained(target, **options)
    for file in FILES[:3]:
        (target / file).write_bytes((source / file).read_bytes())
    return target


def test_the_round_trip_of_transformers(k25: Path, tmp_path: Path) -> None:
    saved = by_transformers(k25, tmp_path / "saved")
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    assert same_logits(k25, saved)
    assert inspected(saved).startswith("transformers'")
    assert same_tower(k25, saved)
    kimi("generate", saved, "-p", "Hello", "--max-new-tokens", "3")


def test_transformers_form_in_memory_is_refused_by_its_name(k25: Path, tmp_path: Path) -> None:
    saved = by_transformers(k25, tmp_path / "memory", save_original_format=False)
    with pytest.raises(CheckpointError, match="transformers' form in memory"):
        KimiK2ForCausalLM.from_pretrained(saved)


def test_the_round_trip_of_transformers_k2(bf16: Path, tmp_path: Path) -> None:
    source = bf16
    raw = json.loads((source / "config.json").read_text())
    config = transformers.DeepseekV3Config(**{key: value for key, value in raw.items() if key != "model_type"})
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(source, config=config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    assert same_logits(source, tmp_path / "saved")


@pytest.mark.parametrize("field", ["quantization", "quantization_config"])
def test_mlx_is_refused_by_its_name(k25: Path, tmp_path: Path, field: str) -> None:
    directory = renamed(k25, tmp_path / "mlx", str, **{field: {"group_size": 64, "bits": 4, "mode": "affine"}})
    with pytest.raises(ConfigError, match=rf"field '{field}': MLX's stored form"):
        KimiK2Config.from_pretrained(directory)


def test_an_adapter_beside_the_weights_is_refused(k25: Path, tmp_path: Path) -> None:
    directory = renamed(k25, tmp_path / "adapted", str)
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    for command in (["inspect"], ["generate", "-p", "x"], ["convert", str(tmp_path / "out"), "--tp", "1"]):
        refused = kimi(command[0], directory, *command[1:], status=None).exception
        assert isinstance(refused, ConfigError) and refused.file == str(directory / "adapter_config.json")


def test_a_derivatives_note_is_a_warning(k25: Path, tmp_path: Path) -> None:
    note = {"source_model": "m", "experts_per_layer": 16}
    directory = renamed(k25, tmp_path / "derived", str, k2_mini_info=note)
    with pytest.warns(KimiK2Warning, match="'k2_mini_info' is taken for a note"):
        assert same_logits(k25, directory)
    # What could be the model's own numbers is none.
    for name, value in (("k2_mini_info", {"n_routed_experts": 16}), ("k2_mini_info", 16), ("k2_mini", note)):
        raw = json.loads((k25 / "config.json").read_text()) | {name: value}
        with pytest.raises(ConfigError, match=f"field '{name}': not known"):
            KimiK2Config.from_dict(raw)


# As Model-Optimizer's exporter writes a head's card (export/plugins/hf_spec_configs.py).
MODELOPT = {
    "eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "layers", "told"),
    [([1, 29, 57], (2, 30, 58), True), ([2, 30, 58], (2, 30, 58), False), ([0, 1, 3], (0, 1, 3), False),
     ([1, 29, 61], (1, 29, 61), False), ([1, 29, 60], (2, 30, 61), True)],
)  # fmt: skip
def test_layer_ids_of_a_head_by_the_convention_that_they_tell(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, ids: list[int], layers: tuple[int, ...], told: bool
) -> None:
    target = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    fields = draft_fields(target, "mla", eagle_config={**MODELOPT, "eagle_aux_hidden_state_layer_ids": ids})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = DraftConfig.from_pretrained(tmp_path)
    config.fit(target)
    assert config.layers(target) == layers
    assert [str(warning.message) for warning in recwarn if "taken for outputs" in str(warning.message)] == [
        str(warning.message) for warning in recwarn if told
    ]
    assert len(recwarn) == int(told)
    for reading, shift in (("inputs", 0), ("outputs", 1)):
        config = DraftConfig.from_pretrained(tmp_path, reading)  # type: ignore[arg-type]
        assert config.layers(target) == tuple(number + shift for number in ids)
    assert len(recwarn) == int(told)


# Fields of Model-Optimizer's two templates (export/plugins/hf_spec_configs.py): each is the head's, else the target's,
# else null; and those of its heads' configurations (speculative/eagle/default_config.py) that no target has.
BOTH = (
    "attention_bias attention_dropout bos_token_id eos_token_id hidden_act hidden_size initializer_range"
    " intermediate_size max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads pad_token_id"
    " pretraining_tp rms_norm_eps rope_scaling rope_theta torch_dtype transformers_version vocab_size"
)
TEMPLATES: dict[Form, str] = {
    "llama": f"{BOTH} draft_vocab_size head_dim mlp_bias",
    "mla": f"{BOTH} aux_loss_alpha chunk_size_feed_forward diversity_penalty do_sample early_stopping"
    " encoder_no_repeat_ngram_size ep_size first_k_dense_replace forced_bos_token_id forced_eos_token_id id2label"
    " is_decoder is_encoder_decoder kv_lora_rank label2id length_penalty max_length min_length moe_intermediate_size"
    " moe_layer_freq n_group n_routed_experts n_shared_experts no_repeat_ngram_size norm_topk_prob num_beam_groups"
    " num_beams num_experts_per_tok num_nextn_predict_layers num_return_sequences output_attentions"
    " output_hidden_states output_scores pruned_heads q_lora_rank qk_nope_head_dim qk_rope_head_dim"
    " remove_invalid_values repetition_penalty return_dict return_dict_in_generate routed_scaling_factor scoring_func"
    " sep_token_id seq_aux temperature tf_legacy_loss tie_encoder_decoder top_k top_p topk_group topk_method"
    " torchscript typical_p use_bfloat16 v_head_dim",
}
OF_HEADS = {
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "initializer_range": 0.02,
    "mlp_bias": False, "num_nextn_predict_layers": 0, "num_return_sequences": 1, "seq_aux": True,
}  # fmt: skip


def by_model_optimizer(source: Path, target: KimiK2Config, form: Form, out: Path) -> None:
    head = OF_HEADS | json.loads((source / "config.json").read_text())
    base = transformers.DeepseekV3Config(**target.model_dump(include={"num_hidden_layers", "n_group", "topk_group"}))
    values = {name: head.get(name, getattr(base, name, None)) for name in TEMPLATES[form].split()}
    values |= {name: head[name] for name in ("architectures", "model_type")} | {"tie_word_embeddings": False}
    values |= {"use_cache": True, "eagle_config": MODELOPT | head["eagle_config"]}
    (out / "config.json").write_text(json.dumps(values, indent=4))
    kept = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if name != "t2d"}
    save_file(
        {name.replace("midlayer.", "layers.0."): tensor for name, tensor in kept.items()}, out / "model.safetensors"
    )


def by_specforge(source: Path, target: KimiK2Config, form: Form, out: Path) -> None:
    """Its configuration is a LlamaConfig of transformers, with RoPE in both forms; d2t and t2d are always there."""
    head = json.loads((source / "config.json").read_text())
    transformers.LlamaConfig(**head).save_pretrained(out)
    saved = json.loads((out / "config.json").read_text()) | {"rope_theta": head["rope_theta"]}
    (out / "config.json").write_text(json.dumps(saved))
    rows = head["draft_vocab_size"]
    always = {"t2d": torch.ones(target.vocab_size, dtype=torch.bool), "d2t": torch.zeros(rows, dtype=torch.int64)}
    save_file(always | load_file(source / "model.safetensors"), out / "model.safetensors")


@pytest.mark.parametrize("vocabulary", [64, None])
@pytest.mark.parametrize(
    ("write", "form"), [(by_model_optimizer, "llama"), (by_model_optimizer, "mla"), (by_specforge, "llama")]
)
def test_draft_heads_by_the_templates_of_who_trains_them(
    tmp_path: Path, write: Callable[..., None], form: Form, vocabulary: int | None
) -> None:
    config = tiny_config(num_hidden_layers=3, n_routed_experts=4, num_experts_per_tok=2, quantization_config=None)
    target = KimiK2ForCausalLM(config)
    changes: dict[str, Any] = {} if vocabulary is None or form == "mla" else {"draft_vocab_size": vocabulary}
    write_synthetic_head(tmp_path / "source", config, form, seed=7, **changes)
    (tmp_path / "other").mkdir()
    write(tmp_path / "source", config, form, tmp_path / "other")
    heads = [Eagle3Head.from_pretrained(tmp_path / name, target) for name in ("source", "other")]
    tokens, hidden = torch.arange(6)[None], torch.randn(1, 6, len(heads[0].config.layers(config)) * config.hidden_size)
    caches = [DraftCache(LatentCache(config, 1, 6), head.cache_dim, head.dtype) for head in heads]
    results = [head(tokens, head.fuse(hidden), tokens, cache, 6)[0] for head, cache in zip(heads, caches, strict=True)]
    assert torch.equal(*(head.logits(result) for head, result in zip(heads, results, strict=True)))
    drafted = torch.arange(heads[0].config.draft_vocab_size)
    assert torch.equal(*(head.to_target(drafted) for head in heads))


# Schemes that compressed-tensors writes (the library by itself: what a scale is, an observer would say).
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "INT4 in groups of 32": (INT4, ""),
    "INT4 in groups of 128": ({**INT4, "group_size": 128}, ""),
    "INT4 a channel": ({"num_bits": 4, "type": "int", "strategy": "channel"}, ""),
    "FP8 a channel": (FP8, ""),
    "FP8 with one scale": ({**FP8, "strategy": "tensor"}, ""),
    "FP8 in blocks": ({**FP8, "strategy": "block", "block_structure": [128, 128]}, ""),
    "INT4 with zero points": ({**INT4, "symmetric": False}, ""),
    "INT4, chosen in another order": ({**INT4, "actorder": "static"}, ""),
    "INT8 a channel": ({**FP8, "type": "int"}, r"group_0\.weights\.num_bits"),
}


def tree(state: dict[str, Tensor]) -> nn.Module:
    """Modules by the names of a checkpoint, its matrices as torch's linears."""
    root = nn.Module()
    for name, tensor in state.items():
        owner: Any = root
        *path, leaf = name.split(".")
        for depth, name in enumerate(path, 1):
            if not hasattr(owner, name):
                matrix = depth == len(path) and leaf == "weight" and tensor.dim() == 2 and name != "embed_tokens"
                owner.add_module(
                    name, nn.Linear(tensor.shape[1], tensor.shape[0], bias=False) if matrix else nn.Module()
                )
            owner = getattr(owner, name)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def scaled(weight: Tensor, scheme: dict[str, Any]) -> Tensor:
    """The largest value of each group, channel, block or all, over what the type holds."""
    rows, columns = weight.shape
    size = scheme.get("group_size", 1)
    sides = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128), "group": (1, size)}
    down, across = sides[scheme["strategy"]]
    most = weight.float().abs().reshape(rows // down, down, columns // across, across).amax(dim=(1, 3))
    scale = most / (448 if scheme["type"] == "float" else 2 ** (scheme["num_bits"] - 1) - 1)
    return scale.reshape(-1) if scheme["strategy"] == "tensor" else scale


@pytest.mark.parametrize("name", SCHEMES)
def test_what_compressed_tensors_writes(tmp_path: Path, name: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    scheme, refused = SCHEMES[name]
    source, out, plain = (tmp_path / name for name in ("source", "out", "plain"))
    config = tiny_config(num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2)
    write_synthetic_checkpoint(source, with_format(config, "bf16"), seed=3)
    stored = tensors_of(source)
    model = tree(stored)
    kept = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|down)_proj$",
        r"re:.*mlp\.gate$",
    ]
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=kept))
    quantized: list[Any] = [module for module in model.modules() if hasattr(module, "weight_scale")]
    for module in quantized:
        module.weight_scale = nn.Parameter(scaled(module.weight, scheme).to(torch.bfloat16), requires_grad=False)
        if scheme.get("symmetric") is False:
            module.weight_zero_point.data.random_(-3, 4)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    for directory in (out, plain):
        directory.mkdir()
        (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    compressor.update_config(str(out))
    save_file(model.state_dict(), out / "model.safetensors")
    if refused:
        with pytest.raises(KimiK2Error, match=refused):
            KimiK2ForCausalLM.from_pretrained(out)
        return
    for module in quantized:  # so that the library's own values are not rounded to BF16
        module.weight_scale.data = module.weight_scale.float()
    compressor.decompress_model(model)
    save_file({key: tensor for key, tensor in model.state_dict().items() if key in stored}, plain / "model.safetensors")
    assert same_logits(out, plain)
