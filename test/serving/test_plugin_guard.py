"""Where vLLM has changed, or is not there, its plugin's entry point says what is gone and leaves vLLM alone."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import fake_module, model

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.stored import StoredFormat, formats
from kimi_k2.serving.paged import support as common
from kimi_k2.serving.vllm import adapter, plugin, support

HERE = Path(plugin.__file__).parent
MODEL = ("attention", "lora", "model", "prompt_graphs", "ranks", "tower")
WORKER = ("decode_steps", *MODEL)


def taken_of_vllm(*modules: str) -> list[str]:
    """Names that ours import of the adapter, sorted."""
    trees = [ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8")) for module in modules]
    found = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    return sorted({alias.name for one in found if one.module == adapter.__name__ for alias in one.names})


class Anything(type):
    """The type of classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


def fake_vllm(monkeypatch: pytest.MonkeyPatch, without: str, platform: str = "vllm.platforms.cpu") -> list[str]:
    """Modules with all names that ours import but one; and what gets registered in them."""
    registered: list[str] = []

    class Registry:
        models: dict[str, object] = {}  # noqa: RUF012

        @classmethod
        def register_model(cls, architecture: str, target: str) -> None:
            registered.append(architecture)
            cls.models[architecture] = SimpleNamespace(class_name=target.rpartition(":")[2])

    class CPUWorker:
        def compile_or_warm_up_model(self) -> str:
            return "warm"

    on_cpu = {"is_cuda": lambda _: False, "is_cpu": lambda _: True, "__module__": platform}
    given = {
        "ModelRegistry": Registry,
        "MODELS_CONFIG_MAP": {},
        "CPUWorker": CPUWorker,
        "current_platform": type("Platform", (), on_cpu)(),
        "EngineArgs": type("EngineArgs", (), {"create_engine_config": lambda self: self.additional_config}),
        "VerifyAndUpdateConfig": type("Stock", (), {"verify_and_update_config": lambda config: None}),
    }
    for name in taken_of_vllm(*(path.stem for path in HERE.glob("*.py"))):
        made = fake_module(monkeypatch, adapter.NAMES[name].modules[0])
        if name != without:
            setattr(made, name, given[name] if name in given else Anything(name, (), {}))
    derive_worker_from(monkeypatch, "JSONDecoder")
    return registered


