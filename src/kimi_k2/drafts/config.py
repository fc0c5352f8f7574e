"""DraftConfig: the `config.json` of an Eagle3 head, validated field by field.

Two forms are published for Kimi-K2: `LlamaForCausalLMEagle3`, one Llama layer, and `Eagle3DeepseekV2ForCausalLM`, one
layer of multi-head latent attention with a dense MLP. Fields and their meanings are those of vLLM's loaders
(`llama_eagle3.py`, `deepseek_eagle3.py`). Layer i of `eagle_aux_hidden_state_layer_ids` is, as in vLLM, the residual
stream before decoder layer i, which is the output of layer i - 1; the number of layers is the stream after the last.
SpecForge and Model-Optimizer write outputs of layers, from layer 1 on; a list that begins with 1 is read so.

And which tensors a head's files hold, by the names that SpecForge, TorchSpec and vLLM give them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config, YarnScaling
from kimi_k2.config_fields import ONLY, WITHOUT_EFFECT, check_limits, first_fault, refuse_unknown
from kimi_k2.config_file import normalise_rope
from kimi_k2.errors import (
    ConfigError,
    KimiK2Warning,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from kimi_k2.files import read_data
from kimi_k2.limits import CONFIG_FIELDS

Form = Literal["llama", "mla"]
# What the ids count; `auto`: outputs if they begin with 1 and the target has so many layers.
Reading = Literal["auto", "inputs", "outputs"]
FORMS: dict[str, Form] = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_READ = {"architectures", "model_type", "eagle_config", _LAYERS, "num_aux_hidden_states", "rope_parameters"}
# Of the prompt, of training, and of the target's experts, which a head with a dense MLP leaves in its file.
_EXPERTS = (
    "first_k_dense_replace moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts"
    " norm_topk_prob num_experts_per_tok num_nextn_predict_layers routed_scaling_factor scoring_func topk_group"
    " topk_method"
)
_PROMPT = "_torchspec_version bos_token_id eos_token_id pad_token_id initializer_range max_window_layers"
_HARMLESS = WITHOUT_EFFECT | frozenset(f"{_EXPERTS} {_PROMPT}".split(" "))
_ONLY: dict[str, tuple[Any, ...]] = {
    **ONLY,
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "logit_scale": (1, 1.0, None),
    "mla_use_nope": (False,),
    "num_hidden_layers": (1,),
    "parallel_drafting": (False, None),
    "quantization_config": (None,),
    "tie_word_embeddings": (False,),
}
_EAGLE_ONLY: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1, None),
}
_EAGLE_HARMLESS = ("parallel_draft_heads_num_layers",)  # of steps beyond the first
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class DraftConfig(BaseModel):
    """A head's hyperparameters, in Hugging Face's and vLLM's names.

    Attributes:
        form: which attention the head's layer has.
        head_dim: of the Llama form.
        draft_vocab_size: rows of its lm_head; `d2t` says which tokens of the target they are.
        aux_layers: layers of the target as the file names them, see `layers`; None for vLLM's default.
        reading: what they are, the inputs of layers or their outputs.
        norm_before_residual: the residual is the normed hidden state.
        norm_before_fc: one norm over all hidden states side by side, before they become one.
        fc_norm: a norm for each of them.
        norm_output: what the next drafted token starts from is the normed output.

    Raises:
        ConfigError: (from `from_pretrained` and `fit`) naming the field that is missing, wrong or unknown.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    form: Form
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt
    hidden_size: PositiveInt
    target_hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt = 2
    q_lora_rank: PositiveInt = 1
    kv_lora_rank: PositiveInt = 1
    qk_nope_head_dim: PositiveInt = 1
    qk_rope_head_dim: PositiveInt = 2
    v_head_dim: PositiveInt = 1
    max_position_embeddings: PositiveInt
    rope_theta: PositiveFloat
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: PositiveFloat
    aux_layers: tuple[int, ...] | None = None
    reading: Reading = "auto"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def from_pretrained(cls, directory: str | Path, reading: Reading = "auto") -> DraftConfig:
        """Read the `config.json` of a head's directory."""
        path = Path(directory) / "config.json"
        try:
            return cls.from_dict(read_data(path, ConfigError), file=path).model_copy(update={"reading": reading})
        except FileNotFoundError:
            raise ConfigError("no such file; expected an Eagle3 head's config.json", file=path) from None

    @classmethod
    def from_dict(cls, raw: Any, *, file: str | Path | None = None) -> DraftConfig:
        """Validate a parsed config.json."""
        try:
            return _checked(cls.model_validate(_flat(raw)))
        except ConfigError as error:
            raise ConfigError(error.message, field=error.field, file=file) from None
        except ValidationError as error:
            raise first_fault(error, file) from None

    def layers(self, target: KimiK2Config) -> tuple[int, ...]:
        """Layers whose inputs the head reads; of a file without any those of vLLM: 2, the middle, the fourth last."""
        count, named = target.num_hidden_layers, self.aux_layers
        if not named:
            return 2, count // 2, count - 3
        told = named[0] == 1 and named[-1] < count
        outputs = self.reading == "outputs" or (self.reading == "auto" and told)
        return tuple(layer + 1 for layer in named) if outputs else named

    def fit(self, target: KimiK2Config, file: str | Path | None = None) -> None:
        """Refuse a target that this head was not made for.

        Raises:
            ConfigError: hidden size or vocabulary differ, or the target has no such layers.
        """
        for field, own, theirs in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
        ):
            if own != theirs:
                raise ConfigError(f"expected {theirs}, as the target has, got {own}", field=field, file=file)
        last = target.num_hidden_layers
        if self.reading == "auto" and self.aux_layers not in (None, self.layers(target)):
            warnings.warn(
                f"{file or 'the head'}: {_LAYERS} {list(self.aux_layers or ())} begin with 1: taken for outputs of"
                f" layers, the inputs of {list(self.layers(target))}; --draft-layers inputs reads them as they stand",
                KimiK2Warning,
                stacklevel=3,
            )
        for layer in self.layers(target):
            if not 0 <= layer <= last:
                raise ConfigError(f"expected layers of the target, 0 to {last}, got {layer}", field=_LAYERS, file=file)

    def attention_config(self, target: KimiK2Config) -> KimiK2Config:
        """A configuration with the sizes of the head's layer, unquantized, as the target's modules take it."""
        own = {"hidden_size", "intermediate_size", "max_position_embeddings", "rope_theta", "rope_scaling"}
        own |= {"num_attention_heads", "num_key_value_heads", "rms_norm_eps"}
        own |= set(_MLA) if self.form == "mla" else set()
        values = {name: getattr(self, name) for name in own} | {"num_hidden_layers": 1, "quantization": None}
        if self.form == "llama":
            values["qk_rope_head_dim"] = self.head_dim
        return target.model_copy(update=values)


