"""A step that verifies drafted tokens, and drafting them with an Eagle3 head: memory, bytes, collectives. Modelled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from rich.console import Console

from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import D2T, LAYER, DraftConfig, head_shapes
from kimi_k2.files import Json
from kimi_k2.plan.cost import SAMPLED_BYTES, Collective, GraphCounts, roofline
from kimi_k2.plan.deployment import Target
from kimi_k2.plan.kernels import Rates
from kimi_k2.plan.memory import BF16
from kimi_k2.plan.nxdi import check_head, draft_options

# Tokens a step of published MLA heads: K2.5 2.8 to 3.0, K2.6 2.5 to 3.2, K2.7 2.1 to 2.9 (reported by their users).
ACCEPTED = 2.8
_INT32, _INT64 = 4, 8


@dataclass(frozen=True)
class Head:
    """An Eagle3 head beside a target.

    Attributes:
        config: of the head.
        shapes: of its tensors by name, the embedding that NxDI gives it and its lm_head among them.
    """

    config: DraftConfig
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: DraftConfig, target: KimiK2Config) -> Head:
        """Of a head that fits.

        Raises:
            ConfigError: it was not made for this target.
        """
        config.fit(target)
        own = {
            "embed_tokens.weight": (config.vocab_size, config.hidden_size),
            "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        }
        return cls(config, own | head_shapes(config, target))

    def rank_bytes(self, name: str, target: Target) -> int:
        """Of a tensor on one rank: matrices are divided, on GPUs but `fc`, which each has whole as in vLLM."""
        shape = self.shapes[name]
        if name == D2T:
            return shape[0] * (_INT32 if target.is_neuron else _INT64)
        whole = len(shape) == 1 or (name == "fc.weight" and not target.is_neuron)
        return prod(shape) * BF16 // (1 if whole else target.layout.ranks)

    def slot_bytes(self, target: Target) -> int:
        """Of a token's entry in the head's cache on one rank."""
        head = self.config
        if head.form == "mla":
            return (head.kv_lora_rank + head.qk_rope_head_dim) * BF16
        return 2 * -(-head.num_key_value_heads // target.layout.ranks) * head.head_dim * BF16

    def weights(self, target: Target) -> int:
        """A rank's bytes; on GPUs the embedding is the target's."""
        names = [name for name in self.shapes if target.is_neuron or name != "embed_tokens.weight"]
        return sum(self.rank_bytes(name, target) for name in names)

    def drafting(self, target: Target) -> GraphCounts:
        """The head's runs around one step of the target, added up.

        As many as tokens are drafted. The first starts from the target's hidden states, behind `fc`, the others from
        the head's own. NxDI runs it once more behind the target to fill its cache with what the target made
        (`_eagle_token_gen_forward` in models/model_base.py), of which the compiler keeps `fc`, keys and values, and of
        the MLA form all down projections, which are one product.
        """
        counts = GraphCounts()
        self._add(counts, target, target.batch if target.is_neuron else target.rows, True)  # ours fills its cache too
        for _ in range(target.positions - 2):
            self._add(counts, target, target.batch, False)
        if target.is_neuron:
            self._add(counts, target, target.rows, True, cache_alone=True)
        return counts

    def _add(
        self, counts: GraphCounts, target: Target, rows: int, reads_target: bool, *, cache_alone: bool = False
    ) -> None:
        """One run of so many rows."""
        ranks, hidden = target.layout.ranks, rows * self.config.hidden_size * BF16
        for name, shape in self.shapes.items():
            if name == "embed_tokens.weight":
                counts.read[name] += hidden // (ranks if target.is_neuron else 1)
            elif _is_read(name, reads_target, cache_alone):
                size = self.rank_bytes(name, target)
                counts.read[name] += size
                counts.flops += size // BF16 * 2 * rows if len(shape) == 2 else 0
        if not cache_alone:
            counts.read["cache"] += self.slot_bytes(target) * target.batch * target.context
        if ranks == 1:
            return
        gather, summed = Collective("all-gather", ranks, hidden), Collective("all-reduce", ranks, hidden)
        if target.is_neuron:  # the embedding, divided by columns, fc, and the divided down projections
            counts.collectives[gather] += 1 + reads_target + (self.config.form == "mla")
        else:
            counts.collectives[summed] += 1
        if cache_alone:
            return
        counts.collectives[summed] += 2
        sizes = SAMPLED_BYTES if target.is_neuron else (self.config.draft_vocab_size // ranks * BF16,)
        counts.collectives.update(Collective("all-gather", ranks, target.batch * ranks * each) for each in sizes)


def with_drafts(target: Target, head: DraftConfig, tokens: int) -> Target:
    """A target whose steps verify so many tokens that a head drafted.

    Raises:
        ConfigError: the head was made for another model, or the deployment's run takes no such drafts.
    """
    if target.deployment is not None:
        target.deployment.check(**draft_options(tokens))
        if target.deployment.on_nxdi:
            check_head(head, target.config, target.layout.ranks)
    return replace(target, positions=tokens + 1, head=Head.of(head, target.config))


def _is_read(name: str, reads_target: bool, cache_alone: bool) -> bool:
    if name.startswith(("fc", "input_norm")):
        return reads_target
    if not cache_alone:
        return True
    return name.startswith((f"{LAYER}input_layernorm", f"{LAYER}hidden_norm")) or any(
        f".{projection}" in name for projection in ("k_proj", "v_proj", "kv_a_", "q_a_proj")
    )


def drafts_report(target: Target, verification: float, plain: float, rates: Rates | None) -> Json:
    """A step with drafts beside a plain one, seconds modelled.

    Args:
        target: with several positions.
        verification, plain: seconds of the target's step with them and without.
        rates: at which the head's bytes and collectives are taken, one after the other, where the step's are from the
            kernels' schedule; None for the machine's roofline.
    """
    head = target.head
    counts = head.drafting(target) if head else GraphCounts()
    collectives = sum(counts.collectives.values())
    seconds = rates.rest(counts.memory_bytes, collectives) if rates else roofline(counts, target.machine).bound
    step = verification + seconds
    return {
        "positions": target.positions,
        "form": head.config.form if head else None,
        "weights": head.weights(target) if head else 0,
        "runs": target.positions if target.is_neuron else target.positions - 1,
        "bytes_read": counts.memory_bytes,
        "collectives": collectives,
        "collective_bytes": counts.collective_bytes,
        "drafting": seconds,
        "verification": verification,
        "plain": plain,
        "accepted": ACCEPTED,
        "tpot": step / ACCEPTED,
        "pays_from": step / plain,
    }


def print_drafts(drafts: Json, console: Console) -> None:
    """In two lines."""
    console.print(
        f"drafts, modelled: {drafts['positions']} positions a step, {drafts['form'] or 'no'} head, run"
        f" {drafts['runs']} times:"
        f" {drafts['bytes_read'] / 1e6:.0f} MB a rank, {drafts['collectives']} collectives,"
        f" {drafts['drafting'] * 1e3:.2f} ms beside a step of {drafts['verification'] * 1e3:.2f}",
    )
    console.print(
        f"  effective TPOT {drafts['tpot'] * 1e3:.2f} ms where {drafts['accepted']} tokens a step are accepted"
        f" (reported for published heads), {drafts['plain'] * 1e3:.2f} without drafts: they pay from"
        f" {drafts['pays_from']:.2f} tokens a step",
    )
