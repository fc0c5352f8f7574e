"""Where an engine has changed, or is asked for what ours does not do, it runs as without us, and a line says why.

vLLM and SGLang stand in for themselves here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import engines
import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.kernels.attention.mla_sizes import PAGE
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.mxfp4 import CompressedMxfp4Format
from kimi_k2.quantization.nvfp4 import Nvfp4Format
from kimi_k2.quantization.stored import StoredFormat, formats
from kimi_k2.serving.paged import support as common
from kimi_k2.serving.sglang import plugin as sglang_plugin
from kimi_k2.serving.sglang import support as sglang_support
from kimi_k2.serving.vllm import adapter, flags, plugin, support

HERE = Path(plugin.__file__).parent
MODEL = ("attention", "lora", "model", "prompt_graphs", "ranks", "step", "tower")
STEPS = ("decode_steps", "runner")
WORKER = (*STEPS, *MODEL)
K2 = "DeepseekV3ForCausalLM"
CPU: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float32}


def model(**changed: Any) -> SimpleNamespace:
    """Hugging Face's configuration of K2."""
    raw = {**KimiK2Config.load("kimi-k2-instruct-0905").to_hf_dict(), **changed}
    return SimpleNamespace(to_dict=lambda: raw)


def published(name: str, **more: Any) -> dict[str, Any]:
    """How a published model's weights are stored, and what is said besides."""
    return {"quantization_config": KimiK2Config.load(name).to_hf_dict()["quantization_config"] | more}


def taken_of_vllm(*modules: str) -> list[str]:
    """Names that ours import of the adapter, sorted."""
    trees = [ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8")) for module in modules]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in found if node.module == adapter.__name__ for alias in node.names}
    return sorted(names & adapter.NAMES.keys())


class Anything(type):
    """The type of classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


class FakeVllm:
    """All names that ours take of the adapter, but for those that are taken away.

    Attributes:
        registered: architectures, as they come.
        configs: classes of configurations by architecture.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.registered, self.configs = monkeypatch, list[str](), dict[str, Any]()
        models: dict[str, object] = {}

        def register(architecture: str, target: str) -> None:
            self.registered.append(architecture)
            models[architecture] = SimpleNamespace(class_name=target.rpartition(":")[2])

        given = {
            "ModelRegistry": SimpleNamespace(models=models, register_model=register),
            "MODELS_CONFIG_MAP": self.configs,
            "CPUWorker": type("CPUWorker", (), {"compile_or_warm_up_model": lambda self: "warm"}),
            "EngineArgs": type("EngineArgs", (), {"create_engine_config": lambda self: self.additional_config}),
            "VerifyAndUpdateConfig": type("Stock", (), {"verify_and_update_config": lambda config: None}),
        }
        for name in adapter.NAMES:
            monkeypatch.setitem(vars(adapter), name, given[name] if name in given else Anything(name, (), {}))
        self.on("vllm.platforms.cpu")
        self.derive_worker_from("JSONDecoder")

    def on(self, platform: str, **named: Any) -> None:
        """A platform of a module's."""
        named = {"is_cuda": lambda _: False, "is_cpu": lambda _: True, "__module__": platform, **named}
        self.monkeypatch.setitem(vars(adapter), "current_platform", type("Platform", (), named)())

    def without(self, name: str) -> None:
        self.monkeypatch.delitem(vars(adapter), name)
        self.monkeypatch.setitem(adapter.NAMES, name, adapter.Row("", ("json.nowhere",)))

    def derive_worker_from(self, name: str) -> None:
        """A class whose source there is, or is not."""
        self.monkeypatch.setattr(plugin, "BASE_WORKERS", {"cpu": name})
        self.monkeypatch.setitem(adapter.NAMES, name, adapter.Row("", ("json.decoder",)))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch)