def _flat(raw: Any) -> dict[str, Any]:
    """The fields of DraftConfig in a file; whatever else it says is known to do nothing, or refused."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected a JSON object at the top level, got {type(raw).__name__}")
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    form = FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise ConfigError(f"expected one of {', '.join(FORMS)}, got {names!r:.100}", field="architectures")
    fields = (
        set(DraftConfig.model_fields)
        - {"form", "aux_layers", "reading"}
        - (set(_MLA) if form == "llama" else {"head_dim"})
    )
    derived = {"head_dim"} if form == "mla" else set()  # what transformers adds to DeepSeek's configurations
    refuse_unknown(raw, fields | _READ | derived, only=_ONLY, harmless=_HARMLESS)
    flat = {field: raw[field] for field in fields if field in raw}
    eagle = raw.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise ConfigError(f"expected an object, got {type(eagle).__name__}", field="eagle_config")
    refuse_unknown(eagle, {_LAYERS, "norm_before_fc"}, "eagle_config", only=_EAGLE_ONLY, harmless=_EAGLE_HARMLESS)
    flat["norm_before_fc"] = eagle.get("norm_before_fc", raw.get("norm_before_fc", False))
    flat["aux_layers"] = _layers(raw, eagle)
    flat["form"] = form
    flat.setdefault("target_hidden_size", raw.get("hidden_size"))
    for field, default in (("draft_vocab_size", "vocab_size"), ("num_key_value_heads", "num_attention_heads")):
        if flat.get(field) is None:
            flat[field] = raw.get(default)
    normalise_rope(raw, flat, "")
    if isinstance(flat.get("rope_theta"), int):
        flat["rope_theta"] = float(flat["rope_theta"])
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if form == "llama" and flat.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int):
        flat["head_dim"] = hidden // max(heads, 1)
    for field in _MLA if form == "mla" else ():
        if not isinstance(flat.get(field), int):
            raise ConfigError(f"expected a number, got {flat.get(field)!r:.100}", field=field)
    return flat


def _checked(config: DraftConfig) -> DraftConfig:
    check_limits(config, {name: CONFIG_FIELDS[name] for name in CONFIG_FIELDS.keys() & DraftConfig.model_fields})
    for field in ("head_dim", "qk_rope_head_dim"):
        if (width := getattr(config, field)) % 2:
            raise ConfigError(f"expected an even number (RoPE turns pairs), got {width}", field=field)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % groups:
        raise ConfigError(f"expected a divisor of {heads} heads, got {groups}", field="num_key_value_heads")
    return config


def _layers(raw: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Of the file's top or of `eagle_config`, as vLLM looks for them."""
    layers, field = raw.get(_LAYERS), _LAYERS
    if not layers:
        layers, field = eagle.get(_LAYERS), f"eagle_config.{_LAYERS}"
    count = raw.get("num_aux_hidden_states")
    if not layers:
        if count not in (None, 3):
            raise ConfigError(f"expected the {count} layers", field=field)
        return None
    if not isinstance(layers, list) or any(not isinstance(entry, int) or isinstance(entry, bool) for entry in layers):
        raise ConfigError(f"expected a list of layers, got {layers!r:.100}", field=field)
    if sorted(set(layers)) != layers:
        raise ConfigError(f"expected layers in ascending order, got {layers!r:.100}", field=field)
    if count not in (None, len(layers)):
        raise ConfigError(
            f"expected {len(layers)}, as many as layers, got {count!r:.100}", field="num_aux_hidden_states"
        )
    return tuple(layers)


