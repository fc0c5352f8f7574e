"""Configuration of Kimi-K2 on NxD Inference: Hugging Face's fields, NxDI's options, and what is refused of both.

NxDI takes any option and leaves it to the model to follow it; one that a model does not follow gives wrong numbers or
no effect, and no error. Here an option or field is followed, or refused by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig

from .checks import SIZES, check_batches, check_buckets, check_lengths, check_sizes
from .quantization import BLOCKWISE, CHANNELWISE, ConfigError, StoredForm, held_block, require, stored_form

# Options of NxDI that this model or NxDI's host code follows at any value that the checks below let through.
_FOLLOWED = """
    batch_size ctx_batch_size seq_len max_context_length allow_input_truncation on_cpu torch_dtype
    rpl_reduce_dtype tp_degree moe_tp_degree moe_ep_degree start_rank_id local_ranks_size logical_nc_config
    sequence_parallel_enabled is_continuous_batching apply_seq_ids_mask async_mode output_logits
    on_device_sampling_config disable_argmax_kernel enable_bucketing context_encoding_buckets token_generation_buckets
    quantized quantization_type quantization_dtype quantization_block_size quantization_block_axis
    quantized_checkpoints_path modules_to_not_convert blockwise_matmul_config save_sharded_checkpoint skip_sharding
    weights_to_skip_layout_optimization skip_warmup cc_pipeline_tiling_factor target enable_spill_reload_dge
    scratchpad_page_size dma_order_config enable_output_completion_notifications disable_numeric_cc_token
"""
FOLLOWED = frozenset(_FOLLOWED.split())
# All modules, by a part of their names: NxD's own quantized layers are not used.
UNTOUCHED = ("embed_tokens", "layers", "norm", "lm_head")
# Given to NxDI in this form alone; it keeps them otherwise.
WITHOUT_ATTRIBUTE = {"disable_normalize_top_k_affinities": True}

# Fields of config.json that the mathematics here reads ...
READ = (*SIZES, "rms_norm_eps", "rope_theta", "norm_topk_prob", "routed_scaling_factor")
OPTIONAL = ("rope_scaling", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
# ... those that say what it computes anyway ...
ONLY: dict[str, tuple[Any, ...] | None] = {
    "model_type": ("kimi_k2", "deepseek_v3"),
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "n_group": (1,), "topk_group": (1,),
    "moe_layer_freq": (1,), "hidden_act": ("silu",), "attention_bias": (False,), "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (0,), "rope_interleave": (True,), "mlp_bias": (False, None),
    "add_cross_attention": (False,), "is_encoder_decoder": (False,), "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,), "layer_types": (None,), "sliding_window": (None,), "pruned_heads": ({}, None),
    "use_sliding_window": (False, None), "partial_rotary_factor": (1, None), "qk_head_dim": None, "head_dim": None,
}  # fmt: skip
# ... and those that touch no number of a forward pass.
_HARMLESS = """
    architectures auto_map chat_style torch_dtype dtype transformers_version initializer_range use_cache
    aux_loss_alpha seq_aux attention_dropout ep_size pretraining_tp output_attentions output_hidden_states return_dict
    is_decoder id2label
    label2id problem_type torchscript use_bfloat16 chunk_size_feed_forward tokenizer_class _name_or_path
    finetuning_task task_specific_params prefix gradient_checkpointing sep_token_id decoder_start_token_id do_sample
    temperature top_k top_p typical_p num_beams num_beam_groups num_return_sequences max_length min_length
    repetition_penalty length_penalty diversity_penalty early_stopping no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids begin_suppress_tokens suppress_tokens forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty output_scores
    return_dict_in_generate tf_legacy_loss
