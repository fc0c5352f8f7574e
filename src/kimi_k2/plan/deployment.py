"""Deployments: one YAML file of configs/ for each way to run the model, on Trainium and on GPUs, in one schema.

And `Target`, what the planner computes from: a deployment of one model, at lengths that a call may change.

A file with `like: NAME` says what differs from another of configs/, also in members of its mappings.
Fields are named as NxDI's MoENeuronConfig names them. A GPU deployment leaves out `neuron_config`, `torch_native`,
`environment`, `compiler_args` and `vision`; one on vllm-neuron's torch-native line all of these but `torch_native`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kimi_k2.config import KimiK2Config, changed
from kimi_k2.config_fields import first_fault
from kimi_k2.contrib_model.checks import check_sizes
from kimi_k2.errors import ConfigError, KimiK2Warning
from kimi_k2.files import Json, parse_yaml, read_data
from kimi_k2.limits import MOST, YAML_BYTES
from kimi_k2.plan import nxdi
from kimi_k2.plan.machines import INSTANCES, Instance, Machine, Memory
from kimi_k2.plan.torch_native import BLOCK, Count, TorchNativeOptions, blocks_at_once
from kimi_k2.plan.vision import tower_ranks
from kimi_k2.sharding.experts import expert_formats, without_tiles
from kimi_k2.sharding.layout import Decode, Layout, ShardingPlan
from kimi_k2.sharding.plan import make_plan, without_nxdis

if TYPE_CHECKING:
    from kimi_k2.plan.drafts import Head

ADAPTERS = "LoRA adapters"
LINE = (
    "LoRA: decode runs on PyTorch operations, experts without tiles: our kernels read weights that are folded at"
    " conversion, where an adapter is not"
)
_BUCKETS = ("context_encoding_buckets", "token_generation_buckets")


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LoraServing(_Fields):
    """NxDI's LoraServingConfig, as far as a plan needs it; its batch is the deployment's.

    Attributes:
        max_loras: adapters in device memory.
        max_lora_rank: the largest rank of one.
        target_modules: projections that are adapted.
        lora_ckpt_paths: PEFT directories by the adapters' names.
    """

    max_loras: Count = 1
    max_lora_rank: Count = 16
    target_modules: tuple[Literal["q_b_proj", "o_proj"], ...] = Field(min_length=1)
    lora_ckpt_paths: dict[str, str] = {}

    def rank_bytes(self, target: Target) -> int:
        """Bytes on a rank: all adapters, cut over the ranks, and each sequence's own, of which one side is whole.

        As NxDI's modules hold them (`modules/lora_serving/lora_layer.py`, `weight` and `weight_active`).
        """
        config, ranks = target.config, target.layout.ranks
        sizes = {  # columns of A, rows of B, and the side that a sequence's own has whole
            "q_b_proj": (config.q_lora_rank, config.num_attention_heads * config.qk_head_dim, 0),
            "o_proj": (config.num_attention_heads * config.v_head_dim, config.hidden_size, 1),
        }
        values = 0
        for *sides, whole in (sizes[name] for name in self.target_modules):
            values += self.max_loras * sum(sides) // ranks + target.batch * (sides[whole] + sides[1 - whole] // ranks)
        return values * self.max_lora_rank * config.num_hidden_layers * target.layout.dtype.itemsize


def in_xla_form(raw: Any) -> Any:
    """A deployment's fields; with adapters on kernels, those of the same deployment on PyTorch operations."""
    options = raw.get("neuron_config") if isinstance(raw, dict) else None
    if not isinstance(options, dict) or not options.get("lora_config"):
        return raw
    if options.get("decode", "xla") == "xla" or raw.get("experts") not in expert_formats():
        return raw
    kept = {name: value for name, value in options.items() if name not in ("decode", "decode_layers_per_kernel")}
    return {**raw, "experts": without_tiles(raw["experts"]), "neuron_config": kept}