D2T, T2D = "d2t", "t2d"
LAYER = "midlayer."
_FLOATING = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {D2T: (torch.int64, torch.int32), T2D: (torch.bool,)}


def module_name(name: str) -> str:
    """A tensor's name with `midlayer.` for the layer, which files exported for vLLM call `layers.0.`."""
    return LAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def head_shapes(config: DraftConfig, target: KimiK2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head must have, and its shape."""
    size, heads = config.hidden_size, config.num_attention_heads
    read = len(config.layers(target)) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, read), "norm.weight": (size,)}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{LAYER}{norm}.weight"] = (size,)
    for name in ("gate_proj", "up_proj"):
        shapes[f"{LAYER}mlp.{name}.weight"] = (config.intermediate_size, size)
    shapes[f"{LAYER}mlp.down_proj.weight"] = (size, config.intermediate_size)
    attention: dict[str, tuple[int, ...]]
    if config.form == "llama":
        queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
        attention = {"q_proj": (queries, 2 * size), "k_proj": (keys, 2 * size), "v_proj": (keys, 2 * size)}
        attention["o_proj"] = (size, queries)
    else:
        rank, value, nope, rope = (
            config.kv_lora_rank,
            config.v_head_dim,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        attention = {
            "q_a_proj": (config.q_lora_rank, 2 * size),
            "q_a_layernorm": (config.q_lora_rank,),
            "q_b_proj": (heads * (nope + rope), config.q_lora_rank),
            "kv_a_proj_with_mqa": (rank + rope, 2 * size),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (nope + value), rank),
            "o_proj": (size, heads * value),
        }
    shapes |= {f"{LAYER}self_attn.{name}.weight": shape for name, shape in attention.items()}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (read,)
    if config.fc_norm:
        norms = range(len(config.layers(target)))
        shapes |= {f"fc_norm.{number}.weight": (config.target_hidden_size,) for number in norms}
    if config.draft_vocab_size != config.vocab_size:
        shapes |= {"lm_head.weight": (config.draft_vocab_size, size), D2T: (config.draft_vocab_size,)}
    return shapes


def optional_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a head may have: the target's embedding and lm_head serve where it has none."""
    size = config.hidden_size
    return {
        "embed_tokens.weight": (config.vocab_size, size),
        "lm_head.weight": (config.draft_vocab_size, size),
        D2T: (config.draft_vocab_size,),
        T2D: (config.vocab_size,),
    }


def check_tensors(reader: CheckpointReader, keys: Mapping[str, str], config: DraftConfig, target: KimiK2Config) -> None:
    """Refuse files that are no such head.

    Args:
        reader: of the files.
        keys: by `module_name` the name in the files.
        config: of the head.
        target: of the model that it drafts for.

    Raises:
        CheckpointError: (subclasses) a tensor is missing or unexpected, or has another shape or dtype.
    """
    needed = head_shapes(config, target)
    for name, shape in needed.items():
        if name not in keys:
            raise MissingTensorError(f"expected {list(shape)}", file=reader.directory, tensor=name)
    known = optional_shapes(config) | needed
    for name, stored in keys.items():
        entry = reader.tensors[stored]
        where = reader.directory / entry.shard
        if name not in known:
            raise UnexpectedTensorError("config.json implies no such tensor", file=where, tensor=stored)
        if entry.shape != known[name]:
            raise TensorShapeError(
                f"expected shape {list(known[name])}, got {list(entry.shape)}", file=where, tensor=stored
            )
        if entry.dtype not in _DTYPES.get(name, _FLOATING):
            expected = " or ".join(str(entry).removeprefix("torch.") for entry in _DTYPES.get(name, _FLOATING))
            raise TensorDtypeError(f"expected {expected}, got {entry.dtype}", file=where, tensor=stored)
