"""Compiles the NxDI class of a preset (text, or images too), or lowers its graphs where there is no compiler.

What neuronx-cc is told is the class's (`contrib_model.model_wrapper`), and behind it the deployment's `compiler_args`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig
from kimi_k2.errors import ConfigError, DoesNotFitError, KimiK2Error
from kimi_k2.files import open_regular, read_data, replace_file
from kimi_k2.neuron import contrib, sdk
from kimi_k2.plan.deployment import VISION_ENCODER, Deployment, check_vision, make_target
from kimi_k2.plan.drafts import with_drafts
from kimi_k2.plan.machines import GIB
from kimi_k2.plan.memory import MemoryPlan, advice, memory_plan
from kimi_k2.sharding.experts import expert_formats
from kimi_k2.sharding.manifest import MANIFEST as WEIGHTS_MANIFEST
from kimi_k2.sharding.manifest import WEIGHTS, check_made_for

MANIFEST = "compile.json"  # beside manifest.json, which is the converted weights'


def environment(deployment: Deployment) -> dict[str, str]:
    """Variables that must be set before NxD is imported, for compilation and for loading."""
    lnc = deployment.neuron_config.logical_nc_config
    return {**runtime_environment(lnc, deployment.tp_degree), **deployment.environment}


def runtime_environment(logical_nc_config: int, ranks: int) -> dict[str, str]:
    """The same for a compiled model of which only the physical cores of a logical one and the ranks are known."""
    lnc = str(logical_nc_config)
    return {
        "NEURON_LOGICAL_NC_CONFIG": lnc,  # the runtime's side of logical_nc_config
        "NEURON_RT_VIRTUAL_CORE_SIZE": lnc,  # its older name; NxD's own tests set both
        "NEURON_RT_EXEC_TIMEOUT": "1800",  # seconds, default 30: the first execution loads 1 TB of weights
        "LOCAL_WORLD_SIZE": str(ranks),  # NxD's groups read it: of four ranks without a default, of others with 64
        "XLA_HANDLE_SPECIAL_SCALAR": "1",  # undocumented; NxD's quantized MoE tests set both for FP8 experts
        "UNSAFE_FP8FNCAST": "1",  # e4m3fn is taken for e4m3; no value above 240 is in the weights
    }


def compile_digest(deployment: Deployment) -> str:
    """Changes when anything that compilation depends on does."""
    content = [deployment.model_dump(), environment(deployment)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


Say = Callable[[str], None]


class CompileError(KimiK2Error):
    """The job cannot run here, or its result cannot fit."""


def check_fit(
    config: KimiK2Config, preset: Deployment, draft: str | Path | None = None, draft_tokens: int = 3
) -> MemoryPlan:
    """The memory plan of a preset, with a head that drafts so many tokens, if one core can hold it.

    Raises:
        DoesNotFitError: naming the largest part and what would help.
        ConfigError: the preset has a vision tower that the model lacks, or that cannot be compiled so; or the head was
            made for another model.
    """
    if preset.vision is not None:
        check_vision(preset.vision, config)
    target = make_target(preset, config)
    if draft is not None:
        target = with_drafts(target, DraftConfig.from_pretrained(draft), draft_tokens)
    plan = memory_plan(target)
    if not plan.fits:
        name, size = max(plan.parts.items(), key=lambda part: part[1])
        raise DoesNotFitError(
            f"{preset.name} {plan.verdict} (largest part: {name}, {size / GIB:.1f} GiB); it would fit with"
            f" {' or with '.join(advice(plan))}"
        )
    return plan


def check_sdk(line: sdk.Line = "neuron") -> sdk.Release:
    """The SDK release that is installed here, with NxDI or with vllm-neuron's torch-native line.

    Raises:
        CompileError: there is no compiler, a package of the release is missing or of another release, or a system
            package is older.
    """
    if shutil.which("neuronx-cc") is None:
        hint = "; --hlo-only lowers the graphs without it" if line == "neuron" else ""
        raise CompileError(f"no Neuron compiler (neuronx-cc) on PATH{hint}")
    known = " or ".join(release.name for release in sdk.releases(line))
    release = sdk.release_here(line)
    if release is None:
        raise CompileError(f"expected the packages of Neuron SDK {known} (constraints/), none is installed")
    # A driver may be a container's host's, where it cannot be seen.
    wrong = [state for state in sdk.states(release) if not state.fits and not (state.system and state.found is None)]
    if wrong:
        what = "; ".join(
            f"{state.package} is {state.found or 'not installed'}, expected {state.expected}" for state in wrong
        )
        raise CompileError(f"not the packages of Neuron SDK {release.name} (constraints/{release.file}): {what}")
    return release


def build_application(
    preset: Deployment, config: KimiK2Config, model: str, *, draft: str | Path | None = None, **overrides: Any
) -> Any:
    """NeuronKimiK2ForCausalLM for a preset, NeuronKimiK25ForImageToText where it has a tower; no weights are read.

    Args:
        preset: what is built.
        config: of the model.
        model: checkpoint directory, or name of a published configuration.
        draft: directory of an Eagle3 head, with `plan.nxdi.draft_options` among the overrides.
        overrides: further arguments of KimiK2NeuronConfig.

    Raises:
        NeuronUnavailableError: NxD is not importable.
        ConfigError: the preset has a vision tower and the model none, or a draft beside a tower; or the head is wrong.
    """
    import torch

    if preset.vision is not None:
        check_vision(preset.vision, config)
    if draft is not None:
        preset.check(**overrides)
    config_module = contrib.load("config")
    experts = expert_formats()[preset.experts]
    options = {**preset.neuron_arguments(), **experts.neuron_options(), **overrides}
    options["torch_dtype"] = getattr(torch, options["torch_dtype"])
    neuron = config_module.KimiK2NeuronConfig(compiler_args=preset.compiler_args, **options)
    source = model if Path(model).exists() else config
    load = config_module.load_kimi_config(source)
    if preset.vision is not None:
        media = contrib.load("image_to_text")
        tower = media.KimiK25VisionNeuronConfig(
            vision_buckets=preset.vision.buckets,
            tp_degree=preset.vision.tp_degree,
            **{name: options[name] for name in ("torch_dtype", "logical_nc_config", "save_sharded_checkpoint")},
        )
        return media.NeuronKimiK25ForImageToText(model, media.KimiK25InferenceConfig(neuron, tower, load_config=load))
    inference = config_module.KimiK2InferenceConfig(neuron, load_config=load)
    if draft is not None:
        inference = contrib.load("draft_head").with_draft(inference, draft)
    return contrib.load("modeling_kimi_k2").NeuronKimiK2ForCausalLM(model, inference)


def lower_all(preset: Deployment, model: str, out: Path, say: Say, **overrides: Any) -> None:
    """Write the HLO text of every graph; graphs of the manifest that are still whole are kept.

    `overrides` as for `build_application`.
    """
    config = KimiK2Config.load(model)
    manifest = Manifest(out, preset, config, overrides)
    app = build_application(preset, config, model, disable_argmax_kernel=True, **overrides)  # which needs the compiler
    jobs = _lowering_jobs(app)
    for number, (name, facts, lower) in enumerate(jobs, start=1):
        if manifest.has(name):
            say(f"[{number}/{len(jobs)}] {name}: kept")
            continue
        start = time.monotonic()
        graph = lower()
        replace_file(out / name, graph.hlo)
        manifest.add(name, facts)
        say(f"[{number}/{len(jobs)}] {name}: {time.monotonic() - start:.0f} s, {len(graph.hlo) / 1e6:.1f} MB of HLO")


def _lowering_jobs(app: Any) -> list[tuple[str, dict[str, Any], Callable[[], Any]]]:
    """File, facts for the manifest and lowering of each graph: the text model's, then the tower's."""
    lowering, jobs = contrib.load("lowering"), list[tuple[str, dict[str, Any], Callable[[], Any]]]()
    for stage, wrapper in lowering.wrappers(app).items():
        for number, bucket in enumerate(wrapper.neuron_config.buckets):
            name, facts = f"{stage}_{bucket}", {"stage": stage, "bucket": bucket}
            if stage == VISION_ENCODER:
                facts["frames"] = wrapper.neuron_config.graphs()[number].frames
                name += f"x{facts['frames']}"
            jobs.append((f"{name}.hlo.txt", facts, partial(lowering.lower, app, stage, number)))
    return jobs


def check_weights(preset: Deployment, config: KimiK2Config, model: str, out: Path) -> None:
    """Refuse what could not be loaded, before the compiler runs: weights are pre-sharded behind it.

    Raises:
        CompileError: neither converted files in `out` nor a checkpoint's are there.
        ConfigError, CheckpointError: they are of another layout or model, or not whole.
    """
    if not preset.neuron_config.save_sharded_checkpoint:
        return
    if (out / WEIGHTS_MANIFEST).exists():
        check_made_for(out, config, preset.layout(config))
        return
    try:
        with CheckpointReader.for_config(model, config):
            return
    except KimiK2Error as error:
        raise CompileError(
            f"no weights: {out} holds no converted files (`kimi-k2 convert`; --weights names a directory that does),"
            f" and of the checkpoint: {error}"
        ) from None


def take_weights(converted: Path, out: Path) -> None:
    """Link the files that `kimi-k2 convert` wrote into `out`, beside graphs of their layout.

    Raises:
        CompileError: there are none, or `out` holds others.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS_MANIFEST, WEIGHTS):
        source, link = (converted / name).resolve(), out / name
        if not source.exists():
            raise CompileError(f"{converted} holds no {name}, which `kimi-k2 convert` writes")
        if link.resolve() == source:
            continue
        if link.exists():
            raise CompileError(f"{link} is there already")
        link.symlink_to(source)


