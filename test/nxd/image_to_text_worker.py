"""K2.5 compiled and loaded through NxDI's image-to-text base, with neuronx-cc and the device mocked; one rank.

    python image_to_text_worker.py job.json

NxDI's `compile` and `load`, its ModelBuilder's sharding and the files between them are real. What a compiler would make
is a TorchScript file with the graphs' names; loading it makes the model on the CPU, with the weights that NxDI hands to
the device.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import environment

environment.prepare()

import mocked_neuron  # noqa: E402
import torch  # noqa: E402
from neuronx_distributed_inference.models import image_to_text_model_base  # noqa: E402
from steps import media_of, run_media  # noqa: E402

from kimi_k2.errors import KimiK2Error  # noqa: E402
from kimi_k2.vision_config import Grid  # noqa: E402

contrib = environment.contrib
TEXT, VISION = ["context_encoding_model", "token_generation_model"], ["vision_encoder_model"]


def set_bucket(model: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """What a traced graph has from its bucket, see NxDI's DecoderModelInstance.get."""
    model.n_positions = inputs[1].shape[1]
    model.n_active_tokens = inputs[0].shape[1]


def load_on_cpu(path: str, *_: Any, **__: Any) -> Any:
    """`torch.jit.load` of one of the two models: the same on the CPU, waiting for its weights."""
    graphs = torch_jit_load(path)()
    config = contrib("image_to_text").KimiK25InferenceConfig.load(str(Path(path).parents[1]))
    mocked_neuron.one_rank()
    if graphs == VISION:
        model = contrib("image_to_text").make_graph(config).eval()
    else:
        assert graphs == TEXT
        config.text_config.neuron_config.on_cpu = True
        model = contrib("modeling_kimi_k25").NeuronKimiK25TextModel(config.text_config).eval()
        model.register_forward_pre_hook(set_bucket)

    mocked_neuron.take_weights(model)
    return model


@torch.inference_mode()
def run_lines(app: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Continuous batching: prompts into lines of the cache one by one, then steps of some lines and of all.

    Logits, and the line and number of tokens of each.
    """
    logits, of = [], []
    at = [len(prompt) for prompt in case["prompts"]]
    for line in case["arrival"]:
        media = media_of({"media": case["media"][line : line + 1]})
        logits.append(app.prefill([case["prompts"][line]], media, torch.tensor([line])).logits[0, -1])
        of.append((line, 0))
    done = [0] * len(at)
    for lines in case["steps"]:
        where = torch.tensor([at[line] + done[line] for line in lines])
        mask = (torch.arange(int(where.max()) + 1) < where[:, None]).to(torch.int32)
        tokens = torch.tensor([[case["forced"][line][done[line]]] for line in lines])
        out = app(tokens, attention_mask=mask, position_ids=where[:, None], seq_ids=torch.tensor(lines)).logits[:, -1]
        for line, found in zip(lines, out, strict=True):
            done[line] += 1
            logits.append(found)
            of.append((line, done[line]))
    return {"logits": torch.stack(logits), "of": of}


def message_of(call: Any) -> str:
    """Message of the error that a call ends in."""
    try:
        call()
    except KimiK2Error as error:
        return str(error)
    return "no error"


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    work = Path(job["output"]).parent
    os.environ["BASE_COMPILE_WORK_DIR"] = f"{work}/neuronx/"
    image_to_text_model_base.ModelBuilder = mocked_neuron.sharding_builder(image_to_text_model_base.ModelBuilder)
    setattr(torch.jit, "load", load_on_cpu)  # noqa: B010 - its signature is narrower than torch's
    module, configs = contrib("image_to_text"), contrib("config")
    options = {"torch_dtype": torch.float32, "save_sharded_checkpoint": True, "skip_warmup": True}
    text = configs.KimiK2NeuronConfig(**job["neuron_config"], **options)
    tower = module.KimiK25VisionNeuronConfig(vision_buckets=job["buckets"], tp_degree=1, **options)
    config = module.KimiK25InferenceConfig(text, tower, load_config=configs.load_kimi_config(job["checkpoint"]))
    compiled = str(work / "compiled")
    module.NeuronKimiK25ForImageToText(job["checkpoint"], config).compile(compiled)

    app = module.NeuronKimiK25ForImageToText(compiled)
    app.load(compiled)
    case = torch.load(job["case"])
    if "steps" in case:
        torch.save(run_lines(app, case), job["output"])
        return
    media, logits = media_of(case), run_media(app, case)
    only_text = app.prefill(case["text"], [[] for _ in case["text"]]).logits[:, -1]
    large = Grid(1, 40, 40)
    errors = {
        "bucket": message_of(lambda: app.encode(torch.zeros(large.patches, 3, 14, 14), [large])),
        "batch": message_of(lambda: app.prefill(case["prompts"][1:3], media[1:3])),
        "rows": message_of(lambda: app(**case["too_many"])),
        "tokens": message_of(lambda: app.prefill([[*case["prompts"][1], 7], *case["prompts"][1:]], [[], *media[1:]])),
    }
    files = sorted(str(path.relative_to(compiled)) for path in Path(compiled).rglob("*") if path.is_file())
    torch.save({"logits": logits, "text": only_text, "errors": errors, "files": files}, job["output"])


torch_jit_load: Any = torch.jit.load

if __name__ == "__main__":
    main()