CONFIGS = Path(str(files("kimi_k2"))) / "configs"  # a link to the repository's configs/
PLAN_ONLY = "plan_only"  # of these, presets of machines on which nothing here runs
CONTEXT_ENCODING, TOKEN_GENERATION = STAGES = ("context_encoding_model", "token_generation_model")  # NxDI's tags
VISION_ENCODER = "vision_encoder_model"
InstanceName = Literal["trn2.48xlarge", "trn3", "h200", "h100"]


class OnDeviceSampling(_Fields):
    """NxDI's OnDeviceSamplingConfig; greedy by default."""

    do_sample: bool = False
    top_k: int = 1
    top_p: float = 1.0
    temperature: float = 1.0
    dynamic: bool = False
    global_topk: Count = 256


class BlockwiseMatmul(_Fields):
    """NxD's BlockwiseMatmulConfig: the routed experts at prefill, dropless.

    Attributes:
        block_size: tokens a block.
    """

    block_size: Count = 128


class NeuronOptions(_Fields):
    """What only NxDI knows; each field is one of MoENeuronConfig and is handed to it.

    Attributes:
        logical_nc_config: physical cores that act as one.
        is_continuous_batching: sequences join and leave the batch one by one.
        ctx_batch_size: sequences a prefill; batch_size if None.
        save_sharded_checkpoint: load the files that `kimi-k2 convert` wrote; else every load shards 1 TB again.
        context_encoding_buckets: prompt lengths, in tokens, that have a prefill graph.
        token_generation_buckets: cache lengths, in tokens, that have a decode graph.
        on_device_sampling_config: None returns 163,840 logits a token to the host.
        flash_decoding_enabled: the latent cache is split over groups of ranks by positions.
        num_cores_per_group: ranks of such a group; all if None.
        decode: form of a decode step: `xla`, PyTorch operations; `layers`, one NKI kernel of all MoE layers, its
            collectives inside, with experts in tiles.
        decode_layers_per_kernel: with `layers`, so many MoE layers a call; all if None.
        prefill_rows_at_once: tokens of the experts' blocks that one operation of the PyTorch prefill takes: more move
            fewer bytes, and hold more.
        speculation_length: tokens of a sequence in a decode step, the last one and drafts behind it; None for one.
        lora_config: adapters beside the base weights. Decode is then `xla`, whatever the preset says, and the experts
            are not in tiles.
    """

    logical_nc_config: Count = 2
    is_continuous_batching: bool = False
    ctx_batch_size: Count | None = None
    save_sharded_checkpoint: bool = True
    enable_bucketing: bool = True
    context_encoding_buckets: tuple[Count, ...] | None = None
    token_generation_buckets: tuple[Count, ...] | None = None
    on_device_sampling_config: OnDeviceSampling | None = OnDeviceSampling()
    blockwise_matmul_config: BlockwiseMatmul = BlockwiseMatmul()
    flash_decoding_enabled: bool = False
    num_cores_per_group: Count | None = None
    decode: Decode = "xla"
    decode_layers_per_kernel: Count | None = None
    prefill_rows_at_once: Count = 16384
    speculation_length: Annotated[int, Field(ge=2)] | None = None
    lora_config: LoraServing | None = None


class VisionOptions(_Fields):
    """The vision tower of an image-to-text deployment on Trainium.

    Attributes:
        tp_degree: ranks that share the tower; a divisor of its heads.
        buckets: patches and frames of each compiled graph; 1 frame for images, the tower's `pos_emb_time` for video.
    """

    tp_degree: Count
    buckets: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)]


