"""One rank in a process of its own: vLLM's plug-ins, configuration, registry and groups; the line's modules stand in.

`python in_vllm.py JOB RANK`; the job's file says what to serve, the answer goes beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]

PLATFORM = '''
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum


class NeuronPlatform(CpuPlatform):
    """What was read of the line's: its place, its worker where none is named, the formats that it admits."""

    _enum = PlatformEnum.OOT
    supported_quantization = ["neuron_quant", "compressed-tensors", "modelopt"]
    _cpu_dequant_quantizations = frozenset({"mxfp4", "mxfp8"})

    @classmethod
    def check_and_update_config(cls, vllm_config):
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_neuron.vllm.worker.neuron_worker.NeuronWorker"

    @classmethod
    def get_device_communicator_cls(cls):
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
'''


def write_platform(folder: Path) -> None:
    """A distribution vllm-neuron in `folder`, for PYTHONPATH: its entry point and its platform."""
    files = {
        "vllm_neuron/__init__.py": "def platform():\n    return 'vllm_neuron.vllm.platform.NeuronPlatform'\n",
        "vllm_neuron/vllm/__init__.py": "",
        "vllm_neuron/vllm/platform.py": PLATFORM,
        "vllm_neuron-0.29.0.1.2.0.dist-info/METADATA": "Name: vllm-neuron\nVersion: 0.29.0.1.2.0\n",
        "vllm_neuron-0.29.0.1.2.0.dist-info/entry_points.txt": (
            "[vllm.platform_plugins]\nneuron = vllm_neuron:platform\n"
        ),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def main(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Tokens, and what vLLM made of the model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    ranks, options = job["ranks"], job["neuron_config"]
    arguments = EngineArgs(
        model=job["model"], tensor_parallel_size=ranks, max_model_len=96, skip_tokenizer_init=True,
        distributed_executor_backend="mp", enable_expert_parallel=True, trust_remote_code=True,
        additional_config={"neuron_config": options},
    )  # fmt: skip
    config = arguments.create_engine_config()
    chosen, _ = ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
    with set_current_vllm_config(config):
        place = f"tcp://127.0.0.1:{job['port']}"
        parallel_state.init_distributed_environment(ranks, rank, place, rank, "gloo")
        parallel_state.initialize_model_parallel(ranks)
        import line

        line.HERE.ep = options["ep_degree"]
        for name, module in line.stand_ins().items():
            if name.startswith("vllm_neuron"):
                sys.modules.setdefault(name, module)
        neuron = line.NeuronConfig(ep_degree=options["ep_degree"], quantization=options["quantization"])
        hf_config = config.model_config.hf_config
        hf_config.dtype = torch.float32  # as the plain model is run; vLLM takes FP8 and INT4 in 16 bits alone
        options = {"rank": rank, "segment": job["segment"], "compile_with": line.eager}  # vLLM's groups are no nodes
        runner = line.Runner(Path(job["model"]), hf_config, neuron, **options)
        requests = line.serve(runner, line.prompts(Path(job["model"])), line.WANTED)
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    return {
        "platform": type(current_platform).__name__,
        "worker": config.parallel_config.worker_cls,
        "class": f"{chosen.__module__}.{chosen.__name__}",
        "groups": type(runner.model.ranks.tp).__name__,
        "tokens": [request.output for request in requests],
    }


if __name__ == "__main__":
    file, number = Path(sys.argv[1]), int(sys.argv[2])
    answer = main(json.loads(file.read_text()), number)
    file.with_suffix(f".{number}").write_text(json.dumps(answer))
