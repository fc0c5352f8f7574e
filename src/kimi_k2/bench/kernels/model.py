"""Time of a decode step at real sizes: one rank's part, random weights made on the GPU, CUDA-graph replays.

With `communicate=False` one GPU stands for a rank of many: every byte of the rank's weights is read, nothing is sent.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.bench.kernels.harness import event_times, graph_median
from kimi_k2.bench.kernels.routing import DrawnLayerStep, Routing, drawn_layers
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.layer_step import LayerStep
from kimi_k2.engine.prompt_step import PromptStep
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import MoE, Router
from kimi_k2.ops.collective import gather_last
from kimi_k2.ops.registry import computing
from kimi_k2.parallel.apply import AllReduce, parallelize
from kimi_k2.sharding.layout import Layout

_PATTERN_BYTES = 2**26


@dataclass(frozen=True)
class StepTimes:
    """Median microseconds of a whole step and of its parts, the parts averaged over the layers that have them."""

    step: float
    layers: int
    moe_layer: float
    attention: float
    feed_forward: float
    dense_layer: float
    head: float
    all_reduce: float
    distinct: float | None

    def lines(self) -> Iterator[str]:
        """The breakdown as text."""
        yield f"measured: TPOT {self.step / 1e3:.3f} ms over {self.layers} layers"
        yield f"measured: MoE layer {self.moe_layer:.1f} us"
        yield f"measured: of it attention {self.attention:.1f} us, experts {self.feed_forward:.1f} us"
        yield f"measured: dense layer {self.dense_layer:.1f} us, head {self.head:.1f} us"
        yield f"measured: all-reduce of one token {self.all_reduce:.1f} us (0: none)"
        drawn = "as the synthetic router chooses" if self.distinct is None else f"{self.distinct:.1f} distinct experts"
        yield f"routing: {drawn} a layer and step"


def fill_random(model: torch.nn.Module, seed: int = 0) -> None:
    """Values of a trained model's size in every parameter and buffer; FP8 without NaN, norms around one."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(_PATTERN_BYTES, device=device, generator=generator)
    patterns = {
        torch.float8_e4m3fn: (noise * 60).clamp(-448, 448).to(torch.float8_e4m3fn),
        torch.bfloat16: (noise * 0.02).bfloat16(),
        torch.float32: noise[: 2**22].abs() * (0.02 / 60),
        torch.int32: torch.randint(-(2**31), 2**31, (2**24,), device=device, generator=generator, dtype=torch.int32),
    }
    int4_scale = (noise[: 2**22].abs() * (0.02 / 4.6)).bfloat16()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(noise[: tensor.numel()] * 0.05)
        else:
            flat = tensor.view(-1)
            pattern = int4_scale if name.endswith("_proj_scale") else patterns[tensor.dtype]
            for start in range(0, flat.numel(), pattern.numel()):
                part = flat[start : start + pattern.numel()]
                part.copy_(pattern[: part.numel()])


def decide_routes(model: KimiK2ForCausalLM, seed: int = 7) -> KimiK2ForCausalLM:
    """Router biases further apart than scores can be: no rounding chooses other experts, so that errors compare."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Router):
            bias = module.e_score_correction_bias
            bias.copy_(2.0 * torch.randperm(len(bias), generator=generator))
    return model


def widened(model: KimiK2ForCausalLM) -> KimiK2ForCausalLM:
    """A copy that computes in float64, by plain operations alone; what is stored quantized stays so."""
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    return exact


def synthetic_rank(
    config: KimiK2Config, layout: Layout, rank: int, *, communicate: bool, device: str = "cuda"
) -> KimiK2ForCausalLM:
    """One rank's part with random weights."""
    with torch.device("meta"):
        model = KimiK2ForCausalLM(layout.held(config), dtype=torch.bfloat16, keep_quantized=layout.keeps)
    parallelize(model, layout, rank, device=device, communicate=communicate)
    # What the plan does not cut is on the meta device no more.
    left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert not left, left
    fill_random(model, rank)
    model.prepare()
    return model.eval()


def launches(action: Callable[[], object], repeats: int = 5, *, on_gpu: bool | None = None) -> list[str]:
    """What an action runs: microseconds, how often, name; the longest first.

    Args:
        action: called once more than counted, to warm up.
        repeats: calls that the figures are means of.
        on_gpu: count the GPU's kernels, else the CPU's operations; None for the GPU where there is one.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    action()
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(repeats):
            action()
        if on_gpu:
            torch.cuda.synchronize()
    timings = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:
            timings.append((microseconds / repeats, event.count / repeats, event.key))
    return [f"{time:9.1f} us {count:6.1f} x {name[:100]}" for time, count, name in sorted(timings, reverse=True)]


@torch.inference_mode()
def make_step(
    model: KimiK2ForCausalLM, contexts: Sequence[int], *, communicate: bool, routing: Routing | None = None
) -> Callable[[], Tensor]:
    """The step's replay after one random cached token less than `contexts` of each sequence."""
    step, tokens, positions = _step(model, contexts, AllReduce(None, communicate), communicate, routing)
    return partial(step, tokens, positions)


