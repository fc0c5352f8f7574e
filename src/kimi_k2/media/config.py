"""How images and videos are prepared: `preprocessor_config.json`, as published and as transformers 5.x writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from kimi_k2.config_fields import first_fault, refuse_unknown
from kimi_k2.errors import ConfigError
from kimi_k2.files import read_fields
from kimi_k2.limits import MEDIA_TOKENS

IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"

_PUBLISHED = {
    "in_patch_limit": "max_patches",
    "in_patch_limit_each_frame": "max_patches_a_frame",
    "patch_limit_on_one_side": "max_side",
    "sample_fps": "sample_fps",
    "temporal_merge_kernel_size": "frames_a_chunk",
    "patch_size": "patch_size",
    "merge_kernel_size": "merge_size",
}
# transformers' names; its two files have the same one of a limit, for images and for videos.
_OF_TRANSFORMERS = {"merge_size": "merge_size", "fps": "sample_fps", "temporal_patch_size": "frames_a_chunk"}
_HARMLESS = (
    *("auto_map", "feature_extractor_type", "image_processor_type", "processor_class", "video_processor_type"),
    *("_processor_class", "_valid_kwargs_names", "model_input_names", "name_or_path", "transformers_version"),
    *("data_format", "device", "disable_grouping", "input_data_format", "return_metadata", "return_tensors"),
)
# What published files also say, and vLLM's processor asks for.
_PUBLISHED_ONLY = {
    "fixed_output_tokens": None,
    "in_patch_limit_video": None,
    "max_num_frames_each_video": None,
    "timestamp_mode": "hh:mm:ss.fff",
}
_ONLY: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in _PUBLISHED_ONLY.items()},
    **dict.fromkeys(("image_mean", "image_std"), ([0.5, 0.5, 0.5], None)),
    **dict.fromkeys(("do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "do_sample_frames"), (True, None)),
    **dict.fromkeys(("do_center_crop", "do_pad"), (False, None)),
    **dict.fromkeys(("crop_size", "num_frames", "pad_size", "video_metadata"), (None,)),
    "rescale_factor": (1 / 255, None),
    "resample": (3, None),  # bicubic
}

Limit = Annotated[int, Field(ge=1, le=4 * MEDIA_TOKENS)]


class MediaConfig(BaseModel):
    """Limits and rates of the processor; the defaults are the published ones of K2.5 and K2.6.

    Attributes:
        max_patches: of an image.
        max_patches_a_frame: of a frame of a video.
        max_side: patches of the longer side.
        sample_fps: frames that are taken of a second of a video.
        frames_a_chunk: of a video that share their tokens.
        patch_size, merge_size: pixels of a patch's side, patches of a token's.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    max_patches: Limit = 16384
    max_patches_a_frame: Limit = 4096
    max_side: Limit = 512
    sample_fps: PositiveFloat = 2.0
    frames_a_chunk: PositiveInt = 4
    patch_size: PositiveInt = 14
    merge_size: PositiveInt = 2

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> MediaConfig:
        """Read the files of a checkpoint; what they leave out, or all of it, is as published.

        Raises:
            ConfigError: a field is malformed or not known, or asks for what is not done, such as another normalisation
                than mean and deviation 0.5.
        """
        fields: dict[str, tuple[Any, str, Path]] = {}
        for name, limit in ((IMAGE_FILE, "max_patches"), (VIDEO_FILE, "max_patches_a_frame")):
            path = Path(directory) / name
            fields |= _fields(read_fields(path, ConfigError), limit, path)
        try:
            return cls.model_validate({name: value for name, (value, *_) in fields.items()})
        except ValidationError as error:
            fault = first_fault(error, None)
            _, name, path = fields[str(fault.field)]
            raise ConfigError(fault.message, field=name, file=path) from None

    def to_published_dict(self) -> dict[str, Any]:
        """`media_proc_cfg` of a published preprocessor_config.json."""
        published = {theirs: getattr(self, ours) for theirs, ours in _PUBLISHED.items()}
        return published | _PUBLISHED_ONLY | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _fields(raw: Mapping[str, Any], limit: str, path: Path) -> dict[str, tuple[Any, str, Path]]:
    """Values by our names, each with its name in the file."""
    published = raw.get("media_proc_cfg", raw)
    if not isinstance(published, Mapping):
        raise ConfigError(f"expected an object, got {type(published).__name__}", field="media_proc_cfg", file=path)
    names = {**_PUBLISHED, **_OF_TRANSFORMERS, "max_patches": limit}
    size = published.get("size")
    try:
        if published is not raw:
            refuse_unknown(raw, {"media_proc_cfg"}, only={}, harmless=_HARMLESS)
        refuse_unknown(published, {*names, "size"}, only=_ONLY, harmless=_HARMLESS)
        if size is not None and (
            not isinstance(size, Mapping)
            or size.keys() != {"max_height", "max_width"}
            or size["max_height"] != size["max_width"]
        ):
            raise ConfigError(f"expected one max_height and max_width, got {size!r:.100}", field="size")
    except ConfigError as error:
        raise ConfigError(error.message, field=error.field, file=path) from None
    fields = {ours: (published[name], name, path) for name, ours in names.items() if published.get(name) is not None}
    if size is not None:
        fields["max_side"] = size["max_height"], "size", path
    return fields
