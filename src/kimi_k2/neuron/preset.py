"""Deployment presets: one YAML file in configs/ for each way to run on Trainium."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from kimi_k2.errors import ConfigError

CONFIGS = Path(str(files("kimi_k2"))) / "configs"  # a link to the repository's configs/


class NeuronPreset(BaseModel):
    """A deployment.

    `neuron_config` is handed to NxDI's MoENeuronConfig as it stands; the fields that plans need are properties here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    instance: str
    experts: Literal["bf16", "blockwise_fp8", "per_channel_fp8"]
    neuron_config: dict[str, Any]
    environment: dict[str, str] = {}
    compiler_args: list[str] = []

    @classmethod
    def load(cls, name_or_path: str | Path) -> NeuronPreset:
        """By name (a file in configs/) or path.

        Raises:
            ConfigError: there is no such preset, or a field is missing, unknown or mistyped.
        """
        path = Path(name_or_path)
        if path.suffix != ".yaml":
            path = CONFIGS / f"{name_or_path}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in CONFIGS.glob("trn2-*.yaml")))
            raise ConfigError(f"no such preset; known: {known}", file=path)
        try:
            preset = cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except yaml.YAMLError as error:
            raise ConfigError(f"not valid YAML: {error}", file=path) from None
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ConfigError(first["msg"], field=field, file=path) from None
        for field in ("tp_degree", "moe_tp_degree", "moe_ep_degree", "seq_len", "batch_size"):
            value = preset.neuron_config.get(field)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"expected a positive integer, got {value!r}", field=f"neuron_config.{field}", file=path
                )
        return preset

    def _degree(self, field: str) -> PositiveInt:
        return int(self.neuron_config[field])

    @property
    def ranks(self) -> int:
        """Logical cores."""
        return self._degree("tp_degree")

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert."""
        return self._degree("moe_tp_degree")

    @property
    def moe_ep(self) -> int:
        """Groups that the experts are divided among."""
        return self._degree("moe_ep_degree")

    @property
    def digest(self) -> str:
        """Changes when anything that compilation depends on does."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:16]
