"""An Eagle3 head: predicts a token from the one before it and the target's hidden states at the one before that.

Also a warning where a head's metadata names another member of the family, whose tensors have the same shapes.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import D2T, LAYER, T2D, DraftConfig, Reading, check_tensors, module_name
from kimi_k2.errors import ConfigError, KimiK2Warning, TensorShapeError
from kimi_k2.files import parse_yaml, read_text
from kimi_k2.model.attention import MultiHeadLatentAttention
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.linear import Embedding, Linear, RMSNorm
from kimi_k2.model.rope import RotaryEmbedding
from kimi_k2.ops.experts import swiglu
from kimi_k2.ops.linear import add_norm
from kimi_k2.tokenization.style import member, member_of


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair (i, D / 2 + i) of x [B, S, H, D] by the angles whose cos and sin are [B, S, D / 2]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class LlamaAttention(nn.Module):
    """Of the head's one layer, whose input is twice as wide as its output.

    Args:
        config: of the head.
        plain: `config.attention_config`.
    """

    def __init__(self, config: DraftConfig, plain: KimiK2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.groups, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim

        def linear(name: str, rows: int, columns: int) -> Linear:
            return Linear(plain, f"midlayer.self_attn.{name}", rows, columns, dtype=dtype)

        # Queries, keys and values in one.
        self.qkv_proj = linear("qkv_proj", (self.heads + 2 * self.groups) * self.width, 2 * config.hidden_size)
        self.o_proj = linear("o_proj", config.hidden_size, self.heads * self.width)

    @property
    def cache_dim(self) -> int:
        """Values that the cache holds of a token."""
        return 2 * self.groups * self.width

    def forward(
        self, x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], cache: LatentCache, length: int
    ) -> Tensor:
        """[B, S, 2 * H] to [B, S, H]; arguments as for MultiHeadLatentAttention."""
        batch, new, _ = x.shape
        both, value = self.qkv_proj(x).view(batch, new, -1, self.width).tensor_split((-self.groups,), dim=2)
        q, key = rotate_halves(both, *rotation).tensor_split((self.heads,), dim=2)
        entries = torch.cat((key, value), dim=2).flatten(2)
        cached = cache.update(0, entries, positions, length).to(x.dtype)
        keys, values = cached.view(batch, cached.shape[1], 2, self.groups, self.width).transpose(1, 3).unbind(2)
        seen = torch.arange(cached.shape[1], device=x.device) <= positions.clamp(min=0)[:, None, :, None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=self.groups != self.heads
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


# Weights of the layer, several in one where a launch reads them.
STACKED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


class HeadLayer(nn.Module):
    """The head's decoder layer: it reads the token's embedding and a hidden state side by side."""

    def __init__(self, config: DraftConfig, plain: KimiK2Config, dtype: torch.dtype) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype)
        inner = config.intermediate_size
        self.gate_up_proj = Linear(plain, "midlayer.mlp.gate_up_proj", 2 * inner, size, dtype=dtype)
        self.down_proj = Linear(plain, "midlayer.mlp.down_proj", size, inner, dtype=dtype)
        self.norm_before_residual = config.norm_before_residual
        self.self_attn: LlamaAttention | MultiHeadLatentAttention
        if config.form == "llama":
            self.self_attn = LlamaAttention(config, plain, dtype)
            return
        self.self_attn = attention = MultiHeadLatentAttention(plain, 0, dtype=dtype)
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            rows = getattr(attention, name).rows
            setattr(attention, name, Linear(plain, f"midlayer.self_attn.{name}", rows, 2 * size, dtype=dtype))
        # vLLM gives them the head's epsilon, though not the target's.
        attention.q_a_layernorm.eps = attention.kv_a_layernorm.eps = eps

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: LatentCache,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        """[B, S, H] and [B, S, H] to two [B * S, H] to be added; the rest as for MultiHeadLatentAttention."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        attended = self.self_attn(both, positions, rotation, cache, length)
        norm = self.post_attention_layernorm
        x, read = add_norm(residual.flatten(0, 1), attended.flatten(0, 1), norm.weight, norm.eps)
        return x, swiglu(read, self.gate_up_proj.stored(), self.down_proj.stored())


