"""vllm-neuron's torch-native line: a deployment's options there, and how our model on it cuts its work."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kimi_k2.contrib_model.checks import ascending
from kimi_k2.errors import ConfigError
from kimi_k2.limits import MOST

Count = Annotated[int, Field(ge=1, le=MOST, strict=True)]

# Rows of one expert that are multiplied at a time at prefill, and columns of all experts that one operation takes:
# fewer make graphs of thousands of operations, more hold more experts' weights at a time.
BLOCK, COLUMNS = 128, 8192
# Keys that a prompt attends to at a time where it is read in one piece.
KEYS = 2048
TILE = 128  # what decode_context_length_buckets are multiples of: the line's P_MAX


def blocks_of(pairs: int, tokens: int, experts: int) -> int:
    """Blocks of one expert each with room for all of a prompt's choices on this rank.

    0 where that is not less than all tokens through all experts.

    Args:
        pairs: choices of all tokens.
        tokens: of the prompt.
        experts: of this rank.
    """
    blocks = -(-pairs // BLOCK) + experts
    return blocks if blocks * BLOCK < tokens * experts else 0


def blocks_at_once(columns: int) -> int:
    """Blocks that one operation takes, of experts of which a rank has so many columns."""
    return max(COLUMNS // columns, 1)


Segment = Literal[512, 1024, 2048, 4096, 8192]
Buckets = tuple[Count, ...]


class TorchNativeOptions(BaseModel):
    """Options of the line, named as its NeuronConfig and vLLM name them; what None stands for is in its reference.

    Attributes:
        num_batched_tokens_buckets: prompt tokens that have a graph; the last is `max_context_length`.
        num_seqs_buckets: sequences that have a decode graph; the last is `batch_size`.
        kv_segment_size_buckets: prompts are read in segments of so many tokens, which prefix caching needs; the same
            single number as `num_batched_tokens_buckets`.
        decode_context_length_buckets: further cache lengths that have a decode graph.
        on_device_sampling_config: None samples on the host, without masks of structured outputs or asynchronous
            scheduling; `max_top_k` on the device, among so many tokens with the largest logits. (The line's
            `all_greedy` ignores what a request asks for, so it is not taken.) Versions differ in what leaving it out
            means, so it is always said.
        enable_structured_outputs: every step has a mask, for schemas and for required or named tools; without it the
            line refuses such requests.
        block_size: tokens of a page.
        kv_cache_dtype: vLLM's: `auto` is the model's, unless the checkpoint asks for FP8; `fp8` e4m3 at scale 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_batched_tokens_buckets: Buckets | None = None
    num_seqs_buckets: Buckets | None = None
    kv_segment_size_buckets: tuple[Segment] | None = None
    decode_context_length_buckets: Buckets | None = None
    on_device_sampling_config: dict[Literal["max_top_k"], Count] | None = Field(default=None, min_length=1)
    enable_structured_outputs: bool = False
    block_size: Count = 32
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"

    def check(self, batch: int, context: int, prompt: int) -> None:
        """Whether the line takes them, as its reference of options states, with prompts cut to the context.

        Raises:
            ConfigError: naming the field.
        """
        for field, last in (("num_batched_tokens_buckets", min(prompt, context)), ("num_seqs_buckets", batch)):
            buckets = getattr(self, field)
            if buckets is not None and not ascending(buckets, last):
                raise ConfigError(
                    f"expected ascending up to {last}, got {list(buckets)}", field=f"torch_native.{field}"
                )
        if self.enable_structured_outputs and self.on_device_sampling_config is None:
            raise ConfigError(
                "expected on_device_sampling_config beside it: the line's host sampling applies no mask",
                field="torch_native.enable_structured_outputs",
            )
        lengths = self.decode_context_length_buckets or ()
        if list(lengths) != sorted(set(lengths)) or any(length % TILE or length >= context for length in lengths):
            expected = f"ascending multiples of {TILE} below seq_len ({context})"
            raise ConfigError(
                f"expected {expected}, got {list(lengths)}", field="torch_native.decode_context_length_buckets"
            )
        segments = self.kv_segment_size_buckets
        if segments is not None and (segments != self.num_batched_tokens_buckets or segments[0] % self.block_size):
            raise ConfigError(
                f"expected num_batched_tokens_buckets ({self.num_batched_tokens_buckets}), a multiple of block_size"
                f" ({self.block_size}), got {segments}",
                field="torch_native.kv_segment_size_buckets",
            )

    def neuron_config(self, experts: str, ep_degree: int) -> dict[str, Any]:
        """The line's `additional_config["neuron_config"]`, as JSON types."""
        options = self.model_dump(mode="json", exclude={"block_size", "kv_cache_dtype"}, exclude_none=True)
        sampling = {"on_device_sampling_config": self.on_device_sampling_config}
        return {"ep_degree": ep_degree, "quantization": experts, **options, **sampling}