class Deployment(_Fields):
    """How a model is run: where, over how many ranks, in which formats, for which lengths.

    Attributes:
        name: the file's name without `.yaml`.
        instance: a key of INSTANCES.
        experts: format of the routed experts, as `kimi-k2 convert --experts` names it.
        tp_degree: ranks; attention, shared experts, embedding and head are split over all of them.
        moe_tp_degree: ranks that share one expert.
        moe_ep_degree: groups that the experts are divided among.
        torch_dtype: of everything that is not a routed expert.
        batch_size: sequences a decode step.
        seq_len: cache slots a sequence.
        max_context_length: longest prompt of one prefill.
        neuron_config: NxDI's further options (Trainium only).
        environment: variables of the process, added to those that every Trainium process needs.
        compiler_args: arguments for neuronx-cc by stage, behind those of NxDI and of the class.
        vision: the tower's graphs, compiled with the text model's (Trainium only); None for text alone.
        torch_native: options of vllm-neuron's torch-native line, which then runs the model; None for NxDI.
    """

    name: str
    instance: InstanceName
    experts: str
    tp_degree: Count
    moe_tp_degree: Count
    moe_ep_degree: Count = 1
    torch_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    batch_size: Count
    seq_len: Count
    max_context_length: Count
    neuron_config: NeuronOptions = NeuronOptions()
    environment: dict[str, str] = {}
    compiler_args: dict[Literal["context_encoding_model", "token_generation_model"], tuple[str, ...]] = {}
    vision: VisionOptions | None = None
    torch_native: TorchNativeOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _adapters(cls, raw: Any) -> Any:
        return in_xla_form(raw)

    @model_validator(mode="after")
    def _consistent(self) -> Deployment:
        most, target = self.hardware.ranks, self.hardware.target
        if self.moe_tp_degree * self.moe_ep_degree != self.tp_degree:
            raise ConfigError(f"expected moe_tp_degree x moe_ep_degree, got {self.tp_degree}", field="tp_degree")
        if self.tp_degree > most:
            raise ConfigError(f"expected at most {most} on {self.instance}, got {self.tp_degree}", field="tp_degree")
        if self.max_context_length > self.seq_len:
            raise ConfigError(f"expected at most seq_len ({self.seq_len})", field="max_context_length")
        nxdis = ("neuron_config", "environment", "compiler_args", "vision")
        for field in (*nxdis, "torch_native"):
            if target != "neuron" and field in self.model_fields_set:
                raise ConfigError(f"expected none on {self.instance}", field=field)
            if self.torch_native and field in nxdis and field in self.model_fields_set:
                raise ConfigError("expected none beside torch_native, which has no NxDI", field=field)
        if self.vision and self.vision.tp_degree > self.tp_degree:
            raise ConfigError(
                f"expected at most {self.tp_degree}, got {self.vision.tp_degree}", field="vision.tp_degree"
            )
        # Refuses a format of the other target, or of another form of decode.
        layout = Layout(self.moe_tp_degree, self.moe_ep_degree, target, self.experts, decode=self._decode)
        if self.torch_native and layout.layers and self.torch_native.kv_cache_dtype != "auto":
            expected = f"expected auto with experts in {self.experts}, whose kernels read pages of the model's dtype"
            raise ConfigError(expected, field="torch_native.kv_cache_dtype")
        self.check()
        return self

    @property
    def _decode(self) -> Decode | None:
        return None if self.torch_native else self.neuron_config.decode

    @property
    def on_nxdi(self) -> bool:
        """Whether the NxDI class runs it."""
        return self.hardware.target == "neuron" and self.torch_native is None

    def check(self, config: KimiK2Config | None = None, **more: Any) -> None:
        """Whether what runs it takes its options, batch and lengths together.

        Args:
            config: of a model, whose sizes are to divide among the ranks.
            more: NxDI's further options, of drafts in the graph (`kimi_k2.plan.nxdi.draft_options`).

        Raises:
            ConfigError: naming the field, an option's as NxDI has it.
        """
        if more and self.vision is not None:
            raise ConfigError(
                "expected none beside a vision tower, whose class in NxDI takes no fused speculation"
                " (models/image_to_text_model_base.py, NeuronBaseForImageToText)",
                field="draft",
            )
        if self.torch_native:
            self.torch_native.check(self.batch_size, self.seq_len, self.max_context_length)
        elif self.on_nxdi:
            held = expert_formats()[self.experts].neuron_options()
            options = SimpleNamespace(**{**nxdi.UNSAID, **dict(self), **dict(self.neuron_config), **held, **more})
            with nxdi.typed():
                nxdi.check_together(options)
                if config is not None:
                    check_sizes(config, options)

    def with_lengths(self, context: int | None, batch: int | None, prompt: int | None) -> Deployment:
        """The same with other lengths, unchecked, a prompt cut to the context. Other lengths' buckets are NxDI's."""
        slots, most = context or self.seq_len, self.max_context_length
        update: Json = {"batch_size": batch or self.batch_size, "seq_len": slots}
        update["max_context_length"] = min(prompt or most, slots)
        if (slots, update["max_context_length"]) != (self.seq_len, most):
            update["neuron_config"] = self.neuron_config.model_copy(update=dict.fromkeys(_BUCKETS))
        return self.model_copy(update=update)

    @classmethod
    def load(cls, name_or_path: str | Path, *, to_plan: bool = False) -> Deployment:
        """By name (a file in configs/ or configs/plan_only/) or path.

        Raises:
            ConfigError: there is no such preset, or a field is missing, unknown or mistyped; or its machine can only be
                planned for, and it is not loaded `to_plan`.
        """
        path = _file_of(name_or_path)
        try:
            loaded = cls.model_validate({"name": path.stem, **_fields_of(path)})
        except ValidationError as error:
            raise first_fault(error, path) from None
        if loaded.hardware.plan_only and not to_plan:
            raise ConfigError(f"{loaded.instance}: {loaded.hardware.plan_only}", field="instance", file=path)
        return loaded

    @property
    def hardware(self) -> Instance:
        """The machine."""
        return INSTANCES[self.instance]

    @property
    def cache_ranks(self) -> int:
        """Ranks that share one latent cache; 1 where each holds it whole."""
        options = self.neuron_config
        return (options.num_cores_per_group or self.tp_degree) if options.flash_decoding_enabled else 1

    def layout(self, config: KimiK2Config) -> Layout:
        """How the weights of a model lie on the ranks; `stored` of a checkpoint without quantization is BF16.

        Raises:
            ConfigError: what runs it does not take the model.
        """
        layout = Layout(
            self.moe_tp_degree,
            self.moe_ep_degree,
            self.hardware.target,
            "bf16" if self.experts == "stored" and config.quantization is None else self.experts,
            decode=self._decode,
            query_group=self.cache_ranks if self.neuron_config.decode == "layers" and self.cache_ranks > 1 else 0,
        )
        if layout.target == "neuron":
            nxdi.check_kept(config, layout, self.neuron_config.logical_nc_config, native=not self.on_nxdi)
        return layout

    def neuron_arguments(self) -> Json:
        """Arguments of MoENeuronConfig, as JSON types; without those that the experts' format adds.

        Raises:
            ConfigError: the deployment is of vllm-neuron's torch-native line.
        """
        if self.torch_native:
            raise ConfigError(f"expected none: NxDI does not run preset {self.name}", field="torch_native")
        shared = ("tp_degree", "moe_tp_degree", "moe_ep_degree", "torch_dtype", "batch_size", "seq_len")
        common = self.model_dump(mode="json", include={*shared, "max_context_length"})
        fields = common | self.neuron_config.model_dump(mode="json")
        if fields["lora_config"]:
            fields["lora_config"]["batch_size"] = self.batch_size
        return {name: value for name, value in fields.items() if value is not None}