def compile_all(preset: Deployment, model: str, out: Path, say: Say, **overrides: Any) -> None:
    """Compile to NEFFs with NxDI, then pre-shard the weights if they are not there yet; both resume.

    neuronx-cc's cache keeps graphs that were finished before.

    Raises:
        CompileError: see `check_weights`.

    Args:
        preset: what is compiled.
        model: checkpoint directory, or name of a published configuration.
        out: directory for graphs and weights.
        say: called with each line of progress.
        overrides: as for `build_application`.
    """
    config = KimiK2Config.load(model)
    manifest = Manifest(out, preset, config, overrides)
    if manifest.complete:
        say(f"{out} is complete for this preset and model: nothing to do")
        return
    check_weights(preset, config, model, out)
    os.environ.update(environment(preset))
    app = build_application(preset, config, model, **overrides)
    start = time.monotonic()
    say("compiling (NxDI reports each graph) ...")
    app.compile(str(out))
    for path in sorted(out.rglob("*")):
        # The weights are a terabyte and have checksums of their own.
        if path.is_file() and path.parent.name != WEIGHTS and path.name not in (MANIFEST, WEIGHTS_MANIFEST):
            manifest.add(str(path.relative_to(out)), {})
    manifest.finish(seconds=round(time.monotonic() - start))
    say(f"compiled in {time.monotonic() - start:.0f} s; {out / MANIFEST} lists the artifacts")