@pytest.fixture
def fresh() -> Iterator[Callable[[str], Any]]:
    """Imports modules of the plugin anew, and forgets them."""
    package = sys.modules[plugin.__package__ or ""]
    with patch.dict(sys.modules), patch.dict(vars(package)):
        for module in (*WORKER, "registered", "worker"):
            sys.modules.pop(f"{package.__name__}.{module}", None)
            vars(package).pop(module, None)
        yield lambda name: importlib.import_module(f"{package.__name__}.{name}")
        others = {name: module for name, module in sys.modules.items() if not name.startswith(f"{package.__name__}.")}
    sys.modules.update(others)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the GPU and the compiler that the kernels need."""
    monkeypatch.delenv(support.ON_GPU, raising=False)
    monkeypatch.setattr(support, "is_hopper", lambda: True)
    monkeypatch.setattr(common, "find_nvcc", lambda: "nvcc")
    monkeypatch.setenv(plugin.RUNNER, "")  # so that what a test's code sets is undone
    monkeypatch.delenv(plugin.RUNNER)


@pytest.mark.parametrize("gone", [*(one for one in taken_of_vllm(*MODEL) if not one.startswith("Deepseek")), ""])
def test_the_model_is_vllms_without_a_name(
    gone: str, vllm: FakeVllm, fresh: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    if gone:
        vllm.without(gone)
    with caplog.at_level(logging.WARNING):
        module = fresh("registered")
    for ours, theirs in (("KimiK2ForVllm", K2), ("KimiK25TextForVllm", "DeepseekV2ForCausalLM")):
        assert (getattr(module, ours) is getattr(adapter, theirs)) == bool(gone)
    assert caplog.text.count("all operations are vLLM's, since it has changed: ") == bool(gone)
    assert gone in caplog.text
    assert gone or module.KimiK2ForVllm.__module__ == "kimi_k2.serving.vllm.model"


@pytest.mark.parametrize("gone", taken_of_vllm(*STEPS))
def test_steps_are_vllms_without_a_name(
    gone: str, vllm: FakeVllm, fresh: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    vllm.without(gone)
    with caplog.at_level(logging.WARNING):
        assert fresh("worker").KimiK2Worker().compile_or_warm_up_model() == "warm"
    assert caplog.text.count("decode steps are prepared by vLLM, since it has changed: ") == 1
    assert gone in caplog.text


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("", ""),
        ("ModelRegistry", "all operations are vLLM's"),
        ("current_platform", "all operations are vLLM's"),
        ("MODELS_CONFIG_MAP", "decode steps are prepared by vLLM"),
        ("class Gone", "since it has changed: json.decoder: "),
    ],
)
def test_registration(gone: str, said: str, vllm: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM calls it again."""
    if gone == "class Gone":
        vllm.derive_worker_from("Gone")
    elif gone:
        vllm.without(gone)
    with caplog.at_level(logging.WARNING):
        plugin.register()
        offered = dict(vllm.configs)
        plugin.register()
    assert vllm.registered == ([] if "operations" in said else list(plugin.ARCHITECTURES))
    assert sorted(offered) == ([] if gone else sorted(plugin.WITH_WORKER))
    assert offered == vllm.configs
    assert said in caplog.text and gone in caplog.text and bool(caplog.text) == bool(gone)


def test_another_platform_keeps_its_models_and_worker(vllm: FakeVllm) -> None:
    """vllm-neuron's, on a CPU too."""
    vllm.on("vllm_neuron.vllm.platform")
    plugin.register()
    assert vllm.registered == [] and not vllm.configs