class Eagle3Head(nn.Module):
    """A head beside its target, whose embedding and lm_head it uses where it has none of its own.

    Args:
        config: of the head.
        target: the model that it drafts for.

    Attributes:
        aux_layers: layers of the target whose hidden states it reads, as `DraftConfig` numbers them.
        tokens: int64 [draft_vocab_size], the target's token of each row of lm_head; None where they are the same.
    """

    def __init__(self, config: DraftConfig, target: KimiK2ForCausalLM, dtype: torch.dtype) -> None:
        super().__init__()
        config.fit(target.config)
        plain, count = config.attention_config(target.config), len(config.layers(target.config))
        self.config, self.aux_layers, self.dtype = config, config.layers(target.config), dtype
        size, eps, read = config.hidden_size, config.rms_norm_eps, config.target_hidden_size
        self.fc = Linear(plain, "fc", size, count * read, dtype=dtype)
        self.input_norm = RMSNorm(count * read, eps, dtype=dtype) if config.norm_before_fc else None
        norms = (RMSNorm(read, eps, dtype=dtype) for _ in range(count))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.midlayer = HeadLayer(config, plain, dtype)
        self.norm = RMSNorm(size, eps, dtype=dtype)
        self.embed_tokens: Embedding = target.model.embed_tokens
        self.lm_head: Linear | None = None
        self._target = (target,)  # in a tuple: no module of this one
        self.rotary = RotaryEmbedding(plain, device="cpu")
        self.tokens: Tensor | None = None

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        target: KimiK2ForCausalLM,
        *,
        target_directory: str | Path | None = None,
        reading: Reading = "auto",
    ) -> Eagle3Head:
        """Load a head for a target, on its device and in its dtype.

        Args:
            directory: of config.json and safetensors.
            target: the loaded model.
            target_directory: where it was loaded from: its name tells a head of another member of the family.
            reading: of its list of the target's layers, see `DraftConfig`.

        Raises:
            ConfigError: config.json is missing or wrong, or does not fit the target.
            CheckpointError: (subclasses) a tensor is missing, unexpected, damaged, or of another shape.
        """
        directory = Path(directory)
        config = DraftConfig.from_pretrained(directory, reading)
        config.fit(target.config, directory / "config.json")
        if target_directory is not None:
            warn_of_other_member(directory, Path(target_directory))
        whole = len(target.lm_head.weight) == target.config.vocab_size
        device = target.lm_head.weight.device
        weights, tokens = read_head(directory, config, target.config)
        for stacked, sources in STACKED.items():
            names = [f"{LAYER}{source}.weight" for source in sources]
            if names[0] in weights:
                weights[f"{LAYER}{stacked}.weight"] = torch.cat([weights.pop(name) for name in names])
        with torch.device("meta"):
            head = cls(config, target, target.dtype)
            plain = config.attention_config(target.config)
            if "embed_tokens.weight" in weights:
                shape = config.vocab_size, config.hidden_size
                head.embed_tokens = Embedding(torch.empty(shape, dtype=target.dtype))
            if "lm_head.weight" not in weights and not whole:
                raise ConfigError("expected an lm_head of the head's own: ranks have a part of the target's each")
            if "lm_head.weight" in weights:
                rows = config.draft_vocab_size, config.hidden_size
                head.lm_head = Linear(plain, "lm_head", *rows, dtype=target.dtype)
        for name in [name for name in head.state_dict() if name in weights]:
            module, _, leaf = name.rpartition(".")
            tensor = weights.pop(name).to(device, target.dtype)
            setattr(head.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
        head.tokens = None if tokens is None else tokens.to(device)
        return head.eval()

    def computing(self) -> AbstractContextManager[None]:
        """The mode of the target's steps, in which the head's are."""
        return self._target[0].computing()

    @property
    def cache_dim(self) -> int:
        """Values that the draft's cache holds of a token."""
        attention = self.midlayer.self_attn
        return attention.cache_dim if isinstance(attention, LlamaAttention) else attention.config.cache_dim

    def fuse(self, aux: Tensor) -> Tensor:
        """The target's hidden states side by side, [..., layers * H], to one [..., H]."""
        aux = aux.to(self.dtype)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            states = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        fused: Tensor = self.fc(aux)
        return fused

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: LatentCache, length: int
    ) -> tuple[Tensor, Tensor]:
        """One pass over new places.

        Args:
            tokens: int64 [B, S], of each place the token after it.
            hidden: [B, S, H], of `fuse`, or what an earlier pass returned.
            positions: int64 [B, S], of the hidden states; negative for padding.
            cache: the draft's own.
            length: slots to attend over.

        Returns:
            [B, S, H], of which `logits` makes those of the token after `tokens`, and [B, S, H], the hidden state from
            which another pass drafts on.
        """
        embeds = self.embed_tokens(tokens).to(self.dtype)
        rotation = self.rotary(positions.clamp(min=0), self.dtype)
        x, fed = self.midlayer(embeds, hidden, positions, rotation, cache, length)
        x, normed = (one.view_as(hidden) for one in add_norm(x, fed, self.norm.weight, self.norm.eps))
        return normed, normed if self.config.norm_output else x

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] to [..., draft_vocab_size]."""
        logits: Tensor = (self.lm_head or self._target[0].lm_head)(normed)
        return logits

    def to_target(self, drafted: Tensor) -> Tensor:
        """Rows of lm_head to the target's tokens."""
        return drafted if self.tokens is None else self.tokens[drafted]