class Manifest:
    """compile.json beside the artifacts: what they were made from, and their sizes and digests."""

    def __init__(
        self, out: Path, preset: Deployment, config: KimiK2Config, overrides: Mapping[str, Any] | None = None
    ) -> None:
        self.out, self.path = out, out / MANIFEST
        made_from = {
            "preset": preset.name,
            "preset_digest": compile_digest(preset),
            "config_digest": hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16],
        }
        if overrides:
            made_from["overrides"] = json.dumps(overrides, sort_keys=True)
        out.mkdir(parents=True, exist_ok=True)
        self.content: dict[str, Any] = {"made_from": made_from, "complete": False, "artifacts": {}}
        if self.path.is_file():
            try:
                stored = read_data(self.path, ConfigError)
                artifacts_of = stored["made_from"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"not a manifest: {error}", file=self.path) from None
            if artifacts_of != made_from:
                raise CompileError(f"{out} holds artifacts of another preset or model ({artifacts_of['preset']})")
            self.content = stored

    @property
    def complete(self) -> bool:
        """Whether the job finished and every artifact is still there, whole."""
        return bool(self.content["complete"]) and all(self.has(name) for name in self.content["artifacts"])

    def has(self, name: str) -> bool:
        """Whether an artifact was finished and is unchanged."""
        entry = self.content["artifacts"].get(name)
        path = self.out / name
        return entry is not None and path.is_file() and _digest(path) == entry["sha256"]

    def add(self, name: str, facts: dict[str, Any]) -> None:
        """Record a finished artifact."""
        path = self.out / name
        self.content["artifacts"][name] = {"bytes": path.stat().st_size, "sha256": _digest(path), **facts}
        self._save()

    def finish(self, **facts: Any) -> None:
        """Mark the job complete."""
        self.content.update(complete=True, **facts)
        self._save()

    def _save(self) -> None:
        replace_file(self.path, json.dumps(self.content, indent=2))


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
