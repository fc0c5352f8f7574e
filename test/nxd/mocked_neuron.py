"""A Trainium machine's compiler and device, mocked where NxDI meets them: its ModelBuilder and `torch.jit.load`.

    python mocked_neuron.py cli compile --preset ...     # `kimi-k2 compile ...` with the mocks
    python mocked_neuron.py examples/compile.py ...

All else is real: our commands, NxDI's `compile` and `load`, the files between them. A compiled model is a TorchScript
file that lists its graphs; loading it makes the model on the CPU, one rank, with the weights that NxDI hands to the
device: the package's, or the folder's of contrib/models where that is imported.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from kimi_k2.neuron import contrib, cpu
from kimi_k2.plan.deployment import STAGES, VISION_ENCODER


class Graphs(nn.Module):
    """What stands for NEFFs: the names of the graphs."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def forward(self) -> list[str]:
        return self.names


def without_compiler(builder: Any) -> Any:
    """NxD's ModelBuilder, whose compiler only remembers the graphs; the weights are cut by NxD's own code."""

    class Builder(builder):  # type: ignore[misc]
        def trace(self, **options: Any) -> Any:
            """Names of the graphs; each has inputs for every bucket and arguments for the compiler."""
            # Sharding behind it makes process groups as for a device.
            os.environ.pop("NXD_CPU_MODE", None)
            graphs = {key: model.compiler_args for key, model in self.model_collection.items() if model.example_inputs}
            assert all("--model-type=transformer" in arguments for arguments in graphs.values())
            workdir = Path(self.compiler_workdir)
            workdir.mkdir(parents=True, exist_ok=True)
            (workdir / "graphs.json").write_text(json.dumps(graphs))
            script: Any = torch.jit.script
            return script(Graphs(list(graphs)))

    return Builder


def one_rank() -> None:
    """The process group of a device with one rank, where there is none yet."""
    from neuronx_distributed.parallel_layers.parallel_state import initialize_model_parallel

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        initialize_model_parallel(tensor_model_parallel_size=1, skip_collective_init=True)


def take_weights(model: nn.Module) -> None:
    """Give a model a traced one's `nxd_model`: it takes the weights that NxDI hands over, all but the caches."""

    def initialize(weights: list[dict[str, Any]], start_rank: Any) -> None:
        (own,) = model.nxd_model.weights = weights  # type: ignore[union-attr]
        absent, unknown = model.load_state_dict(own, strict=False)
        assert not unknown, unknown
        assert all(name.startswith("kv_mgr.") for name in absent), absent

    # `forward` is what NxDI warms a device up with.
    object.__setattr__(model, "nxd_model", SimpleNamespace(initialize=initialize, forward=lambda inputs: None))


def set_bucket(model: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """What a traced graph has from its bucket, see NxDI's DecoderModelInstance.get."""
    model.n_positions, model.n_active_tokens = inputs[1].shape[1], inputs[0].shape[1]


def load_on_cpu(path: str, *_: Any, **__: Any) -> Any:
    """`torch.jit.load` of a compiled model: the same model on the CPU, waiting for its weights."""
    graphs, directory = _torch_jit_load(path)(), Path(path).parent
    os.environ["NXD_CPU_MODE"] = "1"
    one_rank()
    folder: Any = sys.modules.get("src")
    images = directory.name in ("text_model", "vision_model")
    if images:
        config = contrib.load("image_to_text").KimiK25InferenceConfig.load(str(directory.parent))
    else:
        config = (folder or contrib.load("config")).KimiK2InferenceConfig.load(str(directory))
    if graphs == [VISION_ENCODER]:
        model = contrib.load("image_to_text").make_graph(config).eval()
        take_weights(model)
        return model
    assert graphs == [*STAGES][:2], graphs
    text = config.text_config if images else config
    text.neuron_config.on_cpu = True
    if images:
        model = contrib.load("image_to_text").NeuronKimiK25TextModel(text).eval()
    else:
        model = (folder or contrib.load("modeling_kimi_k2")).NeuronKimiK2Model(text).eval()
    model.register_forward_pre_hook(set_bucket)
    if text.neuron_config.torch_dtype == torch.bfloat16:
        model.bfloat16()
    # NxDI casts what it loaded (`self.to(torch_dtype)`), which on a device holds no weights.
    object.__setattr__(model, "_apply", lambda *_, **__: model)
    if text.neuron_config.tensor_capture_config is not None:
        contrib.load("capture").capture_in_cpu_mode([model], text.neuron_config.tensor_capture_config)
    take_weights(model)
    return model


def install() -> None:
    """Put the mocks in place; before NxDI is used."""
    cpu.prepare()
    from neuronx_distributed_inference.experimental.core.accuracy.logit_validation import logit_validation
    from neuronx_distributed_inference.models import application_base, image_to_text_model_base
    from neuronx_distributed_inference.utils import accuracy

    def validated(input_ids: torch.Tensor, generate_fn: Any, **more: Any) -> tuple[bool, Any, str]:
        """NxDI's, in place of torch_neuronx's, which is not published."""
        passed = logit_validation(input_ids.tolist(), lambda rows: generate_fn(torch.tensor(rows)), **more)
        return passed, {}, "logits are not the golden ones"

    accuracy.logit_validation = validated
    for module in (application_base, image_to_text_model_base):
        module.ModelBuilder = without_compiler(module.ModelBuilder)
    setattr(torch.jit, "load", load_on_cpu)  # noqa: B010 - its signature is narrower than torch's


_torch_jit_load: Any = torch.jit.load

if __name__ == "__main__":
    torch.set_num_threads(1)
    install()
    if (program := sys.argv.pop(1)) == "cli":
        from kimi_k2.cli import main

        main()
    else:
        (runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