def warn_of_other_member(directory: Path, target: Path) -> None:
    """Say where a head's files name another member of the family than its target's directory."""
    if said := other_member(directory, target):
        warnings.warn(f"{directory}: {said}; few of its drafts may be accepted", KimiK2Warning, stacklevel=3)


def read_head(directory: Path, config: DraftConfig, target: KimiK2Config) -> tuple[dict[str, Tensor], Tensor | None]:
    """A head's weights by `module_name`, as they are stored, and `Eagle3Head.tokens`, on the CPU.

    Raises:
        CheckpointError: (subclasses) a tensor is missing, unexpected, damaged, or of another shape.
    """
    with CheckpointReader(directory) as reader:
        keys = {module_name(name): name for name in reader.names()}
        check_tensors(reader, keys, config, target)
        tokens = _target_tokens(reader, keys, config, directory) if D2T in keys else None
        # Copies: a reader's tensors lie in its open files.
        return {name: reader.get(key).clone() for name, key in keys.items() if name not in (D2T, T2D)}, tokens


def _target_tokens(reader: CheckpointReader, keys: dict[str, str], config: DraftConfig, directory: Path) -> Tensor:
    """Of `d2t`, which holds each row's distance to its token, held against the tokens that `t2d` marks."""
    tokens = reader.get(keys[D2T]) + torch.arange(config.draft_vocab_size)
    if int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size or len(tokens.unique()) < len(tokens):
        raise TensorShapeError(
            f"expected distances that lead to {config.draft_vocab_size} of {config.vocab_size} tokens",
            file=directory,
            tensor=keys[D2T],
        )
    if T2D in keys:
        marked = reader.get(keys[T2D]).nonzero().flatten()
        if not torch.equal(marked, tokens.sort().values):
            raise TensorShapeError("marks other tokens than d2t leads to", file=directory, tensor=keys[T2D])
    return tokens


_README = "README.md"
_README_BYTES = 2**20


def other_member(head: Path, target: Path) -> str | None:
    """In a few words, which member a head names and which one the target is; None where they agree or say nothing.

    A head's README names its `base_model` in the front matter, as Hugging Face has it; else its directory's name
    counts. A target is what its config.json or its directory says.
    """
    own = next(filter(None, map(member, _base_models(head))), None) or member_of(head)
    theirs = member_of(target)
    if own is None or theirs is None or own == theirs:
        return None
    return f"a head for {own}, and the target is {theirs}"


def _base_models(head: Path) -> list[str]:
    path = head / _README
    if not path.is_file():
        return []
    sections = read_text(path, _README_BYTES, ConfigError).split("---", 2)
    try:
        card: Any = parse_yaml(sections[1].encode()) if len(sections) == 3 and not sections[0].strip() else None
    except ValueError:  # it says nothing
        return []
    models = card.get("base_model") if isinstance(card, dict) else None
    return [name for name in (models if isinstance(models, list) else [models]) if isinstance(name, str)]
