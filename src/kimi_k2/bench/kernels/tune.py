"""Find the fastest launches of experts, linears and MLA attention on this GPU and write its tuning files."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch

from kimi_k2.bench.kernels import linear, mla
from kimi_k2.bench.kernels.expert_formats import HIDDEN, Shape, distinct, draw_inputs
from kimi_k2.bench.kernels.harness import Captures, quick_captures, read_bandwidth
from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, KernelError
from kimi_k2.kernels.attention import tuning as attention_tuning
from kimi_k2.kernels.attention.mla_sizes import HEADS
from kimi_k2.kernels.common.tuning import Sizes
from kimi_k2.kernels.experts.tuning import FILES, ExpertChoice
from kimi_k2.kernels.experts.w4a16 import TUNING_DTYPES, takes_groups
from kimi_k2.kernels.linear import tuning as linear_tuning
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.stored import format_of

ChoiceT = TypeVar("ChoiceT")
TOKENS = [
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168,
    8192, 16384, 32768,
]  # fmt: skip
# Tokens up to which all go to the same experts in the skewed routing that is timed too.
MOST_SAME = 512
# What linears and attention are tuned for. An even split is a choice up to the largest capacity alone.
LINEAR_TOKENS = (
    16, 24, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512, 576, 640, 704, 768, 896,
    1024, 1152, 1280, 1408, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192,
)  # fmt: skip
CAPACITIES, BATCHES = (
    (64, 128, 256, 512, 1024, 2048),
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 66, 80, 100, 132, 200, 256),
)
CACHES = ("bf16", "e4m3")
PLAN = 0.25  # microseconds of a layer: a plan takes 15, once a step of 61
OPERATIONS = ("experts", "linear", "attention")
# Every launch is timed over this many replays, and those within SLACK of the best again over more: few for calls of
# many tokens, which take milliseconds and differ little from replay to replay.
FIRST_REPLAYS, REPLAYS, TURNS = 2, 11, 2
SLACK = 1.08


def replays_of(tokens: int) -> int:
    """Replays whose median is a launch's time."""
    return 25 if tokens <= 512 else 9 if tokens <= 4096 else 5


