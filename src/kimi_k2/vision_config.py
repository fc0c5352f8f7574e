"""VisionConfig: the vision tower and projector of K2.5, K2.6 and K2.7, validated field by field; grids of patches.

Published files name fields as the tower's own code does (`vt_hidden_size`, `init_pos_emb_height`), transformers 5.x as
its `Kimi_K25VisionConfig` does (`hidden_size`, `pos_emb_height`); both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from kimi_k2.config_fields import ONLY, check_limits, refuse_unknown, same
from kimi_k2.errors import ConfigError, MediaError
from kimi_k2.limits import VISION_FIELDS

_PUBLISHED = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "projector_ln_eps": "projection_layer_norm_eps",
}
# What the project's code computes; a file may leave them out, or name another value, which is refused.
_FIXED: dict[str, tuple[Any, ...]] = {
    "mm_projector_type": ("patchmerger",),
    "projector_hidden_act": ("gelu",),
    "merge_type": ("sd2_tpool",),
    "pos_emb_type": ("divided_fixed",),
    "video_attn_type": ("spatial_temporal",),
}


# Fields around `vision_config` that speak of images and videos.
OUTER_FIELDS = (
    "media_placeholder_token_id",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "projection_hidden_size",
    "projection_layer_norm_eps",
)
# Of the tower's norms; no configuration names it.
LAYER_NORM_EPS = 1e-5


class Grid(NamedTuple):
    """Patches of one image (one frame) or one chunk of a video."""

    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        """Number of patches, all frames together."""
        return self.frames * self.height * self.width

    def tokens(self, merge: tuple[int, int] = (2, 2)) -> int:
        """Tokens that it takes in the prompt: frames are averaged, `merge` patches become one."""
        return (self.height // merge[0]) * (self.width // merge[1])


class VisionConfig(BaseModel):
    """Hyperparameters of the vision tower and the projector; names are transformers' `Kimi_K25VisionConfig`'s.

    Attributes:
        projection_layer_norm_eps: of the projector's LayerNorm, which has `hidden_size` weights.
        image_token_id: stands in the prompt for every merged patch of an image (`media_placeholder_token_id`).
        video_token_id: the same for videos; None where the member writes `image_token_id` for both. It may lie outside
            the vocabulary (163840), since its embedding is never looked up.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    patch_size: PositiveInt = 14
    hidden_size: PositiveInt = 1152
    num_attention_heads: PositiveInt = 16
    num_hidden_layers: PositiveInt = 27
    intermediate_size: PositiveInt = 4304
    pos_emb_height: PositiveInt = 64
    pos_emb_width: PositiveInt = 64
    pos_emb_time: PositiveInt = 4
    # JSON has lists alone: here, and in the file that NxDI saves beside a compiled model.
    merge_kernel_size: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] = (2, 2)
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    rope_theta: PositiveFloat = 10000.0
    projection_layer_norm_eps: PositiveFloat = 1e-5
    image_token_id: NonNegativeInt = 163605
    video_token_id: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _consistent(self) -> VisionConfig:
        check_limits(self, VISION_FIELDS)
        if max(self.merge_kernel_size) > 16:
            raise ConfigError(f"expected at most 16, got {self.merge_kernel_size!r}", field="merge_kernel_size")
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ConfigError(
                f"expected a multiple of four times num_attention_heads ({self.num_attention_heads}), since RoPE turns"
                f" pairs of two axes, got {self.hidden_size}",
                field="hidden_size",
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of a head (72)."""
        return self.hidden_size // self.num_attention_heads

    @property
    def merged_size(self) -> int:
        """Width of the projector's input: the patches that become a token, side by side (4608)."""
        return self.hidden_size * self.merge_kernel_size[0] * self.merge_kernel_size[1]

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Tokens whose embeddings come from the tower."""
        return (self.image_token_id,) if self.video_token_id is None else (self.image_token_id, self.video_token_id)

    def check_grid(self, grid: Grid) -> None:
        """Refuse a grid that the tower cannot take.

        Raises:
            MediaError: a side is no positive multiple of the merge, or there are too many frames.
        """
        rows, columns = self.merge_kernel_size
        if grid.height < 1 or grid.width < 1 or grid.height % rows or grid.width % columns:
            raise MediaError(f"grid {tuple(grid)}: expected positive multiples of {rows} by {columns} patches")
        if not 1 <= grid.frames <= self.pos_emb_time:
            raise MediaError(f"grid {tuple(grid)}: expected 1 to {self.pos_emb_time} frames")

    def to_hf_dict(self) -> dict[str, Any]:
        """`vision_config` of a config.json in the published names."""
        theirs = {ours: published for published, ours in _PUBLISHED.items()}
        fields = self.model_dump(exclude={"image_token_id", "video_token_id"})
        return {
            theirs.get(name, name): list(value) if isinstance(value, tuple) else value for name, value in fields.items()
        }


def names_in_file(outer: Mapping[str, Any]) -> dict[str, str]:
    """Dotted names in a config.json of VisionConfig's fields, where they are others."""
    vision = outer.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    names = {ours: f"vision_config.{theirs}" for theirs, ours in _PUBLISHED.items() if theirs in vision}
    image = "image_token_id" if "image_token_id" in outer else "media_placeholder_token_id"
    return {**names, "video_token_id": "video_token_id", "image_token_id": image}


def normalised_vision(raw: Any, outer: Mapping[str, Any], text_hidden_size: Any) -> dict[str, Any] | None:
    """A config's `vision_config` as one flat dict with VisionConfig's field names; None if it has none.

    Args:
        raw: the value of `vision_config`.
        outer: the whole config, which holds the tokens' ids.
        text_hidden_size: of the language model, which the projector writes.

    Raises:
        ConfigError: a field names something that this package does not compute.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected an object, got {type(raw).__name__}", field="vision_config")
    own = set(VisionConfig.model_fields) - {"image_token_id", "video_token_id"}
    other = {"model_type", "mm_hidden_size", "text_hidden_size", "rope_parameters", "architectures"}
    refuse_unknown(raw, {*own, *_PUBLISHED, *other}, "vision_config", only=ONLY | _FIXED)
    flat: dict[str, Any] = {_PUBLISHED.get(name, str(name)): value for name, value in raw.items()}
    for published, ours in _PUBLISHED.items():
        if published in raw and raw.get(ours, raw[published]) != raw[published]:
            raise ConfigError(f"is {raw[ours]!r} but {published} is {raw[published]!r}", field=f"vision_config.{ours}")
    rope = flat.get("rope_parameters")
    if rope is not None:
        where = "vision_config.rope_parameters"
        if not isinstance(rope, Mapping):
            raise ConfigError(f"expected an object or null, got {type(rope).__name__}", field=where)
        only = {"rope_type": ("axial", "default", None), "type": ("axial", "default", None)}
        refuse_unknown(rope, {"rope_theta"}, where, only=only, harmless=())
        _agree(flat, "rope_theta", rope.get("rope_theta", 10000.0), f"{where}.rope_theta")
    if "projection_layer_norm_eps" in outer:
        _agree(flat, "projection_layer_norm_eps", outer["projection_layer_norm_eps"], "projection_layer_norm_eps")
    hidden = flat.get("hidden_size", VisionConfig.model_fields["hidden_size"].default)
    for holder, field, expected in (
        (raw, "vision_config.mm_hidden_size", hidden),
        (outer, "projection_hidden_size", hidden),
        (raw, "vision_config.text_hidden_size", text_hidden_size),
    ):
        if expected is None:
            continue  # the language model's own, which is refused without it
        if (width := holder.get(field.rpartition(".")[2])) not in (None, expected):
            raise ConfigError(f"expected {expected!r}, as wide as what it joins, got {width!r}", field=field)
    image, theirs = outer.get("media_placeholder_token_id"), outer.get("image_token_id")
    if image is not None and theirs is not None and not same(image, theirs):
        raise ConfigError(f"is {theirs!r} but media_placeholder_token_id is {image!r}", field="image_token_id")
    image = theirs if image is None else image
    if image is not None:
        flat["image_token_id"] = image
    flat["video_token_id"] = outer.get("video_token_id")
    return {name: value for name, value in flat.items() if name in VisionConfig.model_fields}


def _agree(flat: dict[str, Any], name: str, value: Any, field: str) -> None:
    """Take a value that another place of the file may have too."""
    if not same(flat.setdefault(name, value), value):
        raise ConfigError(f"is {value!r:.100} but vision_config's own is {flat[name]!r:.100}", field=field)
