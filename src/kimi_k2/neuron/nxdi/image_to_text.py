"""K2.5 on NxDI's image-to-text base: text model and vision tower as two compiled models of one application.

Embeddings of media take their tokens' places inside the prefill graph, by NxDI's own arguments for that
(`vision_embeddings`, `vision_mask`). Decode is the text class's, untouched. The tower's ranks are a tensor-parallel
group of their own, whose number divides its 16 heads; in CPU mode they are the text model's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed.trace.trace import get_sharded_checkpoint
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.image_to_text_model_base import (
    ImageToTextInferenceConfig,
    NeuronBaseForImageToText,
)
from neuronx_distributed_inference.models.image_to_text_model_wrapper import ImageToTextModelWrapper
from neuronx_distributed_inference.models.model_wrapper import (
    VISION_ENCODER_MODEL_TAG,
    EncoderModelInstance,
    ModelWrapper,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from kimi_k2.config import KimiK2Config
from kimi_k2.contrib_model.modeling_kimi_k2 import rank_file
from kimi_k2.engine.vision import MediaRows
from kimi_k2.errors import ConfigError, MediaError
from kimi_k2.neuron.application import padded
from kimi_k2.vision_config import Grid

from .config import KimiK2InferenceConfig, KimiK2NeuronConfig
from .model_wrapper import KimiK2ModelWrapper
from .modeling_kimi_k2 import NeuronKimiK2ForCausalLM, NeuronKimiK2Model
from .vision import (
    POSITIONS,
    KimiK25VisionGraph,
    VisionBucket,
    VisionInputs,
    choose_bucket,
    convert_vision_state_dict,
    input_shapes,
    load_vision,
)

# Places of NxDI's arguments for media in a call of a text graph.
EMBEDDINGS, INDEX = 22, 23


class KimiK25VisionNeuronConfig(NeuronConfig):
    """Neuron config of the tower.

    Args:
        vision_buckets: patches and frames of each graph; see VisionBucket.

    Raises:
        ConfigError: there is no bucket.
    """

    def __init__(self, *, vision_buckets: Sequence[Sequence[int]], **kwargs: Any) -> None:
        if not vision_buckets:
            raise ConfigError("expected at least one graph's patches and frames", field="vision_buckets")
        kwargs.pop("buckets", None)
        super().__init__(**kwargs)
        self.vision_buckets = [list(bucket) for bucket in vision_buckets]
        # NxDI names the graphs' folders by these.
        self.buckets = [patches for patches, _ in self.vision_buckets]

    def graphs(self) -> list[VisionBucket]:
        """The graphs' shapes."""
        return [VisionBucket(*bucket) for bucket in self.vision_buckets]