def _file_of(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix == ".yaml":
        candidates = [path]
    else:
        candidates = [folder / f"{name_or_path}.yaml" for folder in (CONFIGS, CONFIGS / PLAN_ONLY)]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        known = ", ".join(preset_names()) or f"none in {CONFIGS}"
        raise ConfigError(f"no preset '{name_or_path}'; known: {known}", field="preset")
    return found


def _fields_of(path: Path, *above: Path) -> Json:
    """The fields of a file; one with `like` says what differs from another, which the files `above` differ from."""
    raw = read_data(path, ConfigError, YAML_BYTES, parse_yaml)
    if not isinstance(raw, dict):
        raise ConfigError(f"expected a mapping of fields, got {type(raw).__name__}", file=path)
    if "like" not in raw:
        return raw
    like, others = raw.pop("like"), [name for name in preset_names() if CONFIGS / f"{name}.yaml" not in (*above, path)]
    if like not in others:
        raise ConfigError(f"expected one of {', '.join(others)}, got {like!r:.100}", field="like", file=path)
    fields: Json = changed(_fields_of(_file_of(like), *above, path), raw)
    return fields


def preset_names() -> list[str]:
    """Names of the deployments in configs/."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


# NxDI's EXTRA_RESERVED_SPACE (flash decoding) and KV_CACHE_PAD_FOR_SEQ_IDS_MASKING (continuous batching).
RESERVED_SLOTS = 128


@dataclass(frozen=True)
class Target:
    """One deployment.

    Attributes:
        name: preset.
        config: of the model.
        layout: ranks and formats of the weights.
        machine, memory: of one rank.
        batch: sequences.
        context: cache slots a sequence.
        prompt: tokens a sequence of the prefill that is modelled.
        cache_ranks: ranks that share one latent cache (flash decoding); 1 where each holds it whole.
        reserved_slots: cache slots a sequence behind the last position, which NxDI adds.
        continuous: NxDI's continuous batching.
        block_size: tokens a block of the blockwise prefill; None where tokens are grouped exactly.
        published_port: weights, cache and reads as pull request 131's modeling file declares them: nn.Linear down
            projections on every rank, router_config.dtype float32, one entry of 576 values in each of the K and V
            slots, all local experts read under expert parallelism, dense weights over tp_degree 32 beside ep_degree 2.
        tower_ranks: ranks that share the vision tower; None for as many as can.
        tower_buckets: patches and frames of each compiled graph of the tower.
        prefill_rows_at_once: tokens of the experts' blocks that one operation of the PyTorch prefill takes.
        torch_native: options of vllm-neuron's torch-native line; None on NxDI and on GPUs.
        deployment: whose target it is; None for one of layouts alone.
        positions: tokens of a sequence in a decode step, drafts among them.
        head: that drafts them; None: none, or something without weights.
        lora: adapters beside the base weights.
    """

    name: str
    config: KimiK2Config
    layout: Layout
    machine: Machine
    memory: Memory
    batch: int
    context: int
    prompt: int
    block_size: int | None = None
    published_port: bool = False
    cache_ranks: int = 1
    reserved_slots: int = 0
    continuous: bool = False
    tower_ranks: int | None = None
    tower_buckets: tuple[tuple[int, int], ...] = ()
    prefill_rows_at_once: int = 16384
    torch_native: TorchNativeOptions | None = None
    deployment: Deployment | None = None
    positions: int = 1
    head: Head | None = None
    lora: LoraServing | None = None

    @cached_property
    def rows(self) -> int:
        """Tokens of a decode step."""
        return self.batch * self.positions

    @cached_property
    def sharding(self) -> ShardingPlan:
        """What the ranks hold; made once for all targets that differ in lengths alone.

        Raises:
            ConfigError: see `make_plan`.
        """
        return _sharding(self.config, self.layout, self.torch_native is None)

    @cached_property
    def cache_itemsize(self) -> int:
        """Bytes of a cached value: BF16, or FP8 as the torch-native preset or, for GPUs, config.json says."""
        if self.torch_native is not None:
            return 1 if self.torch_native.kv_cache_dtype == "fp8" else 2
        return 1 if self.config.kv_cache_fp8 and not self.is_neuron else 2

    @cached_property
    def prefill_sequences(self) -> int:
        """Sequences of one prefill."""
        return 1 if self.torch_native or self.continuous else self.batch

    @cached_property
    def is_neuron(self) -> bool:
        """Whether it is a Trainium target."""
        return self.layout.target == "neuron"

    def with_lengths(self, context: int | None, batch: int | None, prompt: int | None) -> Target:
        """The same with other lengths; a prompt longer than the context is cut to it.

        Raises:
            ConfigError: a length is no integer of that range, the prompt is longer than the context, or the run does
                not take them (`Deployment.check`); on NxDI it has a graph for the prompt.
        """
        for field, value in (("max_model_len", context), ("batch_size", batch), ("prompt_length", prompt)):
            if value is not None and (type(value) is not int or not 1 <= value <= MOST):
                raise ConfigError(f"expected an integer from 1 to {MOST}, got {value!r:.100}", field=field)
        slots = context or self.context
        if prompt is not None and prompt > slots:
            raise ConfigError(f"expected at most the context ({slots}), got {prompt}", field="prompt_length")
        assert self.deployment is not None
        changed = self.deployment.with_lengths(context, batch, None if self.torch_native else prompt)
        changed.check(self.config)
        most = min(prompt or self.prompt, slots)
        return replace(self, deployment=changed, context=slots, batch=changed.batch_size, prompt=most)


@lru_cache(16)
def _sharding(config: KimiK2Config, layout: Layout, nxdi: bool) -> ShardingPlan:
    plan = make_plan(config, layout)
    return plan if nxdi else without_nxdis(plan)


def make_target(deployment: Deployment, config: KimiK2Config) -> Target:
    """What the planner computes from, of a deployment; of a model without a tower, its text alone.

    Raises:
        ConfigError: it is not for LNC=2, of which alone the memory and rates are known here, the model's tower has no
            such ranks or buckets, or what runs it does not take it or the model.
    """
    deployment.check(config)
    if deployment.neuron_config.logical_nc_config != 2:
        raise ConfigError("expected 2: two ranks share a bank at LNC=1", field="neuron_config.logical_nc_config")
    images = deployment.vision if config.vision else None
    if images is not None:
        check_vision(images, config)
    neuron, options = deployment.hardware.target == "neuron", deployment.neuron_config
    line, columns = deployment.torch_native, max(config.moe_intermediate_size // deployment.moe_tp_degree, 1)
    reserved = options.flash_decoding_enabled or options.is_continuous_batching
    if neuron and config.kv_cache_fp8 and not (line and line.kv_cache_dtype == "fp8"):
        warnings.warn(
            "config.json asks for an FP8 KV cache; on Trainium it is BF16, unless torch_native.kv_cache_dtype is fp8",
            KimiK2Warning,
            stacklevel=2,
        )
    return Target(
        name=deployment.name,
        config=config,
        layout=deployment.layout(config),
        machine=deployment.hardware.machine,
        memory=deployment.hardware.memory,
        batch=deployment.batch_size,
        context=deployment.seq_len,
        prompt=deployment.max_context_length,
        block_size=BLOCK if line else options.blockwise_matmul_config.block_size if neuron else None,
        cache_ranks=deployment.cache_ranks,
        reserved_slots=RESERVED_SLOTS if neuron and reserved else 0,
        continuous=options.is_continuous_batching,
        tower_ranks=images.tp_degree if images else None,
        tower_buckets=images.buckets if images else (),
        prefill_rows_at_once=BLOCK * blocks_at_once(columns) if line else options.prefill_rows_at_once,
        torch_native=line,
        deployment=deployment,
        positions=options.speculation_length or 1,
        lora=options.lora_config,
    )


def check_vision(options: VisionOptions, config: KimiK2Config) -> None:
    """Whether the tower of a model can be compiled so.

    Raises:
        ConfigError: the model has no tower, the ranks cannot share it, or a bucket is none of whole tokens.
    """
    vision = config.vision
    if vision is None:
        raise ConfigError("expected none in the preset: the model takes no images", field="vision")
    if tower_ranks(config, options.tp_degree) != options.tp_degree:
        raise ConfigError(f"{options.tp_degree} ranks cannot share the tower", field="vision.tp_degree")
    for patches, frames in options.buckets:
        rows, columns = vision.merge_kernel_size
        if frames > vision.pos_emb_time or patches % (frames * rows * columns):
            raise ConfigError(
                f"expected a multiple of {frames * rows * columns} patches in up to {vision.pos_emb_time} frames,"
                f" got {patches} in {frames}",
                field="vision.buckets",
            )


def check_context(config: KimiK2Config, tokens: int | None) -> None:
    """ConfigError if a model does not take sequences of so many tokens; None are the preset's."""
    most = config.max_position_embeddings
    if tokens is not None and tokens > most:
        raise ConfigError(f"expected at most max_position_embeddings ({most}), got {tokens}", field="max_model_len")


def load_target(name: str, config: KimiK2Config) -> Target:
    """The target of a preset in configs/, by name or path.

    Raises:
        ConfigError: there is no such preset, or it is wrong.
    """
    return make_target(Deployment.load(name, to_plan=True), config)