def derive_worker_from(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A class whose source there is, or is not."""
    monkeypatch.setattr(plugin, "BASE_WORKERS", {"cpu": name})
    monkeypatch.setitem(adapter.NAMES, name, adapter.Row("", ("json.decoder",)))


@pytest.fixture
def fresh() -> Iterator[Callable[[str], Any]]:
    """Imports modules of the plugin anew, and forgets them."""
    package = sys.modules[plugin.__package__ or ""]
    before = {name: module for name, module in sys.modules.items() if name.startswith(f"{package.__name__}.")}
    attributes = dict(vars(package))

    def imported(name: str) -> Any:
        for module in (*WORKER, "registered", "worker"):
            sys.modules.pop(f"{package.__name__}.{module}", None)
            vars(package).pop(module, None)
        return importlib.import_module(f"{package.__name__}.{name}")

    yield imported
    for name in [name for name in sys.modules if name.startswith(f"{package.__name__}.")]:
        del sys.modules[name]
    sys.modules.update(before)
    vars(package).clear()
    vars(package).update(attributes)


@pytest.mark.parametrize("gone", [name for name in taken_of_vllm(*MODEL) if not name.startswith("Deepseek")])
def test_the_model_is_vllms_without_a_name(
    gone: str, fresh: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm(monkeypatch, without=gone)
    with caplog.at_level(logging.WARNING):
        module = fresh("registered")
    stock = sys.modules["vllm.model_executor.models.deepseek_v2"]
    assert module.KimiK2ForVllm is stock.DeepseekV3ForCausalLM
    assert module.KimiK25TextForVllm is stock.DeepseekV2ForCausalLM
    assert caplog.text.count("all operations are vLLM's, since it has changed: ") == 1
    assert gone in caplog.text


def test_the_model_is_ours(fresh: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(monkeypatch, without="")
    assert fresh("registered").KimiK2ForVllm.__module__ == "kimi_k2.serving.vllm.model"
    assert plugin.ARCHITECTURES["DeepseekV3ForCausalLM"] == "KimiK2ForVllm"


@pytest.mark.parametrize("gone", taken_of_vllm("decode_steps"))
def test_steps_are_vllms_without_a_name(
    gone: str, fresh: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm(monkeypatch, without=gone)
    with caplog.at_level(logging.WARNING):
        assert fresh("worker").KimiK2Worker().compile_or_warm_up_model() == "warm"
    assert caplog.text.count("decode steps are prepared by vLLM, since it has changed: ") == 1
    assert gone in caplog.text


@pytest.mark.parametrize("gone", ["ModelRegistry", "current_platform", "MODELS_CONFIG_MAP"])
def test_registration_without_a_name(
    gone: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered = fake_vllm(monkeypatch, without=gone)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    of_steps = gone == "MODELS_CONFIG_MAP"
    assert registered == (list(plugin.ARCHITECTURES) if of_steps else [])
    assert ("decode steps are prepared by vLLM" if of_steps else "all operations are vLLM's") in caplog.text
    assert gone in caplog.text


def test_a_worker_that_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_vllm(monkeypatch, without="")
    derive_worker_from(monkeypatch, "Gone")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "since it has changed: json.decoder: class Gone" in caplog.text
    assert not sys.modules["vllm.model_executor.models.config"].MODELS_CONFIG_MAP


def test_all_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    registered = fake_vllm(monkeypatch, without="")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert registered == list(plugin.ARCHITECTURES)
    assert caplog.text == ""
    offered = dict(sys.modules["vllm.model_executor.models.config"].MODELS_CONFIG_MAP)
    assert sorted(offered) == sorted(plugin.WITH_WORKER)
    plugin.register()  # vLLM calls it again
    assert registered == list(plugin.ARCHITECTURES)
    assert offered == sys.modules["vllm.model_executor.models.config"].MODELS_CONFIG_MAP


def test_another_platform_keeps_its_models_and_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-neuron's, on a CPU too."""
    registered = fake_vllm(monkeypatch, without="", platform="vllm_neuron.vllm.platform")
    plugin.register()
    assert registered == []
    assert not sys.modules["vllm.model_executor.models.config"].MODELS_CONFIG_MAP


@pytest.mark.parametrize(
    "changed",
    [
        {"n_group": 8, "topk_group": 4, "n_routed_experts": 256, "model_type": "deepseek_v3", "vocab_size": 129280},
        {"num_nextn_predict_layers": 1},
        {"rope_interleave": False},
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "fmt": "e4m3"}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}},
    ],
    ids=lambda changed: next(reversed(changed)),
)
def test_models_that_are_not_ours_keep_vllms_worker(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(monkeypatch, without="")
    plugin.register()
    config = sys.modules["vllm.model_executor.models.config"].MODELS_CONFIG_MAP["DeepseekV3ForCausalLM"]
    for given, worker in ((changed, "auto"), ({}, plugin.WORKER)):
        one = deployment(hf_text_config=model(**given), worker_cls="auto", device_type="cpu", dtype=torch.float32)
        config.verify_and_update_config(one)
        assert one.worker_cls == worker
        assert (support.refusal(one, one.hf_text_config) is None) == (not given)


def test_parsers_managers_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_vllm(monkeypatch, without="")
    for module in ("vllm.tool_parsers", "vllm.reasoning"):  # a real one, where another test has loaded it
        monkeypatch.delitem(sys.modules, module, raising=False)
    with caplog.at_level(logging.WARNING):
        plugin.register_parsers()
    assert caplog.text.count("no parser kimi_k2_stream") == 2


@pytest.mark.parametrize("switch", ["1", "0"])
def test_parsers_by_name(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(monkeypatch, without="")
    named: list[tuple[str, ...]] = []
    for package, manager in (("tool_parsers", "ToolParserManager"), ("reasoning", "ReasoningParserManager")):
        module = ModuleType(f"vllm.{package}")
        setattr(module, manager, SimpleNamespace(register_lazy_module=lambda *given: named.append(given)))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("KIMI_K2_PARSERS", switch)
    plugin.register_parsers()
    ours = {"tool_parser": "KimiK2StreamToolParser", "reasoning_parser": "KimiK2StreamReasoningParser"}
    assert named == [
        (known, f"kimi_k2.serving.vllm.{module}", name)
        for module, name in ours.items()
        for known in ("kimi_k2_stream", "kimi_k2")[: 1 + (switch == "1")]
    ]
    for _, module_name, name in named:
        assert f"class {name}(" in (HERE / f"{module_name.rpartition('.')[2]}.py").read_text(encoding="utf-8")


def deployment(kind: type[SimpleNamespace] = SimpleNamespace, /, **changed: Any) -> Any:
    """What `refusal` reads of vLLM's configuration: one GPU, as the command line's defaults leave it."""
    fields = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
        "decode_context_parallel_size": 1, "enable_expert_parallel": False, "enable_eplb": False,
        "cache_dtype": "auto", "block_size": 16, "user_specified_block_size": False, "dtype": torch.bfloat16,
        "device_type": "cuda", "lora_config": None, "speculative_config": None, "kv_transfer_config": None,
        "max_num_seqs": 1024, "enable_prefix_caching": True, **changed,
    }  # fmt: skip
    one = kind(**fields)
    for part in PARTS:
        setattr(one, part, one)
    return one


PARTS = "parallel_config", "cache_config", "model_config", "device_config", "scheduler_config"
BALANCED: dict[str, Any] = {
    "tensor_parallel_size": 8, "enable_expert_parallel": True, "enable_eplb": True,
    "eplb_config": SimpleNamespace(num_redundant_experts=0),
}  # fmt: skip
FILTERED: dict[str, Any] = {"tensor_parallel_size": 8, "enable_expert_parallel": True, "enable_ep_weight_filter": True}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the GPU and the compiler that the kernels need."""
    monkeypatch.delenv(support.ON_GPU, raising=False)
    monkeypatch.setattr(support, "_is_hopper", lambda: True)
    monkeypatch.setattr(common, "find_nvcc", lambda: "nvcc")
    monkeypatch.setenv(plugin.RUNNER, "")  # so that what a test's code sets is undone
    monkeypatch.delenv(plugin.RUNNER)


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (formats()["fp8"](), None),
        (formats()["int4"](), None),
        (Int4GroupFormat(group_size=128), None),
        (Int4GroupFormat(group_size=256), "INT4 in groups of 256; our kernels read groups of [32, 64, 128]"),
        *(
            (held(), f"weights stored as {name}, which our loader in an engine does not take")
            for name, held in formats().items()
            if name not in ("bf16", "fp8", "int4")
        ),
    ],
    ids=str,
)
def test_formats_that_are_left_to_the_engine(held: StoredFormat, reason: str | None) -> None:
    given = deployment(device_type="cpu", dtype=torch.float32)
    found = support.refusal(given, model(quantization_config=held.to_hf_dict()))
    assert found == (reason and f"field 'quantization_config': {reason}")


@pytest.mark.usefixtures("hopper")
def test_gpus_that_are_ours() -> None:
    assert support.refusal(deployment(), model()) is None
    assert support.refusal(deployment(tensor_parallel_size=8), model()) is None
    assert support.refusal(deployment(tensor_parallel_size=16), model()) is None
    assert support.refusal(deployment(tensor_parallel_size=2, enable_expert_parallel=True), model()) is None
    assert support.refusal(deployment(**FILTERED, expert_placement_strategy="linear"), model()) is None
    assert support.refusal(deployment(block_size=64, user_specified_block_size=True), model()) is None
    assert support.refusal(deployment(device_type="cpu", dtype=torch.float32), model(kv_lora_rank=64)) is None


NGRAM = {"speculative_config": SimpleNamespace(method="ngram")}
SPREAD = {"decode_context_parallel_size": 2, "tensor_parallel_size": 8}
TOGETHER = "which the kernels do not take together"
OTHER_EXPERTS = "a loader that leaves out other experts than ours"
LORA: dict[str, Any] = {"lora_config": object()}


def redundant(count: int) -> dict[str, Any]:
    return {"eplb_config": SimpleNamespace(num_redundant_experts=count)}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float16}, "torch.float16, the kernels take torch.bfloat16"),
        ({"block_size": 128, "user_specified_block_size": True}, "pages of 128 tokens, the kernels take 64"),
        ({"model": {"num_attention_heads": 128, "num_key_value_heads": 128}}, "128 heads a rank"),
        ({"model": {"kv_lora_rank": 256}}, "attention of sizes (256, 64, 128, 128)"),
        ({"cache_dtype": "fp8_e5m2"}, "a cache in fp8_e5m2"),
        ({"cache_dtype": "float32"}, "a cache in float32"),
        ({"pipeline_parallel_size": 2} | NGRAM, "drafts in a pipeline"),
        ({"pipeline_parallel_size": 2}, None),
        ({"data_parallel_size": 2, "all2all_backend": "pplx"}, "an exchange of tokens by pplx"),
        ({"data_parallel_size": 2, "all2all_backend": "allgather_reducescatter"}, None),
        (SPREAD, None),
        (SPREAD | {"tensor_parallel_size": 1}, f"decode context parallelism of 128 heads, {TOGETHER}"),
        (SPREAD | NGRAM, "decode context parallelism with drafts"),
        (SPREAD | {"kv_transfer_config": object()}, "decode context parallelism with a transfer of caches"),
        (SPREAD | {"dcp_comm_backend": "a2a"}, "decode context parallelism with --dcp-comm-backend a2a"),
        (SPREAD | {"dcp_q_replicate": True}, "decode context parallelism with --dcp-q-replicate"),
        ({"prefill_context_parallel_size": 2}, "context parallelism of prompts"),
        ({"use_ubatching": True}, "microbatches"),
        (BALANCED | redundant(16), None),
        (BALANCED | redundant(4), "4 redundant experts, which do not divide among the ranks"),
        (BALANCED | {"pipeline_parallel_size": 2}, "expert load balancing in a pipeline"),
        (BALANCED | {"enable_ep_weight_filter": True}, OTHER_EXPERTS),
        (FILTERED | {"expert_placement_strategy": "round_robin"}, OTHER_EXPERTS),
        (LORA, None),
        ({"lora_config": SimpleNamespace(fully_sharded_loras=True)}, "LoRA with fully_sharded_loras"),
        (LORA | {"tensor_parallel_size": 16}, "LoRA with 4 heads a rank, the kernels add 4 of zeros"),
        (LORA | {"data_parallel_size": 2, "all2all_backend": "naive"}, "LoRA with data parallelism"),
        (LORA | {"pipeline_parallel_size": 2}, "LoRA with pipeline parallelism"),
        (LORA | NGRAM, "LoRA with drafts"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "drafts by mtp"),
    ],
)
def test_reasons_on_a_gpu(changed: dict[str, Any], reason: str | None) -> None:
    given = dict(changed)
    sizes = given.pop("model", {})
    assert support.refusal(deployment(**given), model(**sizes)) == reason


@pytest.mark.usefixtures("hopper")
def test_batch_invariant_mode_of_the_routers_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(support.BATCH_INVARIANT, "1")
    assert support.refusal(deployment(), model()) is None
    reason = support.refusal(deployment(), model(n_routed_experts=16))
    assert reason == "VLLM_BATCH_INVARIANT with 16 experts, its router takes (256, 384)"


def test_arguments_that_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked on the command line is in the configuration of every process."""
    fake_vllm(monkeypatch, without="")
    plugin.register()
    stock = sys.modules["vllm.engine.arg_utils"].EngineArgs
    noted = dataclasses.make_dataclass(
        "Given", [("attention_backend", str, None), ("additional_config", dict, None)], bases=(stock,)
    )
    given, own = noted(attention_backend="TRITON_MLA"), {"more": 1}
    one = deployment(device_type="cpu", dtype=torch.float32, additional_config=given.create_engine_config())
    assert support.refusal(one, model()) == "--attention-backend TRITON_MLA"
    assert noted(additional_config=own).create_engine_config() == own
    monkeypatch.setenv("KIMI_K2_VLLM_GPUS", "0")
    with pytest.raises(ConfigError, match="did you mean KIMI_K2_VLLM_GPU"):
        given.create_engine_config()


@pytest.mark.parametrize(("asked", "reason"), [("fp8", None), ("mxfp8", "--quantization mxfp8")])
def test_quantization_of_the_checkpoint(asked: str, reason: str | None) -> None:
    noted = {"kimi_k2": {"quantization": [asked]}}
    one = deployment(device_type="cpu", dtype=torch.float32, additional_config=noted)
    assert support.refusal(one, model()) == reason


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        (support.MLA_DISABLE, {}, "VLLM_MLA_DISABLE=1"),
        (support.BATCH_INVARIANT, {}, None),
        (support.BATCH_INVARIANT, NGRAM, "with drafts"),
        (support.BATCH_INVARIANT, {"pipeline_parallel_size": 2}, "with pipeline parallelism"),
        (support.BATCH_INVARIANT, {"lora_config": object()}, "with LoRA"),
        (support.BATCH_INVARIANT, {"kv_transfer_config": object()}, "with a transfer of caches"),
        (support.BATCH_INVARIANT, {"max_num_seqs": 1025}, "with 1025 requests, more than 1024"),
        (support.BATCH_INVARIANT, {"use_v2_model_runner": True}, "with vLLM's second model runner"),
    ],
)
def test_vllms_variables(name: str, changed: dict[str, Any], reason: str | None, monkeypatch: Any) -> None:
    one = deployment(device_type="cpu", dtype=torch.float32, **changed)
    monkeypatch.setenv(name, "0")
    assert support.refusal(one, model()) is None
    monkeypatch.setenv(name, "1")
    assert support.refusal(one, model()) == (f"{name} {reason}" if reason and "with" in reason else reason)