def candidates(case: Shape, tokens: int) -> list[ExpertChoice]:
    """The launches worth timing for a number of tokens."""
    pairs, fp8 = tokens * case.top_k, case.dtype == "fp8_e4m3"
    wide = fp8 and case.inter > 512
    slabs: tuple[int, ...]
    choices = []
    if pairs <= 512:
        splits1 = (8, 4) if pairs <= 8 else (4, 2, 1) if pairs <= 64 else (2, 1)
        split2 = case.inter > 512 if fp8 else pairs <= 64
        splits2 = [parts for parts in (1, 2, 4) if parts <= case.inter // 128 and (parts == 1 or split2)]
        slabs = (1, 2) if wide else (1, 2, 4)
        choices += [ExpertChoice(True, 16, *parts) for parts in product(splits1, splits2, slabs)]
    if tokens >= 8:
        slabs = (1, 2, 7) if fp8 and tokens > 1024 else (1, 2) if wide else (1, 2, 4, 7)
        if fp8:
            rows = (32,) if tokens < 128 else (32, 64) if tokens <= 1024 else (64, 128, 256)
        else:
            rows = (32,) if tokens <= 512 else (64, 128)
        choices += [ExpertChoice(False, most, 1, 1, each) for most, each in product(rows, slabs)]
    return choices


def cases(config: KimiK2Config) -> dict[str, Shape]:
    """What a rank of 1 to 8 holds, by the layout's name: TP4, EP8, TP2-EP4 ...

    The pairs that arrive for a token are those of an even routing, at least one.

    Raises:
        ConfigError: the experts' stored format is none that a tuned kernel takes.
    """
    scheme = config.quantization
    if isinstance(scheme, Fp8BlockFormat) and scheme.weight_block_size == (128, 128):
        dtype = "fp8_e4m3"
    elif isinstance(scheme, Int4GroupFormat) and takes_groups(scheme.group_size):
        packed = format_of(config.quantization, "model.layers.1.mlp.experts.0.down_proj").method is not None
        dtype = TUNING_DTYPES[not packed]
    else:
        raise ConfigError("no tuned kernel takes these experts", field="quantization_config")
    shapes = {}
    for ranks in (1, 2, 4, 8):
        for ep in (1, 2, 4, 8):
            if ranks % ep or config.n_routed_experts % ep:
                continue
            tp = ranks // ep
            inter, top_k = config.moe_intermediate_size // tp, max(1, config.num_experts_per_tok // ep)
            name = "-".join(f"{kind}{size}" for kind, size in (("TP", tp), ("EP", ep)) if size > 1)
            shapes[name or "TP1"] = Shape(config.n_routed_experts // ep, inter, top_k, dtype)
    return shapes


Calls = Mapping[ChoiceT, Sequence[Callable[[], object]]]


def medians(calls: Calls[ChoiceT], captures: Captures, replays: int) -> dict[ChoiceT, float]:
    """Microseconds of a call of each choice's graph."""
    for each in calls.values():
        each[0]()
    return {choice: statistics.median(captures.times(each, replays, 1)) for choice, each in calls.items()}


def fastest(calls: Calls[ChoiceT], captures: Captures, replays: int = REPLAYS) -> dict[ChoiceT, float]:
    """`medians` of the choices that a first short look leaves within SLACK of the best."""
    seen = medians(calls, captures, FIRST_REPLAYS)
    near = {choice: calls[choice] for choice, time in seen.items() if time <= SLACK * min(seen.values())}
    return medians(near, captures, replays)


def best_expert_choice(uniform: Mapping[ExpertChoice, float], skewed: Mapping[ExpertChoice, float]) -> ExpertChoice:
    """The fastest with a skewed routing among those at most 4 % slower than the best with a uniform one."""
    near = [choice for choice, time in uniform.items() if time <= 1.04 * min(uniform.values())]
    return min(near, key=skewed.__getitem__)


def for_each_count(choices: Mapping[Sizes, ExpertChoice]) -> dict[Sizes, ExpertChoice]:
    """A file's choices with those that it leaves out, as the next count has them too."""
    counts = [(tokens,) for tokens in TOKENS if (tokens,) <= max(choices, default=(0,))]
    return {count: choices[min(choice for choice in choices if choice >= count)] for count in counts}


def tune_experts(
    config: KimiK2Config,
    shapes: Sequence[str] | None,
    tokens: Sequence[int] | None,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """Time every candidate; say the winner's times, bandwidth and share of the bandwidth.

    Where only some token counts are asked for, the others' choices stay as the file has them.

    Args:
        config: of the model.
        shapes: names of `cases`; None for all.
        tokens: token counts; None for TOKENS.
        out: directory of the tuning files; None for the package's.
        say: takes each line.

    Raises:
        ConfigError: see `cases`.
        KernelError: no such shape.
    """
    known = cases(config)
    if unknown := sorted(set(shapes or ()) - set(known)):
        raise KernelError(f"shape: {', '.join(unknown)} not among {', '.join(known)}")
    ceiling = read_bandwidth()
    say(f"read bandwidth {ceiling:.0f} GB/s")
    for name in shapes or known:
        case = known[name]
        keys = case.experts, case.inter, HIDDEN, case.dtype, case.block
        path = (out or FILES.directory) / FILES.name(*keys, device=torch.cuda.get_device_name())
        chosen = for_each_count(FILES.load(path)) if tokens and path.exists() else {}
        experts, captures = case.draw(), Captures()
        for count in tokens or TOKENS:
            skew = "same" if count <= MOST_SAME else "zipf:1.0"
            sets = {
                routing: draw_inputs(case, Routing.parse(routing), count, count, experts.bytes_each)
                for routing in ("uniform", skew)
            }
            calls = {
                routing: {
                    choice: [partial(experts.ours(choice), *one) for one in own] for choice in candidates(case, count)
                }
                for routing, own in sets.items()
            }
            uniform = fastest(calls["uniform"], captures, replays_of(count))
            skewed = medians({choice: calls[skew][choice] for choice in uniform}, captures, replays_of(count))
            won = chosen[count,] = best_expert_choice(uniform, skewed)
            FILES.save(path, chosen)
            rate = distinct(sets["uniform"]) * experts.bytes_each / uniform[won] / 1e3
            times = f"{uniform[won]:.1f} us, {skew} {skewed[won]:.1f} us"
            say(f"{name} T={count}: {times} {rate:.0f} GB/s {rate / ceiling:.1%} {won}")
        del experts, captures, calls
        torch.cuda.empty_cache()


def tune_linears(out: Path | None, say: Callable[[str], None]) -> None:
    """Time every launch of a TP8 rank's FP8 linears with what quantizes its tokens, norm included, and cuBLAS."""
    files, captures = linear_tuning.FILES, Captures()
    for (name, (rows, columns)), terms in product(linear.SHAPES.items(), (1, 2)):
        path = (out or files.directory) / files.name(terms, rows, columns, device=torch.cuda.get_device_name())
        chosen: dict[Sizes, linear_tuning.LinearChoice] = {}
        for tokens in LINEAR_TOKENS:
            times = fastest(linear.launches(name, terms, tokens), captures)
            chosen[tokens,] = min(times, key=times.__getitem__)
            say(f"{name} {terms} terms T={tokens}: {times[chosen[tokens,]]:.1f} us {chosen[tokens,]}")
        files.save(path, chosen)


def tune_attention(out: Path | None, say: Callable[[str], None]) -> None:
    """Time even splits and the plan over contexts that all fill the capacity, and over uneven ones.

    The choice is the one that loses least against the best in either.
    """
    files, captures = attention_tuning.FILES, Captures()
    for heads, cache in product(HEADS, CACHES):
        path = (out or files.directory) / files.name(heads, cache, device=torch.cuda.get_device_name())
        chosen: dict[Sizes, attention_tuning.AttentionChoice] = {}
        for capacity, batch in product(CAPACITIES, BATCHES):
            losses: dict[attention_tuning.AttentionChoice, float] = {}
            for kind in ("equal", "uneven"):
                calls = mla.splits(heads, cache == "e4m3", capacity, batch, kind)
                turns = [medians(calls, captures, REPLAYS) for _ in range(TURNS)]
                times = {call: min(turn[call] for turn in turns) + (0 if call.splits else PLAN) for call in calls}
                for choice, time in times.items():
                    losses[choice] = max(losses.get(choice, 0.0), time / min(times.values()))
            won = chosen[capacity, batch] = min(losses, key=losses.__getitem__)
            say(f"{heads} heads, {cache}, {batch} of {capacity}: at most {losses[won]:.2f} of the best, {won}")
        files.save(path, chosen)


def tune(
    only: Sequence[str],
    config: KimiK2Config,
    shapes: Sequence[str] | None,
    tokens: Sequence[int] | None,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """Time launches and write the tuning files, `out`/experts, linear and attention if it is given.

    Args:
        only: of OPERATIONS; all if empty.
        config, shapes, tokens, out, say: as `tune_experts` takes them.

    Raises:
        ConfigError: see `cases`.
        KernelError: there is no CUDA device, no such operation, or no such shape.
    """
    if unknown := sorted(set(only) - set(OPERATIONS)):
        raise KernelError(f"only: {', '.join(unknown)} not among {', '.join(OPERATIONS)}")
    if not torch.cuda.is_available():
        raise KernelError("no CUDA device")
    quick_captures()
    folders = {name: None if out is None else out / name for name in OPERATIONS}
    wanted = only or OPERATIONS
    if "attention" in wanted:
        tune_attention(folders["attention"], say)
    if "linear" in wanted:
        tune_linears(folders["linear"], say)
    if "experts" in wanted:
        tune_experts(config, shapes, tokens, folders["experts"], say)
