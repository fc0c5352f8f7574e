"""The decoder and its language-model head, and how a checkpoint is streamed into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from kimi_k2.checkpoint.names import EXPERT
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import GenerationError
from kimi_k2.model.attention import MultiHeadLatentAttention
from kimi_k2.model.cache import LatentCache, kv_cache_dtype
from kimi_k2.model.linear import Embedding, Linear, RMSNorm
from kimi_k2.model.moe import MLP, Experts, MoE
from kimi_k2.model.rope import RotaryEmbedding
from kimi_k2.model.turns import Turns
from kimi_k2.ops.embedding import place_embeddings
from kimi_k2.ops.linear import dense_linear
from kimi_k2.ops.registry import computing


class HiddenStates:
    """Takes the residual stream before some of the layers, as a forward pass goes by.

    Args:
        layers: layer i is the stream before decoder layer i, as vLLM numbers it: what layer i - 1 returned, or the
            embedding for 0. The number of layers is the stream behind the last, before the final norm.
    """

    def __init__(self, layers: Collection[int]) -> None:
        self.layers = tuple(layers)
        self._taken: dict[int, Tensor] = {}

    def pass_by(self, layer: int, x: Tensor, delta: Tensor | None = None) -> None:
        """The stream before `layer`: x, or x + delta."""
        if layer in self.layers:
            self._taken[layer] = x if delta is None else x + delta

    def apart(self) -> list[Tensor]:
        """In the order of `layers`."""
        return [self._taken[layer] for layer in self.layers]

    def joined(self) -> Tensor:
        """Side by side in the order of `layers`: [..., layers * H]."""
        return torch.cat(self.apart(), dim=-1)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: KimiK2Config, layer: int, *, dtype: torch.dtype, keep_quantized: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = MultiHeadLatentAttention(config, layer, dtype=dtype, keep_quantized=keep_quantized)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp: MoE | MLP = (
            MoE(config, layer, dtype=dtype, keep_quantized=keep_quantized)
            if config.is_moe_layer(layer)
            else MLP(config, layer, "mlp", dtype=dtype, keep_quantized=keep_quantized)
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: LatentCache | None,
        length: int,
    ) -> Tensor:
        """[B, S, H] to [B, S, H]; arguments as for MultiHeadLatentAttention."""
        x = x + self.self_attn(self.input_layernorm(x), positions, rotation, cache, length)
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class KimiK2Model(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: KimiK2Config, *, dtype: torch.dtype, keep_quantized: bool) -> None:
        super().__init__()
        self.embed_tokens = Embedding(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, keep_quantized=keep_quantized)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        # Made on the CPU even under a meta-device context: it is computed, not loaded.
        self.rotary = RotaryEmbedding(config, device="cpu")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: LatentCache | None,
        length: int,
        media: tuple[Tensor, Tensor] | None = None,
        states: HiddenStates | None = None,
    ) -> Tensor:
        """Token ids [B, S] to normed hidden states [B, S, H]."""
        x = self.embed_tokens(input_ids)
        if media is not None:
            x = place_embeddings(x, *media)
        rotation = self.rotary(positions.clamp(min=0), x.dtype)
        for number, layer in enumerate(self.layers):
            if states is not None:
                states.pass_by(number, x)
            x = layer(x, positions, rotation, cache, length)
        if states is not None:
            states.pass_by(len(self.layers), x)
        normed: Tensor = self.norm(x)
        return normed


class KimiK2ForCausalLM(nn.Module):
    """Kimi-K2 in plain PyTorch: the reference that every other path is held to.

    Args:
        config: validated configuration.
        dtype: of weights and activations (the router's bias and logits stay float32).
        keep_quantized: hold FP8 or INT4 weights as stored and dequantize at use; otherwise dequantize once on load.

    Attributes:
        kv_cache_dtype: of new caches; None for `dtype`. The checkpoint's own at first.
        batch_invariant: a sequence's logits have the same bits in any batch and in any chunks; False at first.
        turns: of generations, which hold the model one after another; a pass with a cache of its own needs none.
    """

    def __init__(
        self,
        config: KimiK2Config,
        *,
        dtype: torch.dtype = torch.float32,
        keep_quantized: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype("auto", config)
        self.batch_invariant = False
        self.turns = Turns()
        self.model = KimiK2Model(config, dtype=dtype, keep_quantized=keep_quantized)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self.lm_head.weight.requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        keep_quantized: bool = False,
        on_tensor: Callable[[str, int], None] | None = None,
    ) -> KimiK2ForCausalLM:
        """Stream a checkpoint directory into a new model.

        Args:
            directory: of config.json, index and shards.
            dtype: of activations and float weights.
            device: where the model lives.
            keep_quantized: keep weights as they are stored and dequantize them at each use.
            on_tensor: called with (name, bytes) after each tensor, for a progress bar.

        Raises:
            ConfigError: config.json is missing or invalid.
            CheckpointError: (subclasses) a shard or tensor is missing, damaged or of the wrong shape or dtype.
        """
        config = KimiK2Config.from_pretrained(directory)
        # Before any memory is claimed: the files must hold what the configuration says.
        reader = CheckpointReader.for_config(directory, config)
        # Memory is claimed uninitialised on the target, so each weight is written exactly once.
        with torch.device("meta"):
            model = cls(config, dtype=dtype, keep_quantized=keep_quantized)
        model = model.to_empty(device=device)
        load_checkpoint(model, reader, on_tensor=on_tensor)
        model.prepare()
        return model.eval()

    def computing(self, **changed: bool) -> AbstractContextManager[None]:
        """The mode of this model's steps, see `ops.registry.computing`."""
        return computing(batch_invariant=self.batch_invariant, **changed)

    def prepare(self) -> None:
        """On a GPU, let the kernels that may serve this model put its weights into the order that they want, in place.

        Once after loading; another call does nothing, unless pins have changed which kernels may serve.
        """
        if self.lm_head.weight.is_cuda:
            with self.computing():
                for module in self.modules():
                    if isinstance(module, Experts):
                        module.prepare(self.dtype)

    def new_cache(
        self, batch: int, max_length: int, dtype: torch.dtype | None = None, pages: int | None = None
    ) -> LatentCache:
        """An empty cache on the model's device; `pages` as `LatentCache` takes them."""
        device, dtype = self.lm_head.weight.device, dtype or self.kv_cache_dtype or self.dtype
        return LatentCache(self.config, batch, max_length, pages, dtype=dtype, device=device)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        cache: LatentCache | None = None,
        *,
        logits_at: Tensor | None = None,
        media: tuple[Tensor, Tensor] | None = None,
        states: HiddenStates | None = None,
    ) -> Tensor:
        """Logits of new tokens.

        Args:
            input_ids: int64 [B, S].
            positions: int64 [B, S], each token's place in its sequence, negative for padding; None means 0..S-1.
            cache: takes the new entries and gives the old ones; None attends within `input_ids` alone.
            logits_at: int64 [B]: compute logits for this one column of each sequence only.
            media: int64 [B, S] and [M, H], embeddings of images and videos; see `ops.embedding.place_embeddings`.
            states: takes hidden states [B, S, H] between layers.

        Returns:
            [B, S, vocab_size], or [B, vocab_size] with `logits_at`.

        Raises:
            GenerationError: a position lies outside the cache, a token id outside the vocabulary.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        elif cache is None and not torch.equal(positions, torch.arange(input_ids.shape[1]).expand_as(positions)):
            raise GenerationError("positions other than 0..S-1 need a cache")
        length = int(positions.max()) + 1
        if cache is not None and length > cache.max_length:
            raise GenerationError(f"position {length - 1} is outside the cache of {cache.max_length} slots")
        if int(input_ids.min()) < 0 or int(input_ids.max()) >= self.config.vocab_size:
            raise GenerationError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        with self.computing():
            x = self.model(input_ids, positions, cache, length, media, states)
            if logits_at is not None:
                x = x[torch.arange(x.shape[0], device=x.device), logits_at]
            return dense_linear(x, self.lm_head.weight)


def load_checkpoint(
    model: KimiK2ForCausalLM,
    reader: CheckpointReader,
    *,
    on_tensor: Callable[[str, int], None] | None = None,
) -> None:
    """Fill `model` from a checkpoint that was opened for its configuration; each stored tensor is read once.

    A weight waits for its scales (which usually lie beside it), so that no more than a few Linears are held at a time.

    Raises:
        CheckpointError: (subclasses) see `CheckpointReader`.
    """
    with reader:
        sizes = Counter(name.rpartition(".")[0] for name in reader.names())
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in reader.stream():
            module, _, suffix = name.rpartition(".")
            group = waiting.setdefault(module, {})
            group[suffix] = tensor
            if len(group) == sizes[module]:
                _assign(model, module, waiting.pop(module), reader)
            else:
                # A view would keep its whole shard mapped while the other half may lie in another shard.
                group[suffix] = tensor.clone()
            if on_tensor:
                on_tensor(name, tensor.nbytes)


def _assign(model: KimiK2ForCausalLM, module: str, stored: dict[str, Tensor], reader: CheckpointReader) -> None:
    reader.check_module(module, stored, values=False)
    if match := EXPERT.match(f"{module}.weight"):
        experts = model.get_submodule(match["moe"] + ".experts")
        assert isinstance(experts, Experts)
        experts.load(int(match["expert"]), match["proj"], stored)
        return
    target: nn.Module = model.get_submodule(module)
    if isinstance(target, Linear):
        target.load(stored)
        return
    for suffix, tensor in stored.items():
        getattr(target, suffix).copy_(tensor)