"""
HARMLESS = frozenset(_HARMLESS.split())
# Of K2.5 and later, whose language model lies in text_config; the vision tower is not computed here.
OUTER = frozenset((
    "text_config", "vision_config", "media_placeholder_token_id", "image_token_id", "video_placeholder",
    "ignore_index", "use_unified_vision_chunk", "projection_hidden_size", "tie_word_embeddings", "quantization_config",
))  # fmt: skip
YARN = (
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "attention_factor", "truncate",
)  # fmt: skip


class KimiK2NeuronConfig(MoENeuronConfig):
    """MoENeuronConfig with the defaults of one trn2.48xlarge: 64 logical cores (LNC=2), moe_tp 32 x moe_ep 2.

    Args:
        prefill_rows_at_once: rows of all experts' blocks that one operation of a prefill computes: more move fewer
            bytes and hold more.
        compiler_args: arguments for neuronx-cc after NxDI's and this model's own, by submodel tag.
        kwargs: NxDI's options.

    Raises:
        ConfigError: an option that is not followed.
    """

    FOLLOWED: ClassVar[frozenset[str]] = FOLLOWED  # a subclass that follows more says so here
    SUBMODELS: ClassVar[frozenset[str]] = frozenset(("context_encoding_model", "token_generation_model"))

    def __init__(
        self, *, prefill_rows_at_once: int = 16384, compiler_args: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        for name, value in WITHOUT_ATTRIBUTE.items():
            require(kwargs.pop(name, value) == value, name, f"expected {value}: the router's weights are final")
        require(prefill_rows_at_once > 0, "prefill_rows_at_once", f"expected at least 1, got {prefill_rows_at_once}")
        given = dict(kwargs)
        self._set_defaults(kwargs)
        base = {name: value for name, value in kwargs.items() if name in self.FOLLOWED}
        try:
            expected = vars(MoENeuronConfig(**base, **WITHOUT_ATTRIBUTE))
            self._check_given(given, expected)
            super().__init__(**kwargs, **WITHOUT_ATTRIBUTE)
        except AssertionError as error:  # NxDI's own, which may or may not say of what
            named = [name for name in given if name in str(error)] or ["neuron_config"]
            raise ConfigError(f"NxDI: {error}", field=named[0]) from error
        self._check_kept(given, expected)
        self.prefill_rows_at_once = prefill_rows_at_once
        self.compiler_args = {tag: list(arguments) for tag, arguments in (compiler_args or {}).items()}
        self.check_together()

    @staticmethod
    def _set_defaults(kwargs: dict[str, Any]) -> None:
        ranks = kwargs.setdefault("tp_degree", 64)
        if "moe_tp_degree" in kwargs:  # degrees that do not make up the ranks are refused by check_together
            kwargs.setdefault("moe_ep_degree", max(ranks // max(kwargs["moe_tp_degree"], 1), 1))
        kwargs.setdefault("moe_ep_degree", 2 if ranks == 64 else 1)
        kwargs.setdefault("moe_tp_degree", ranks // max(kwargs["moe_ep_degree"], 1))
        kwargs.setdefault("logical_nc_config", 2)
        kwargs.setdefault("torch_dtype", torch.bfloat16)
        blockwise = {"block_size": 128, "use_torch_block_wise": True}
        if not isinstance(given := kwargs.get("blockwise_matmul_config") or {}, dict):
            given = vars(given)
        # NxDI writes enumerations to its JSON as dictionaries, which it does not read back.
        plain = {name: value for name, value in given.items() if name != "skip_dma" and not isinstance(value, dict)}
        kwargs["blockwise_matmul_config"] = {**blockwise, **plain}
        # Loading is reading then: NxD's transformation of layouts takes hours on a host, and MiniMax-M2's port saw it
        # drop a router's bias.
        kwargs.setdefault("weights_to_skip_layout_optimization", [".*"])
        if kwargs.get("is_continuous_batching"):
            kwargs.setdefault("apply_seq_ids_mask", True)
            kwargs.setdefault("ctx_batch_size", 1)
        if kwargs.get("quantized"):
            kwargs.setdefault("quantization_type", BLOCKWISE)
            kwargs.setdefault("quantization_dtype", "f8e4m3")
            kwargs.setdefault("quantized_checkpoints_path", "")  # demanded by NxDI; the checkpoint itself is read
            kwargs.setdefault("modules_to_not_convert", list(UNTOUCHED))

    def _check_given(self, given: dict[str, Any], expected: dict[str, Any]) -> None:
        """Refuse what NxDI does not know, and what nothing here reads."""
        for name, value in given.items():
            require(name in expected, name, "NxDI has no such option")
            is_object = isinstance(value, dict) and hasattr(expected[name], "__dict__")  # compared when it is made
            if name not in self.FOLLOWED and not is_object:
                same = _same(value, expected[name])
                require(same, name, f"expected {expected[name]!r}, got {value!r}: not followed here")

    def _check_kept(self, given: dict[str, Any], expected: dict[str, Any]) -> None:
        """Refuse what came to another value than is followed, and what NxDI overrides."""
        for name, value in vars(self).items():
            if name not in self.FOLLOWED:
                same = _same(value, expected[name])
                require(same, name, f"expected {expected[name]!r}, got {value!r}: not followed here")
        for name, value in given.items():
            kept = getattr(self, name)
            plain = isinstance(value, (bool, int, float, str, list)) and type(value) is type(kept)
            require(not plain or value == kept, name, f"expected {kept!r}, to which NxDI sets it, got {value!r}")
        default = vars(MoENeuronConfig(blockwise_matmul_config={"use_torch_block_wise": True}).blockwise_matmul_config)
        for name, value in vars(self.blockwise_matmul_config).items():
            same = name == "block_size" or _same(value, default[name])
            field = f"blockwise_matmul_config.{name}"
            require(same, field, f"expected {default.get(name)!r}, got {value!r}: prefill is PyTorch operations")

    def check_together(self) -> None:
        """Refuse combinations that would crash or give other numbers.

        Raises:
            ConfigError: naming one of the options.
        """
        tp, ep = self.moe_tp_degree, self.moe_ep_degree
        require(
            tp * ep == self.tp_degree, "moe_tp_degree", f"{tp} x {ep} (moe_ep_degree) is not {self.tp_degree} ranks"
        )
        check_batches(self)
        sampling = self.on_device_sampling_config is not None
        require(not self.async_mode or sampling, "async_mode", "needs on_device_sampling_config")
        require(not self.output_logits or sampling, "output_logits", "they are the output without on-device sampling")
        check_buckets(self)
        if self.sequence_parallel_enabled:
            check_lengths(self, ("max_context_length", "context_encoding_buckets"), self.tp_degree)
        unknown = set(self.compiler_args) - self.SUBMODELS
        require(not unknown, "compiler_args", f"no such submodel: {', '.join(sorted(unknown))}")
        if self.quantized:
            self.check_quantization()

    def check_quantization(self) -> None:
        """Refuse forms of experts that there are not."""
        kinds = (BLOCKWISE, CHANNELWISE)
        require(self.quantization_type in kinds, "quantization_type", f"expected {' or '.join(kinds)}")
        require(self.quantization_dtype == "f8e4m3", "quantization_dtype", "expected f8e4m3")
        path = self.quantized_checkpoints_path
        require(path == "", "quantized_checkpoints_path", "expected '': the checkpoint itself is read")
        untouched = set(UNTOUCHED) <= set(self.modules_to_not_convert or ())
        require(untouched, "modules_to_not_convert", "NxD's own quantized layers are not used")
        # Of a checkpoint's block: checked by KimiK2InferenceConfig.
        axis = self.quantization_block_axis
        require(axis in (None, [1, 2]), "quantization_block_axis", f"expected [1, 2], got {axis}")


def _same(left: Any, right: Any) -> bool:
    if type(left) is type(right) and hasattr(left, "__dict__") and not isinstance(left, type):
        return vars(left).keys() == vars(right).keys() and all(_same(v, vars(right)[n]) for n, v in vars(left).items())
    return bool(left == right)


class KimiK2InferenceConfig(InferenceConfig):
    """Hugging Face's fields under their own names, with NxDI's options in `neuron_config`.

    Raises:
        ConfigError: a field is missing, not followed, or does not divide among the ranks.
    """

    def add_derived_config(self) -> None:
        """What NxDI's modules look for beside Hugging Face's names."""
        self.num_cores_per_group = 1
        for name in self.get_required_attributes():
            require(hasattr(self, name), name, "missing in config.json")
        for name in OPTIONAL:
            if not hasattr(self, name) and name != "quantization_config":  # transformers' takes no None for it
                setattr(self, name, None)
        self.output_attentions = self.output_hidden_states = False
        self.return_dict = self.use_cache = True
        self.check_sizes()
        self.derive_blocks()

    def derive_blocks(self) -> None:
        """Write the sides of the experts' FP8 blocks, which depend on sizes, into the neuron config."""
        neuron = self.neuron_config
        if neuron.quantized and neuron.quantization_type == BLOCKWISE:
            block, expected = neuron.quantization_block_size, list(self.held_blocks())
            require(block in (None, expected), "quantization_block_size", f"expected {expected}, got {block}")
            neuron.quantization_block_size, neuron.quantization_block_axis = expected, [1, 2]

    def held_blocks(self) -> tuple[int, int]:
        """Sides of the blocks in which the routed experts are held."""
        width = self.moe_intermediate_size // self.neuron_config.moe_tp_degree
        side = held_block(self.stored_form, self.hidden_size, width)
        return side, side

    def check_sizes(self) -> None:
        """Refuse sizes that make no model or do not divide among the ranks."""
        check_sizes(self, self.neuron_config)

    @property
    def stored_form(self) -> StoredForm:
        """How the checkpoint stores its quantized weights."""
        return stored_form(getattr(self, "quantization_config", None))

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention's scores, with YaRN's magnitude."""
        yarn = self.rope_scaling or {}
        magnitude = _magnitude(yarn.get("factor", 1.0), yarn.get("mscale_all_dim") or 0.0)
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * magnitude**2)

    def rotary(self) -> tuple[list[float], float]:
        """Inverse frequencies of the rotary pairs, and the factor on cos and sin; YaRN as transformers has it."""
        size, base, yarn = self.qk_rope_head_dim, self.rope_theta, self.rope_scaling
        # On the CPU by name: models are made on the meta device.
        plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
        if not yarn:
            return plain.tolist(), 1.0
        factor, length = yarn["factor"], yarn["original_max_position_embeddings"]

        def pair(turns: float) -> float:
            return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair(yarn.get("beta_fast") or 32), pair(yarn.get("beta_slow") or 1)
        if yarn.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = (torch.arange(size // 2, dtype=torch.float32, device="cpu") - low) / (
            high - low if high != low else 0.001
        )
        kept = 1 - ramp.clamp(0, 1)
        mscale, all_dim = yarn.get("mscale"), yarn.get("mscale_all_dim")
        if yarn.get("attention_factor") is not None:
            multiplier = yarn["attention_factor"]
        elif mscale and all_dim:
            multiplier = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
        else:
            multiplier = _magnitude(factor, 1.0)
        return (plain / factor * (1 - kept) + plain * kept).tolist(), multiplier

    def get_required_attributes(self) -> list[str]:
        """Every field that the mathematics reads."""
        return list(READ)

    @classmethod
    def get_neuron_config_cls(cls) -> type[KimiK2NeuronConfig]:
        """The class that NxDI builds from a compiled model's neuron_config.json."""
        return KimiK2NeuronConfig


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def load_kimi_config(source: str | Path | Mapping[str, Any]) -> Callable[[InferenceConfig], None]:
    """The `load_config` callable of a checkpoint directory, or of a parsed config.json.

    transformers 4.57 has no `kimi_k2`, and AutoConfig would run the repository's own code.

    Raises:
        ConfigError: a field that is not known and could touch a number, or a value that is not computed here.
    """
    raw = source if isinstance(source, Mapping) else json.loads((Path(source) / "config.json").read_text())
    fields = text_fields(raw)

    def load(config: InferenceConfig) -> None:
        for name, value in fields.items():
            setattr(config, name, value)
        if not isinstance(source, Mapping):
            config._name_or_path = str(source)

    return load