@pytest.mark.parametrize(
    ("scheme", "cache", "dtype"),
    [
        (False, "auto", torch.float32),
        (True, "auto", torch.float8_e4m3fn),
        (True, "float32", torch.float32),
        (False, "fp8", torch.float8_e4m3fn),
        (False, "fp8_e5m2", None),
    ],
)
def test_the_caches_dtype(scheme: bool, cache: str, dtype: torch.dtype | None) -> None:
    """As asked, else what the checkpoint's kv_cache_scheme says, else the model's."""
    raw = KimiK2Config.load("kimi-k2-thinking").to_hf_dict()
    if scheme:
        raw["quantization_config"]["kv_cache_scheme"] = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    one = deployment(device_type="cpu", dtype=torch.float32, cache_dtype=cache)
    given = SimpleNamespace(to_dict=lambda: raw)
    assert support.cache_dtype(one, common.config_of(given)) == dtype
    assert support.refusal(one, given) == (None if dtype else "a cache in fp8_e5m2")


@pytest.mark.usefixtures("hopper")
def test_pages_of_a_version_that_does_not_say_who_chose_them() -> None:
    one = deployment(block_size=16)
    del one.user_specified_block_size
    assert support.refusal(one, model()) == "pages of 16 tokens, the kernels take 64"