def _step(
    model: KimiK2ForCausalLM,
    contexts: Sequence[int],
    reduce: AllReduce,
    communicate: bool,
    routing: Routing | None = None,
) -> tuple[DecodeStep, Tensor, Tensor]:
    cache = new_cache(model, len(contexts), max(contexts), contexts)
    for layer in cache.data:  # PyTorch draws no FP8
        layer.copy_(torch.randn(layer.shape, device=layer.device, dtype=torch.bfloat16))
    gather = partial(gather_last, group=None) if communicate else (lambda x: x)
    device = cache.data.device
    graph = device.type == "cuda"
    layers = None if routing is None else drawn_layers(model, reduce, routing)
    step = DecodeStep(model, cache, reduce=reduce, gather=gather, graph=graph, layers=layers)
    return step, torch.arange(len(contexts), device=device), torch.tensor(contexts, device=device) - 1


@torch.inference_mode()
@computing(decoding=True)
def time_step(
    model: KimiK2ForCausalLM, contexts: Sequence[int], *, communicate: bool, routing: Routing | None = None
) -> StepTimes:
    """Median of graph replays at these cached tokens; parts are timed with a layer's weights after another's.

    Args:
        routing: to prescribe; None leaves the choice to the synthetic router.
    """
    reduce = AllReduce(None, communicate)
    step, tokens, positions = _step(model, contexts, reduce, communicate, routing)
    cache, device = step.cache, tokens.device
    logits = step(tokens, positions)
    assert bool(logits.isfinite().all()), "the step's logits are not finite"
    whole = statistics.median(event_times(lambda: step(tokens, positions), 20))
    x, delta = (torch.randn(len(contexts), model.config.hidden_size, device=device).bfloat16() for _ in range(2))
    batch = step.batch(positions, x.dtype)
    moe = [(i, layer) for i, layer in enumerate(step.layers) if isinstance(layer.layer.mlp, MoE)]
    dense = [(i, layer) for i, layer in enumerate(step.layers) if not isinstance(layer.layer.mlp, MoE)]

    def layers(chosen: list[tuple[int, LayerStep]]) -> float:
        return graph_median([partial(layer, x, delta, batch, cache.data[i]) for i, layer in chosen])

    distinct = [layer.distinct(x) for _, layer in moe if isinstance(layer, DrawnLayerStep)]

    return StepTimes(
        whole,
        len(step.layers),
        layers(moe),
        graph_median([partial(layer.attention_half, x, delta, batch, cache.data[i]) for i, layer in moe]),
        graph_median([partial(layer.feed_forward, x) for _, layer in moe]),
        layers(dense),
        graph_median([partial(step.head, x, delta)]),
        graph_median([partial(reduce, x.clone())] * 20) if communicate and dist.get_world_size() > 1 else 0.0,
        statistics.mean(distinct) if distinct else None,
    )


@torch.inference_mode()
def time_prefill(
    model: KimiK2ForCausalLM, batch: int, length: int, *, communicate: bool, routing: Routing | None = None
) -> tuple[float, float]:
    """Median microseconds of a prefill of random prompts to the last token's logits, and of one MoE layer in it.

    The layers are replayed from a graph; the whole is where `PromptStep` makes one.
    """
    step, _, _ = _step(model, [length] * batch, AllReduce(None, communicate), communicate, routing)
    prompt_step, device = PromptStep(step), step.cache.data.device
    ids = torch.randint(0, model.config.vocab_size, (batch, length))
    positions = torch.arange(length).expand(batch, -1)
    last = torch.full((batch,), length - 1)
    whole = statistics.median(event_times(lambda: prompt_step(ids, positions, last), 5))
    x = torch.randn(batch * length, model.config.hidden_size, device=device).bfloat16()
    made = prompt_step.batch(positions.to(device), x.dtype, length, whole=True)
    layers = zip(step.layers, step.cache.data, strict=True)
    moe = [partial(layer, x, None, made, cache) for layer, cache in layers if layer.moe is not None]
    with model.computing():
        return whole, graph_median(moe, 5)