def text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model that are read, from a config.json of transformers 4 or 5, nested or not.

    Raises:
        ConfigError: see `load_kimi_config`.
    """
    text = dict(raw.get("text_config") or raw)
    if text_is_nested := "text_config" in raw:
        require(raw.get("model_type") == "kimi_k25", "model_type", f"expected kimi_k25, got {raw.get('model_type')!r}")
        for name in raw:
            known = name in OUTER or name in HARMLESS or name in OPTIONAL or name == "model_type"
            require(known, name, "not known, so it may change what the model computes")
        if raw.get("quantization_config") is not None:
            text.setdefault("quantization_config", raw["quantization_config"])
    rope = text.pop("rope_parameters", None)
    if rope is not None:  # transformers 5
        text.setdefault("rope_theta", rope.get("rope_theta"))
        scaled = rope.get("rope_type", "default") != "default"
        text.setdefault("rope_scaling", {n: v for n, v in rope.items() if n != "rope_theta"} if scaled else None)
    for name, value in text.items():
        if name in READ or name in OPTIONAL or name in HARMLESS:
            continue
        require(name in ONLY, name, "not known, so it may change what the model computes")
        allowed = ONLY[name] or (text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["qk_rope_head_dim"])
        require(any(_same(value, choice) for choice in allowed), name, f"expected {allowed[0]!r}, got {value!r}")
    yarn = dict(text.get("rope_scaling") or {})
    if yarn:
        kind = yarn.pop("rope_type", None) or yarn.pop("type", None)
        yarn.pop("type", None)
        require(kind == "yarn", "rope_scaling.type", f"expected yarn, got {kind!r}")
        for name in yarn:
            require(name in YARN, f"rope_scaling.{name}", "not known, so it may change what the model computes")
        for name in YARN[:2]:
            require(name in yarn, f"rope_scaling.{name}", "missing")
    stored_form(text.get("quantization_config"))
    taken = {name: text[name] for name in (*READ, *OPTIONAL) if name in text}
    prefix = "language_model." if text_is_nested else ""
    return {**taken, "rope_scaling": yarn or None, "tensor_prefix": prefix, "model_type": "kimi_k2"}