def test_parsers_managers_gone(vllm: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    for manager in ("ToolParserManager", "ReasoningParserManager"):
        vllm.without(manager)
    with caplog.at_level(logging.WARNING):
        plugin.register_parsers()
    assert caplog.text.count("no parser kimi_k2_stream") == 2


def test_engines_may_keep_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it is ours too: test_vllm_parsers.py, test_sglang_parser.py."""
    monkeypatch.setenv("KIMI_K2_PARSERS", "0")
    assert common.parser_names() == ["kimi_k2_stream"]


def deployment(kind: type[SimpleNamespace] = SimpleNamespace, /, **changed: Any) -> adapter.Deployment:
    """What `refusal` reads of vLLM's configuration: one GPU, as the command line's defaults leave it; of K2."""
    fields = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
        "decode_context_parallel_size": 1, "enable_expert_parallel": False, "enable_eplb": False,
        "cache_dtype": "auto", "block_size": 16, "user_specified_block_size": False, "dtype": torch.bfloat16,
        "device_type": "cuda", "lora_config": None, "speculative_config": None, "kv_transfer_config": None,
        "max_num_seqs": 1024, "enable_prefix_caching": True, "hf_text_config": model(**changed.pop("model", {})),
        **changed,
    }  # fmt: skip
    config = kind(**fields)
    for part in ("parallel_config", "cache_config", "model_config", "device_config", "scheduler_config"):
        setattr(config, part, config)
    return adapter.Deployment(config)


BALANCED: dict[str, Any] = {"tensor_parallel_size": 8, "enable_expert_parallel": True, "enable_eplb": True}
FILTERED: dict[str, Any] = {"tensor_parallel_size": 8, "enable_expert_parallel": True, "enable_ep_weight_filter": True}
NGRAM = {"speculative_config": SimpleNamespace(method="ngram")}
SPREAD = {"decode_context_parallel_size": 2, "tensor_parallel_size": 8}
TOGETHER = "which the kernels do not take together"
OTHER_EXPERTS = "a loader that leaves out other experts than ours"
LORA: dict[str, Any] = {"lora_config": SimpleNamespace(target_modules=None)}
ROUTED = {"aux_output_config": SimpleNamespace(enable_return_routed_experts=True)}
REPLICAS: dict[str, Any] = {"data_parallel_size": 2, "all2all_backend": "naive"}
PIPELINE, TRANSFER = {"pipeline_parallel_size": 2}, {"kv_transfer_config": object()}
PAGES = "the kernels take 64"
NOT_KNOWN = "not known, so it may change what the model computes; remove it if it has no effect"
STORED, NOT_TAKEN = "field 'quantization_config': weights stored as", "which our loader in an engine does not take"

TAKEN = ("fp8", "int4", "nvfp4", "nvfp4-packed", "mxfp4", "mxfp4-packed")


def redundant(count: int) -> dict[str, Any]:
    return {"eplb_config": SimpleNamespace(num_redundant_experts=count)}


def at(variable: str, **changed: Any) -> dict[str, Any]:
    """With a variable of the environment at 1."""
    return {**CPU, **changed, "environment": {variable: "1"}}


def quantized(held: StoredFormat, **changed: Any) -> dict[str, Any]:
    return {**changed, "model": {"quantization_config": held.to_hf_dict()}}


def noted(what: str, *said: str) -> dict[str, Any]:
    return {**CPU, "additional_config": {"kimi_k2": {what: list(said)}}}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"tensor_parallel_size": 16}, None),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, None),
        (FILTERED | {"expert_placement_strategy": "linear"}, None),
        (CPU | {"model": {"kv_lora_rank": 64}}, None),
        ({"dtype": torch.float16}, "torch.float16, the kernels take torch.bfloat16"),
        ({"block_size": 128, "user_specified_block_size": True}, None),
        ({"block_size": 96, "user_specified_block_size": True}, f"pages of 96 tokens, {PAGES}"),
        ({"user_specified_block_size": ...}, f"pages of 16 tokens, {PAGES}"),  # of a version that does not say
        ({"model": {"num_attention_heads": 128, "num_key_value_heads": 128}}, "128 heads a rank"),
        ({"model": {"kv_lora_rank": 256}}, "attention of sizes (256, 64, 128, 128)"),
        ({"cache_dtype": "float32"}, "a cache in float32"),
        ({"cache_dtype": "fp8_e5m2"}, "a cache in fp8_e5m2"),
        (PIPELINE | NGRAM, "drafts with pipeline parallelism"),
        (PIPELINE, None),
        ({"data_parallel_size": 2, "all2all_backend": "pplx"}, "an exchange of tokens by pplx"),
        ({"data_parallel_size": 2, "all2all_backend": "allgather_reducescatter"}, None),
        (SPREAD, None),
        (SPREAD | {"tensor_parallel_size": 1}, f"decode context parallelism of 128 heads, {TOGETHER}"),
        (SPREAD | NGRAM, "decode context parallelism with drafts"),
        (SPREAD | TRANSFER, "decode context parallelism with a transfer of caches"),
        (SPREAD | {"dcp_comm_backend": "a2a"}, "decode context parallelism with --dcp-comm-backend a2a"),
        (SPREAD | {"dcp_q_replicate": True}, "decode context parallelism with --dcp-q-replicate"),
        ({"prefill_context_parallel_size": 2}, "context parallelism of prompts"),
        ({"use_ubatching": True}, "microbatches"),
        (BALANCED | redundant(16), None),
        (
            REPLICAS | BALANCED | {"tensor_parallel_size": 4} | redundant(4),
            "4 redundant experts, which do not divide among the ranks",
        ),
        (BALANCED | redundant(0) | PIPELINE, "expert load balancing with pipeline parallelism"),
        (BALANCED | redundant(0) | {"enable_ep_weight_filter": True}, OTHER_EXPERTS),
        (FILTERED | {"expert_placement_strategy": "round_robin"}, OTHER_EXPERTS),
        (FILTERED | {"expert_placement_strategy": "round_robin", "enable_expert_parallel": False}, None),
        (LORA, None),
        (
            {"lora_config": SimpleNamespace(target_modules=[], fully_sharded_loras=True)},
            "LoRA with fully_sharded_loras",
        ),
        ({"lora_config": SimpleNamespace(target_modules=["o_proj", "shared_experts.down_proj"])} | REPLICAS, None),
        (
            {"lora_config": SimpleNamespace(target_modules=["mlp.experts"])} | REPLICAS,
            "LoRA of routed experts with data parallelism",
        ),
        (LORA | {"tensor_parallel_size": 16}, "LoRA with 4 heads a rank, the kernels add 4 of zeros"),
        (LORA | REPLICAS, "LoRA of routed experts with data parallelism"),
        (LORA | PIPELINE, "LoRA with pipeline parallelism"),
        (LORA | NGRAM, None),
        (ROUTED, None),
        (ROUTED | LORA, "LoRA with routed experts in answers"),
        (ROUTED | REPLICAS, "routed experts in answers with data parallelism"),
        (ROUTED | BALANCED | redundant(0), "expert load balancing with routed experts in answers"),
        ({"enable_return_routed_experts": True}, "routed experts in answers, as this version of vLLM asks for them"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "drafts by mtp"),
        ({"environment": {support.BATCH_INVARIANT: "1"}}, None),
        (
            {"environment": {support.BATCH_INVARIANT: "1"}, "model": {"n_routed_experts": 16}},
            f"{support.BATCH_INVARIANT} with 16 experts, its router takes (256, 384)",
        ),
        (noted("quantization", "fp8"), None),
        (noted("quantization", "mxfp8"), "--quantization mxfp8"),
        (at(support.MLA_DISABLE), f"{support.MLA_DISABLE}=1"),
        (at(support.BATCH_INVARIANT, **NGRAM), f"{support.BATCH_INVARIANT} with drafts"),
        (at(support.BATCH_INVARIANT, **PIPELINE), f"{support.BATCH_INVARIANT} with pipeline parallelism"),
        (at(support.BATCH_INVARIANT, **LORA), f"{support.BATCH_INVARIANT} with LoRA"),
        (at(support.BATCH_INVARIANT, **TRANSFER), f"{support.BATCH_INVARIANT} with a transfer of caches"),
        (
            at(support.BATCH_INVARIANT, max_num_seqs=1025),
            f"{support.BATCH_INVARIANT} with more than 1024 requests",
        ),
        (
            at(support.BATCH_INVARIANT, use_v2_model_runner=True),
            f"{support.BATCH_INVARIANT} with vLLM's second model runner",
        ),
        ({"environment": {support.ON_GPU: "0"}}, f"{support.ON_GPU}=0"),
        ({**CPU, "environment": {support.MLA_DISABLE: "0", support.BATCH_INVARIANT: "0"}, **LORA}, None),
        (quantized(Int4GroupFormat(group_size=128), **CPU), None),
        (
            quantized(Int4GroupFormat(group_size=256), **CPU),
            "field 'quantization_config': INT4 in groups of 256; our kernels read groups of [32, 64, 128]",
        ),
        *(
            (quantized(kind(), **CPU), None if name in TAKEN else f"{STORED} {name}, {NOT_TAKEN}")
            for name, kind in formats().items()
            if name != "bf16"
        ),
        (quantized(Nvfp4Format(ignore=("*self_attn*", "*shared_experts*", "*layers.0.mlp*"))), None),
        (quantized(Nvfp4Format(ignore=("*self_attn*",))), None),
        (quantized(CompressedMxfp4Format()), None),
        ({**CPU, "tensor_parallel_size": 3}, "field 'num_attention_heads': 64 does not divide among 3 ranks"),
        ({**CPU, "model": published("kimi-k2-thinking", heads=64)}, f"field 'quantization_config.heads': {NOT_KNOWN}"),
        # What vLLM adds.
        (CPU | {"model": published("kimi-k2-instruct-0905", total_num_heads=64)}, None),
        (CPU | {"model": published("kimi-k2-thinking", total_num_kv_heads=64) | {"rms_norm_eps": 1e-5}}, None),
    ],
)
def test_reasons(changed: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(changed)
    for name, value in given.pop("environment", {}).items():
        monkeypatch.setenv(name, value)
    asked = deployment(**given)
    for name in [name for name, value in given.items() if value is ...]:
        delattr(asked.of, name)
    assert support.refusal(asked) == reason


@pytest.mark.usefixtures("hopper")
def test_reasons_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "find_nvcc", lambda: None)
    assert support.refusal(deployment()) == "no nvcc, which the kernels are built with"
    monkeypatch.setattr(support, "is_hopper", lambda: False)
    assert support.refusal(deployment()) == "a GPU that is no Hopper"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0)])
def test_hopper_as_the_platform_says(vllm: FakeVllm, capability: tuple[int, int]) -> None:
    vllm.on("vllm.platforms.cuda", is_cuda=lambda _: True, is_device_capability=lambda _, asked: asked == capability)
    assert adapter.is_hopper() == (capability == (9, 0))


DEEPSEEK = {"n_group": 8, "topk_group": 4, "n_routed_experts": 256, "model_type": "deepseek_v3", "vocab_size": 129280}


def test_models_that_are_not_ours_keep_vllms_worker(vllm: FakeVllm) -> None:
    plugin.register()
    asked = deployment(model=DEEPSEEK, worker_cls="auto", **CPU)
    vllm.configs[K2].verify_and_update_config(asked.of)
    assert asked.worker == "auto" and support.refusal(asked)


@pytest.mark.usefixtures("vllm")
def test_arguments_that_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked on the command line is in the configuration of every process."""
    plugin.register()
    fields: Any = [("attention_backend", str, None), ("additional_config", dict, None)]
    arguments = dataclasses.make_dataclass("Given", fields, bases=(vars(adapter)["EngineArgs"],))
    given, own = arguments(attention_backend="TRITON_MLA"), {"more": 1}
    asked = deployment(**CPU, additional_config=given.create_engine_config())
    assert support.refusal(asked) == "--attention-backend TRITON_MLA"
    assert arguments(additional_config=own).create_engine_config() == own
    monkeypatch.setenv("KIMI_K2_VLLM_GPUS", "0")
    with pytest.raises(ConfigError, match="did you mean KIMI_K2_VLLM_GPU"):
        given.create_engine_config()


class OfSecond(SimpleNamespace):
    """The configuration of a version whose default is the second runner, as vLLM 0.33 has it."""

    lacking: tuple[str, ...] = ()
    second_alone = False

    @property
    def use_v2_model_runner(self) -> bool:
        first = os.environ.get(plugin.RUNNER) == "0"
        if first and self.second_alone:
            raise ValueError("HiSparse requires Model Runner V2")
        return not first

    def _get_v1_model_runner_unsupported_features(self) -> tuple[str, ...]:
        return self.lacking


def of_second(**changed: Any) -> adapter.Deployment:
    return deployment(OfSecond, **{"enforce_eager": False, **changed})


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_first_runner_where_the_second_would_be(
    invariant: str, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(support.BATCH_INVARIANT, invariant)
    plugin.register()
    asked = of_second(worker_cls="auto")
    with caplog.at_level(logging.INFO):
        vllm.configs[K2].verify_and_update_config(asked.of)
    assert not asked.second_runner
    assert (asked.worker, asked.prefixes) == (plugin.WORKER, invariant == "0")
    assert caplog.text.count("VLLM_USE_V2_MODEL_RUNNER=1 keeps the second") == 1


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changed", "environment"),
    [
        ({}, {plugin.RUNNER: "1"}),
        ({}, {support.ON_GPU: "0"}),
        ({}, {support.DECODE_GRAPHS: "0"}),
        ({"model": {"kv_lora_rank": 256}}, {}),
        (PIPELINE, {}),
        ({"device_type": "cpu"}, {}),
        ({"enforce_eager": True}, {}),
        (TRANSFER, {}),
        (ROUTED, {}),
        ({"lacking": ("dspark speculative decoding",)}, {}),
        ({"second_alone": True}, {}),
        ({"kind": SimpleNamespace}, {}),  # of a version without a second runner
    ],
)
def test_runner_left_as_it_is(
    changed: dict[str, Any], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plugin.choose_runner(deployment() if "kind" in changed else of_second(**changed))
    assert os.environ.get(plugin.RUNNER) == environment.get(plugin.RUNNER)


@dataclass
class Compilation:
    mode: int | None = None
    cudagraph_mode: str | None = None


@dataclass
class Arguments:
    """Some of vLLM's, and one of a version to come."""

    model: str = "m"
    max_num_seqs: int | None = None
    attention_backend: str | None = None
    cpu_offload_gb: float = 0
    load_format: str = "auto"
    quantization: str | None = None
    tomorrows: int = 3
    compilation_config: Any = field(default_factory=Compilation)
    weight_transfer_config: Any = None
    kv_transfer_config: Any = None


@pytest.mark.parametrize(
    ("changed", "vllms", "unused"),
    [
        ({}, [], []),
        ({"model": "other", "max_num_seqs": 4, "load_format": "dummy"}, [], []),
        ({"attention_backend": "TRITON_MLA"}, ["--attention-backend TRITON_MLA"], []),
        ({"cpu_offload_gb": 4}, ["--cpu-offload-gb 4"], []),
        ({"load_format": "sharded_state"}, ["--load-format sharded_state"], []),
        ({"tomorrows": 4}, ["--tomorrows 4, which this version of the plugin does not know"], []),
        ({"compilation_config": Compilation(cudagraph_mode="FULL")}, [], []),
        ({"compilation_config": Compilation(mode=3)}, [], ["--compilation-config.mode 3"]),
        ({"compilation_config": {"mode": 3}}, [], ["--compilation-config.mode 3"]),
        ({"weight_transfer_config": {"backend": "nccl"}}, [], []),
        ({"weight_transfer_config": {"backend": "m2n"}}, ["--weight-transfer-config.backend m2n"], []),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, [], []),
        ({"kv_transfer_config": {"kv_connector": "Other"}}, ["--kv-transfer-config.kv_connector Other"], []),
        ({"weight_transfer_config": {"other": 1}}, ["--weight-transfer-config.other 1"], []),
    ],
)
def test_judged(changed: dict[str, Any], vllms: list[str], unused: list[str]) -> None:
    assert flags.judged(Arguments(**changed)) == {"vllm": vllms, "unused": unused, "quantization": []}


def test_every_argument_is_in_one_group() -> None:
    groups = flags.OBEYED, flags.WITHOUT_EFFECT, flags.OF_OTHERS, flags.NOT_COMPILED, flags.DECIDED_LATER, flags.VLLMS
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(set(names))


def test_every_argument_of_the_installed_version() -> None:
    engines.need("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    assert [name for name in names if not flags.known(name)] == []
    assert len(names) > 200
    assert not any(flags.judged(AsyncEngineArgs(model="m")).values())
    asked = AsyncEngineArgs(model="m", cpu_offload_gb=1, kv_offloading_size=2, attention_backend="TRITON_MLA")
    found = flags.judged(asked)["vllm"]
    assert [text.split()[0] for text in found] == ["--cpu-offload-gb", "--attention-backend", "--kv-offloading-size"]


class FakeSglang:
    """Modules with the names that the plugin takes of SGLang's, and what it registers in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choices, self.capability, self.dtype = ["fa3"], (9, 0), torch.bfloat16
        self.backends, self.providers, self.hooks = dict[str, Any](), dict[str, Any](), dict[str, Any]()

        def registers(held: dict[str, Any]) -> Any:
            return lambda name: lambda found: held.setdefault(name, found)

        arguments, made = "sglang.srt.arg_groups", dict[str, ModuleType]()
        for module, names in {
            f"{arguments}.choices": {
                "ATTENTION_BACKEND_CHOICES": self.choices,
                "add_attention_backend_choices": self.choices.extend,
            },
            f"{arguments}.model_override_base": {
                "register_model_override": registers(self.providers),
                "resolving_view": lambda settings: settings,
                "model_config_of": lambda _: SimpleNamespace(dtype=self.dtype),
            },
            f"{arguments}.resolution_hooks": {"register_resolution_hook": registers(self.hooks)},
            f"{arguments}.overrides": {
                "declare_resolution": lambda settings, _, **fields: settings.__dict__.update(fields)
            },
            "sglang.srt.layers.attention.attention_registry": {"register_attention_backend": registers(self.backends)},
            "sglang.srt.model_executor.cuda_graph_config": {
                "Backend": SimpleNamespace(DISABLED="disabled"),
                "Phase": SimpleNamespace(PREFILL="prefill"),
                "with_phase": lambda graphs, phase, backend: {**graphs, phase: backend},
            },
            "sglang.srt.runtime_context": {
                "attention_backends": lambda: (sglang_support.BACKEND, sglang_support.BACKEND),
                "get_platform": lambda: SimpleNamespace(device_capability=self.capability),
            },
        }.items():
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                monkeypatch.setitem(sys.modules, path := ".".join(parts[:end]), made.setdefault(path, ModuleType(path)))
            vars(made[module]).update(names)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> FakeSglang:
    monkeypatch.setattr(sglang_support, "AS_TEXT", ())
    monkeypatch.delenv(sglang_support.ON_GPU, raising=False)
    monkeypatch.setenv(sglang_support.PACKAGE_VARIABLE, "")
    monkeypatch.setattr(common, "find_nvcc", lambda: "nvcc")
    return FakeSglang(monkeypatch)


def settings(**changed: Any) -> SimpleNamespace:
    """SGLang's as its command line leaves them on a CPU."""
    fields: dict[str, Any] = {name: served[0] for _, name, served in sglang_support.SERVED}
    fields |= {"tp_size": 1, "ep_size": 1, "page_size": None, "device": "cpu", "cuda_graph_config": {"decode": "full"}}
    fields |= dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"))
    return SimpleNamespace(**{**fields, **changed})


def prompts_in(backend: str) -> dict[str, Any]:
    """What SGLang's settings say where a user has set the backend of prompts' CUDA graphs."""
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=backend))
    return {"_cuda_graph_config_locked": {("prefill", "backend")}, "cuda_graph_config": graphs}