class KimiK25InferenceConfig(ImageToTextInferenceConfig):
    """Configurations of both models; `text_config` is the text class's own, and holds the tower's sizes too.

    Args:
        load_config: `load_kimi_config` of a checkpoint, or None where `text_config` (as JSON has it) is given.
    """

    text_config: KimiK2InferenceConfig
    vision_config: InferenceConfig

    def __init__(
        self,
        text_neuron_config: KimiK2NeuronConfig,
        vision_neuron_config: KimiK25VisionNeuronConfig,
        fused_spec_config: Any = None,
        load_config: Callable[[InferenceConfig], None] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        text, vision = kwargs.pop("text_config", None) or {}, kwargs.pop("vision_config", None) or {}
        # NxDI's own constructor makes plain InferenceConfigs of both.
        super(ImageToTextInferenceConfig, self).__init__(
            copy.deepcopy(text_neuron_config), fused_spec_config=fused_spec_config, metadata=metadata, **kwargs
        )
        self.text_config = KimiK2InferenceConfig(text_neuron_config, load_config=load_config, **text)
        if self.text_config.hf.vision is None:
            raise ConfigError("missing: this member of the family takes no images", field="vision_config")
        self.vision_config = InferenceConfig(vision_neuron_config, **vision)
        self._name_or_path = getattr(self.text_config, "_name_or_path", "")

    def get_required_attributes(self) -> list[str]:
        """None: the two configurations check themselves."""
        return []

    @classmethod
    def get_neuron_config_cls(cls) -> type[KimiK2NeuronConfig]:
        """The text model's."""
        return KimiK2NeuronConfig

    @classmethod
    def from_json_string(cls, json_string: str, **kwargs: Any) -> KimiK25InferenceConfig:
        """What `to_json_string` wrote; NxDI's reads both neuron configs with one class."""
        fields = {**json.loads(json_string), **kwargs}
        fields.pop("neuron_config", None)
        text = KimiK2NeuronConfig(**fields["text_config"].pop("neuron_config"))
        vision = KimiK25VisionNeuronConfig(**fields["vision_config"].pop("neuron_config"))
        return cls(text, vision, **fields)


class NeuronKimiK25TextModel(NeuronKimiK2Model):
    """The text graph, whose prefill takes embeddings of media."""

    def encode_vision_to_input(self, inputs_embeds: Tensor, vision_embeddings: Tensor, vision_mask: Tensor) -> Tensor:
        """Rows of media in the place of their tokens' own.

        Args:
            inputs_embeds: [B, S, H].
            vision_embeddings: [M, H], all sequences' one after another, then anything.
            vision_mask: integers [B, S], the row that a token stands for, negative for text.
        """
        index = vision_mask.to(torch.int64)
        rows = vision_embeddings[index.clamp(min=0).flatten()].view(inputs_embeds.shape)
        return torch.where((index >= 0).unsqueeze(-1), rows, inputs_embeds)


class KimiK25TextWrapper(KimiK2ModelWrapper, ImageToTextModelWrapper):
    """The text graphs' wrapper: media's rows and their index are filled up to the graph that NxDI chooses.

    NxDI's own puts zeros for embeddings of another length than the graph's. Nothing is cut off or zeroed here.
    """

    def rows(self, tensors: Sequence[Any], order: Tensor) -> list[Any]:
        """The base's; embeddings are no rows of the batch, of whatever length."""
        ordered = super().rows(tensors, order)
        if len(tensors) > EMBEDDINGS:
            ordered[EMBEDDINGS] = tensors[EMBEDDINGS]
        return ordered

    def _forward_with_pad(self, *args: Any) -> Any:
        # NxDI's for images takes no notice of apply_seq_ids_mask: it fills a batch up with lines that would be written.
        self._lines: Tensor | None = args[3] if self.neuron_config.apply_seq_ids_mask else None
        try:
            return super()._forward_with_pad(*args)
        finally:
            self._lines = None

    def _forward(self, *args: Any) -> Any:
        if (lines := getattr(self, "_lines", None)) is not None:
            own = torch.isin(args[3], lines)
            args = (*args[:3], torch.where(own, args[3], torch.full_like(args[3], -1)), *args[4:])
        return super()._forward(*args)

    @staticmethod
    def get_dummy_vision_inputs(
        config: InferenceConfig, input_ids: Tensor, n_active_tokens: int, fill_value: int
    ) -> tuple[Tensor, Tensor]:
        """A prefill graph takes a row for every token, [B S, H], and int32 [B, S]; a decode graph takes none."""
        if input_ids.shape[-1] == 1:
            return torch.zeros(0, dtype=config.neuron_config.torch_dtype), torch.zeros(0, dtype=torch.int32)
        rows = len(input_ids) * n_active_tokens
        embeddings = torch.zeros(rows, config.hidden_size, dtype=config.neuron_config.torch_dtype)
        return embeddings, torch.full((len(input_ids), n_active_tokens), -1, dtype=torch.int32)

    def pad_inputs(self, *args: Any, pad_type: str = "first_fit") -> tuple[Any, ...]:
        """NxDI's, and the media's arguments.

        Raises:
            MediaError: more rows than the graph takes, or a batch that NxDI would cut or put into another order.
        """
        args = tuple(super().pad_inputs(*args, pad_type=pad_type))
        if len(args) <= INDEX or not args[EMBEDDINGS].numel():
            return args
        (batch, length), embeddings, index = args[0].shape, args[EMBEDDINGS], args[INDEX]
        if batch != self.neuron_config.batch_size:
            raise MediaError(
                f"{batch} prompts with images at once, expected the compiled batch of {self.neuron_config.batch_size}"
            )
        rows, columns = batch * length - len(embeddings), length - index.shape[1]
        if rows < 0 or columns < 0:
            raise MediaError(
                f"{len(embeddings)} rows of images for {index.shape[1]} tokens; the largest graph takes {length} tokens"
            )
        filled = F.pad(embeddings.to(self.neuron_config.torch_dtype), (0, 0, 0, rows))
        return (*args[:EMBEDDINGS], filled, F.pad(index, (0, columns), value=-1), *args[INDEX + 1 :])


class KimiK25VisionWrapper(ModelWrapper):
    """The tower's graphs; its inputs fit one of them already, see VisionInputs."""

    def input_generator(self) -> list[tuple[Tensor, ...]]:
        """Zeros in each graph's shapes."""
        vision = self.config.text_config.hf.vision
        return [
            tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in input_shapes(vision, bucket, torch.float32))
            for bucket in self.neuron_config.graphs()
        ]

    def get_model_instance(self) -> EncoderModelInstance:
        """The tower, made when NxD asks for it."""
        return EncoderModelInstance(model_cls=self.model_cls, config=self.config)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the graph of these shapes.

        Raises:
            RuntimeError: the model is not loaded.
        """
        if self.model is None:
            raise RuntimeError("the tower is not loaded")
        out: Tensor = self._forward(*inputs)
        return out


def make_graph(config: KimiK25InferenceConfig) -> KimiK25VisionGraph:
    """The tower of a configuration, as its wrapper calls it."""
    neuron = config.vision_config.neuron_config
    return KimiK25VisionGraph(config.text_config.hf, neuron.tp_degree, neuron.torch_dtype)


class NeuronKimiK25ForImageToText(NeuronKimiK2ForCausalLM, NeuronBaseForImageToText):
    """K2.5 with images, compiled: `compile`, then `load`, `prefill` and calls as the text class's for decode."""

    text_model_cls = NeuronKimiK25TextModel
    text_model_wrapper = KimiK25TextWrapper
    vision_model_wrapper = KimiK25VisionWrapper
    _model_cls = NeuronKimiK25TextModel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        NeuronBaseForImageToText.__init__(
            self, self.text_model_cls, KimiK25VisionGraph, self.text_model_wrapper, self.vision_model_wrapper, *args,
            **kwargs,
        )  # fmt: skip
        self._inputs: VisionInputs | None = None

    @classmethod
    def get_config_cls(cls) -> type[KimiK25InferenceConfig]:
        """KimiK25InferenceConfig."""
        return KimiK25InferenceConfig

    def enable_vision_encoder(self, enable_wlt_optimization: bool = True, **model_init_kwargs: Any) -> None:
        """Add the tower's graphs."""
        config = copy.deepcopy(self.config)
        config.neuron_config = config.vision_config.neuron_config
        arguments = ["--model-type=transformer", "-O1", "--auto-cast=none"]
        self.vision_encoder_model = self.vision_model_wrapper(
            config=config,
            model_cls=make_graph,
            tag=VISION_ENCODER_MODEL_TAG,
            compiler_args=" ".join([*arguments, f"--lnc={config.neuron_config.logical_nc_config}"]),
            priority_model_idx=0 if enable_wlt_optimization else None,
            model_init_kwargs=model_init_kwargs,
        )
        self.vision_models.append(self.vision_encoder_model)

    def get_vision_builder(self, debug: bool = False) -> Any:
        """NxDI's, with the tower's tensors: its own gives both builders one loader."""
        builder = super().get_vision_builder(debug)
        builder.checkpoint_loader = self.vision_state_dict
        return builder

    def vision_state_dict(self) -> dict[str, Tensor]:
        """The tower's tensors under its graph's names, uncut."""
        return convert_vision_state_dict(self._stored_vision(), self.vision_config.neuron_config.torch_dtype)

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict[str, Tensor]:
        """The text model's tensors."""
        return self.get_state_dict(self.source, self.text_config)

    shard_text_weights = NeuronKimiK2ForCausalLM.shard_weights

    def load_weights(  # type: ignore[override]  # as NxDI's two bases differ
        self,
        text_compiled_model_path: str,
        vision_compiled_model_path: str,
        start_rank_id: int | None = None,
        local_ranks_size: int | None = None,
    ) -> None:
        """As NxDI's, which reads as many files of the tower as the text model has ranks; the tower has its own."""
        for name, builder, path in (
            ("text", self.get_text_builder, text_compiled_model_path),
            ("vision", self.get_vision_builder, vision_compiled_model_path),
        ):
            neuron = getattr(self, f"{name}_config").neuron_config
            first = neuron.start_rank_id if start_rank_id is None else start_rank_id
            count = neuron.local_ranks_size
            if name == "text" and local_ranks_size is not None:
                count = local_ranks_size
            files = [rank_file(Path(path), rank) for rank in range(first, first + count)]
            weights = (
                [load_file(file) for file in files] if neuron.save_sharded_checkpoint else builder().shard_checkpoint()
            )
            self.initialize(getattr(self, f"{name}_traced_model"), weights, first)

    def to_cpu(self) -> None:
        """The text class's, with the tower over its ranks: one module for all buckets."""
        self.config = self.text_config
        super().to_cpu()
        self.config = self.full_config
        self.vision_encoder_model.model = tower = make_graph(self.config).eval()
        state = self.vision_state_dict()
        get_sharded_checkpoint(state, tower, torch.distributed.get_rank(), self.neuron_config.tp_degree)
        tower.load_state_dict(state)

    def _stored_vision(self) -> dict[str, Tensor]:
        return load_vision(self.source, KimiK2Config.from_pretrained(self.source))  # which knows the names' prefix

    @property
    def vision_inputs(self) -> VisionInputs:
        """What makes the tower's inputs on the host."""
        if self._inputs is None:
            vision = self.text_config.hf.vision
            assert vision is not None
            self._inputs = VisionInputs(vision, self._stored_vision()[POSITIONS])
        return self._inputs

    @torch.inference_mode()
    def encode(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Embeddings of a pack, [tokens of all grids, H].

        Raises:
            MediaError: no compiled graph holds the pack.
        """
        inputs = self.vision_inputs
        bucket = choose_bucket(grids, self.vision_config.neuron_config.graphs(), inputs.config)
        rows: Tensor = self.vision_encoder_model(*inputs(pixels, grids, bucket))
        return rows[: sum(grid.tokens(inputs.config.merge_kernel_size) for grid in grids)]

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        media: Sequence[Sequence[tuple[Tensor, Grid]]],
        seq_ids: Tensor | None = None,
    ) -> Any:
        """Run prompts with their images and video chunks; NxDI's output, logits of the last tokens.

        Args:
            prompts: token ids.
            media: of each prompt, pixels [patches, 3, patch, patch] and grid in the order of their tokens.
            seq_ids: each prompt's cache line.

        Raises:
            MediaError: an image fits no bucket, a prompt is too long, or its media tokens are not those of its images.
        """
        features = [[self.encode(pixels, [grid]) for pixels, grid in own] for own in media]
        rows = MediaRows.of(prompts, features, self.vision_inputs.config.media_token_ids)
        inputs, longest = padded(prompts), self.neuron_config.max_context_length
        ids = inputs["input_ids"]
        if (width := ids.shape[1]) > longest:
            raise MediaError(f"a prompt of {width} tokens; max_context_length is {longest}")
        if rows is not None:
            index = rows.padded(width).to(torch.int32)
            inputs |= {"input_ids": torch.where(index >= 0, 0, ids), "vision_mask": index}
            inputs["vision_embeddings"] = rows.features
        return self(**inputs, seq_ids=seq_ids)

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The text class's; a graph has all its inputs, so that text alone comes with empty ones for media.

        NxDI's image-to-text base leaves out what is None, which would move the inputs after it.
        """
        if kwargs.get("sampling_params") is None:
            kwargs["sampling_params"] = self.default_sampling_params[: len(input_ids)]
        if kwargs.get("vision_embeddings") is None:
            neuron = self.text_config.neuron_config
            none = 0 if input_ids.shape[1] == 1 else 1
            kwargs["vision_embeddings"] = torch.zeros(
                (none, self.text_config.hidden_size) if none else (0,), dtype=neuron.torch_dtype
            )
            kwargs["vision_mask"] = torch.full(input_ids.shape if none else (0,), -1, dtype=torch.int32)
        return super().forward(input_ids, *args, **kwargs)
