"""Entry point of `vllm.general_plugins`: vLLM calls `register` in every process that it starts, at times twice."""

from __future__ import annotations

import functools
import logging
import os
from contextlib import suppress
from typing import Any

from kimi_k2.errors import KimiK2Error
from kimi_k2.serving.paged.support import PARSER, config_of, lacking, parser_names
from kimi_k2.serving.vllm import adapter, flags
from kimi_k2.serving.vllm.support import BATCH_INVARIANT, against_decode_steps, invariant, refusal
from kimi_k2.variables import check_environment

logger = logging.getLogger("vllm.kimi_k2")

# vLLM's names of architectures: K2's configurations say the first; vLLM's K2.5 asks for the second for its text.
ARCHITECTURES = {"DeepseekV3ForCausalLM": "KimiK2ForVllm", "DeepseekV2ForCausalLM": "KimiK25TextForVllm"}
# Architectures that configurations with a model of ours name: K2.5's own has its text from the second above.
WITH_WORKER = (*ARCHITECTURES, "KimiK25ForConditionalGeneration")
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # which of vLLM's two: 0 is the first, whose decode steps ours can replace
WORKER = "kimi_k2.serving.vllm.worker.KimiK2Worker"
STEPS_STAY = "decode steps are prepared by vLLM"
BASE_WORKERS = {"cuda": "Worker", "cpu": "CPUWorker"}  # what ours is derived from, by platform


def register() -> None:
    """Have vLLM serve the Kimi-K2 family with our model; other models of these architectures stay vLLM's.

    On a platform that is neither vLLM's own for CUDA nor for CPUs nothing is touched: it may have models of its own.
    """
    with adapter.unless_changed("all operations are vLLM's"):
        from kimi_k2.serving.vllm.adapter import ModelRegistry

        kind = adapter.platform()
        if kind is None:
            return
        for architecture, name in ARCHITECTURES.items():
            target = f"kimi_k2.serving.vllm.registered:{name}"
            if getattr(ModelRegistry.models.get(architecture), "class_name", None) != name:  # once a process
                ModelRegistry.register_model(architecture, target)
        _note_arguments()
        with adapter.unless_changed(STEPS_STAY):
            _offer_worker(kind)


def _note_arguments() -> None:
    """Have vLLM's configuration say, under a key of ours, what its arguments ask of a model (`flags`).

    Of the configuration itself one cannot tell: many of its values are computed, and other versions have other fields.
    """
    from kimi_k2.serving.vllm.adapter import EngineArgs

    stock = EngineArgs.create_engine_config
    if getattr(stock, "of_kimi_k2", False):  # once a process
        return

    @functools.wraps(stock)
    def create(self: Any, *args: Any, **named: Any) -> Any:
        check_environment()
        additional = self.additional_config
        if additional is None or isinstance(additional, dict):
            additional = {name: value for name, value in (additional or {}).items() if name != flags.NOTED}
            noted = flags.judged(self)
            self.additional_config = additional | ({flags.NOTED: noted} if any(noted.values()) else {})
        return stock(self, *args, **named)

    create.of_kimi_k2 = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create


def _offer_worker(kind: str) -> None:
    """Have vLLM's configuration of these models name our worker and its runner, where the user names none."""
    from kimi_k2.serving.vllm.adapter import MODELS_CONFIG_MAP as CONFIGS
    from kimi_k2.serving.vllm.adapter import VerifyAndUpdateConfig

    name = BASE_WORKERS[kind]
    if gone := lacking((), [(adapter.NAMES[name].modules[0], f"class {name}(")]):  # an import would be slow
        raise ImportError(*gone)
    for name in WITH_WORKER:
        stock = CONFIGS.get(name, VerifyAndUpdateConfig)
        if getattr(stock, "of_kimi_k2", False):  # once a process
            continue

        class WithWorker(stock):  # type: ignore[misc, valid-type]
            of_kimi_k2 = True

            @classmethod
            def verify_and_update_config(cls, vllm_config: Any) -> None:
                super().verify_and_update_config(vllm_config)
                _choose_worker(vllm_config)

        CONFIGS[name] = WithWorker


def _choose_worker(vllm_config: Any) -> None:
    """Name our worker for a model of the family; others of its architectures keep vLLM's."""
    it = adapter.Deployment(vllm_config)
    with suppress(KimiK2Error), adapter.unless_changed(STEPS_STAY):
        config_of(it.hf)
        choose_runner(it)
        _leave_prefixes(it)
        if it.worker == "auto":
            it.worker = WORKER


def choose_runner(it: adapter.Deployment) -> None:
    """Have vLLM take its first runner on a GPU, where it would take the second and the user has not said which.

    The choice is made in the environment, which all processes of this deployment read, and so does any other engine
    that this process makes later.
    """
    if RUNNER in os.environ or str(it.device) != "cuda":
        return
    if not it.second_runner or against_decode_steps(it):
        return
    if it.against_first_runner():
        return
    os.environ[RUNNER] = "0"
    try:
        refused = it.second_runner or refusal(it) is not None
    except ValueError:  # a feature of the second runner alone
        refused = True
    if refused:
        del os.environ[RUNNER]
        return
    logger.info("kimi-k2: vLLM's first model runner, for decode steps of ours; %s=1 keeps the second", RUNNER)


def _leave_prefixes(it: adapter.Deployment) -> None:
    """Have no request take another's entries in batch-invariant mode, as a reply's are not a prompt's to the bit."""
    if invariant() and it.prefixes and not refusal(it):
        it.prefixes = False
        logger.info("kimi-k2: no prefix caching, since %s is set", BATCH_INVARIANT)


def register_parsers() -> None:
    """Offer this project's parsers to vLLM, by vLLM's own name too. What a version lacks is named, and left out."""
    for manager, module, name in (
        ("ToolParserManager", "tool_parser", "KimiK2StreamToolParser"),
        ("ReasoningParserManager", "reasoning_parser", "KimiK2StreamReasoningParser"),
    ):
        with adapter.unless_changed(f"vLLM has no parser {PARSER}"):
            managing = getattr(adapter, manager)
            for known in parser_names():  # imported when somebody asks for it
                managing.register_lazy_module(known, f"kimi_k2.serving.vllm.{module}", name)