@pytest.mark.parametrize("gone", ["", "choices.add_attention_backend_choices", "runtime_context.attention_backends"])
def test_registration_with_sglang(gone: str, sglang: FakeSglang, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang may call it again."""
    if gone:
        module = f"sglang.srt.{'arg_groups.' * gone.startswith('choices')}{gone.partition('.')[0]}"
        delattr(sys.modules[module], gone.partition(".")[2])
    with caplog.at_level(logging.WARNING):
        sglang_plugin.register_model()
        sglang_plugin.register_model()
    if gone:
        said = f"all operations are SGLang's, since it has changed; gone: {module}.{gone.partition('.')[2]}"
        assert said in caplog.text and sglang.providers == sglang.backends == {}
        return
    assert (caplog.text, sglang.choices) == ("", ["fa3", sglang_support.BACKEND])
    assert list(sglang.backends) == [sglang_support.BACKEND]
    names = (K2, "KimiK25ForConditionalGeneration")
    assert sglang.providers == dict.fromkeys(names, sglang_support.overrides)
    assert sglang.hooks == {"handle_model_specific_adjustments": sglang_support.without_graphs_of_prompts}


def test_sglang_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with caplog.at_level(logging.WARNING):
        sglang_plugin.register()
    assert "no parser kimi_k2_stream" in caplog.text
    assert all(f"{module}." in caplog.text for module, _ in sglang_support.NEEDED)
    assert all(f"{module}: " in caplog.text for module, _ in sglang_support.AS_TEXT)


GPU = {"device": "cuda", "tp_size": 8}
ANOTHER = "another attention was asked for"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"attention_backend": sglang_support.BACKEND}, None),
        ({"tp_size": 8, "ep_size": 4}, None),
        (prompts_in("disabled"), None),  # by its three switches, which all set that of prompts
        (GPU | prompts_in("disabled"), None),
        (GPU, None),
        (GPU | {"page_size": PAGE}, None),
        (GPU | {"page_size": 1}, f"pages of 1 tokens, the kernels take {PAGE}"),
        (GPU | {"of": {"dtype": torch.float16}}, "torch.float16, the kernels take torch.bfloat16"),
        (GPU | {"of": {"capability": (10, 0)}}, "a GPU that is no Hopper"),
        (GPU | {"device": "xpu"}, "a GPU that is no Hopper"),
        ({"device": "cuda", "asked": False}, "a GPU, where several ranks have not been tried"),
        ({"pp_size": 2}, "pipeline parallelism (pp_size)"),
        ({"attn_dp_size": 2}, "data parallelism of attention (attn_dp_size)"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding (speculative_algorithm)"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "another cache type than the model's (kv_cache_dtype)"),
        ({"quantization": "fp8"}, "another form of the weights (quantization)"),
        ({"page_size": 64}, "pages of 64 tokens on a CPU"),
        ({"attention_backend": "fa3"}, ANOTHER),
        ({"decode_attention_backend": "flashmla"}, ANOTHER),
        (prompts_in("breakable"), "CUDA graphs of prompts were asked for (breakable)"),
        (prompts_in("full"), "CUDA graphs of prompts were asked for (full)"),
        ({"tp_size": 3}, "3"),
        ({"model": {"context_len": 512, "swa_head_dim": 192, "language_only": False}}, None),  # which it adds
        ({"model": {"topk_method": "greedy"}}, "topk_method"),
        ({"package": "theirs"}, "SGLANG_EXTERNAL_MODEL_PACKAGE names theirs"),
    ],
)
def test_what_is_left_to_sglang(
    changed: dict[str, Any],
    reason: str | None,
    sglang: FakeSglang,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of what is ours pages have the kernels' size on a GPU."""
    given, before = dict(changed), changed.get("package", "")
    vars(sglang).update(given.pop("of", {}))
    monkeypatch.setenv(sglang_support.PACKAGE_VARIABLE, given.pop("package", ""))
    if given.pop("asked", True):
        monkeypatch.setenv(sglang_support.ON_GPU, "1")
    read = model(**given.pop("model", {}))
    with caplog.at_level(logging.INFO):
        found = sglang_support.overrides(settings(**given), read)
    wanted: dict[str, Any] = {"attention_backend": sglang_support.BACKEND}
    wanted |= {"page_size": PAGE} if given.get("device") == "cuda" else {}
    assert found == ({} if reason else wanted)
    assert os.environ[sglang_support.PACKAGE_VARIABLE] == (before if reason else sglang_support.PACKAGE)
    lines = [record.getMessage() for record in caplog.records]
    left = [line for line in lines if line.startswith("kimi-k2: all operations are SGLang's: ")]
    assert len(left) == bool(reason) and (reason or "") in "".join(left)
    if not reason:
        assert sglang_support.overrides(settings(**given), SimpleNamespace(text_config=read)) == wanted


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("backend", [sglang_support.BACKEND, "fa3"])
def test_prompts_are_in_no_cuda_graph_of_sglangs(backend: str) -> None:
    """Unless its own attention serves."""
    graphs = {"decode": "full", "prefill": "breakable"}
    one = settings(device="cuda", cuda_graph_config=graphs)
    sglang_support.without_graphs_of_prompts(one, lambda given: setattr(given, "attention_backend", backend))
    assert one.cuda_graph_config == (graphs if backend == "fa3" else {"decode": "full", "prefill": "disabled"})