def test_what_vllm_adds_to_a_configuration() -> None:
    added = {"total_num_heads": 64, "total_num_kv_heads": 64}
    for name in ("kimi-k2-instruct-0905", "kimi-k2-thinking"):
        own = KimiK2Config.load(name).to_hf_dict()["quantization_config"]
        given = model(quantization_config=own | added, **({"rms_norm_eps": 1e-5} if "thinking" in name else {}))
        assert support.refusal(deployment(device_type="cpu", dtype=torch.float32), given) is None
    given = model(quantization_config=own | {"heads": 64})
    assert "quantization_config.heads" in str(support.refusal(deployment(device_type="cpu"), given))


def test_ranks_that_do_not_divide_the_model() -> None:
    assert "3" in str(support.refusal(deployment(tensor_parallel_size=3, device_type="cpu"), model()))


@pytest.mark.parametrize(("shared_out", "moe_tp", "moe_ep"), [(False, 4, 1), (True, 1, 4)])
def test_experts_are_cut_or_shared_out(shared_out: bool, moe_tp: int, moe_ep: int) -> None:
    layout = support.layout_of(deployment(tensor_parallel_size=4, enable_expert_parallel=shared_out))
    assert (layout.moe_tp, layout.moe_ep, layout.target) == (moe_tp, moe_ep, "cuda")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0)])
def test_hopper_as_the_platform_says(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    fake_vllm(monkeypatch, without="")
    platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda asked: asked == capability)
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", platform)
    assert support._is_hopper() == (capability == (9, 0))


@pytest.mark.usefixtures("hopper")
def test_asked_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(support.ON_GPU, "0")
    assert support.refusal(deployment(), model()) == "KIMI_K2_VLLM_GPU=0"
    monkeypatch.delenv(support.ON_GPU)
    monkeypatch.setattr(common, "find_nvcc", lambda: None)
    assert support.refusal(deployment(), model()) == "no nvcc, which the kernels are built with"
    monkeypatch.setattr(support, "_is_hopper", lambda: False)
    assert support.refusal(deployment(), model()) == "a GPU that is no Hopper"
