"""What the folder's form of the model never does, by module: NKI kernels and what only they need, LoRA, the tower.

`reworded` changes sentences that speak of these, and the few lines that name them among others.
"""

from __future__ import annotations

from .fold import Known

_REGISTRY = '''class Registry(Generic[T]):
    """Classes of one kind by their `name`."""

    def __init__(self, package: str) -> None:
        self._known: dict[str, type[T]] = {}

    def register(self, cls: type[T]) -> type[T]:
        """Class decorator: known by the class's `name`."""
        self._known[str(vars(cls)["name"])] = cls
        return cls

    def known(self) -> Mapping[str, type[T]]:
        """All classes by name."""
        return self._known'''

_RANKED = '''def _ranked(state: dict[str, Tensor], world_size: int) -> dict[str, Tensor]:
    """With the rank numbers, which NxD cuts like a weight."""
    return {"rank_util.rank": torch.arange(world_size, dtype=torch.int32), **state}'''

KNOWN: dict[str, Known] = {
    "kimi_k2.config": Known(
        values={"self.vision": None, "(PRESET_DIR / f'{directory}.json').is_file()": False},
        dropped=(
            "PRESET_DIR",
            "KimiK2Config.vision",
            "KimiK2Config.from_preset",
            "KimiK2Config.load",
        ),
        reworded={'"tensor_prefix", "vision")': '"tensor_prefix")'},
    ),
    "kimi_k2.config_file": Known(
        reworded={
            'renamed = {f"vision.{field}": theirs for field, theirs in names_in_file(raw).items()} | '
            '{"vision": "vision_config"}': "renamed: dict[str, str] = {}",
            '    renamed["media_placeholder_token_id"] = renamed["vision.image_token_id"]\n': "",
            '    flat["vision"] = normalised_vision(raw.get("vision_config"), raw, flat.get("hidden_size"))\n': "",
        },
    ),
    "kimi_k2.sharding.rank_file": Known(
        values={"self.finished": False, "self.fresh": True},
        parameters={"resume": False},
        dropped=("RankFile._unfinish",),
        reworded={
            "what is finished is kept; make room or mend the disk and run the same command again": (
                "make room or mend the disk and convert again"
            ),
            """            if self.finished:
                self._fd = open_output(path)
                return
""": "",
            "`<path>.partial` until `finish`, `path` afterwards.\n\n    Unlike `SafetensorsWriter` "
            "it keeps an unfinished file and opens it again without truncating it; who writes "
            "decides\n    what of it is valid.": "`<path>.partial` until `finish`, `path` afterwards.",
        },
    ),
    "kimi_k2.sharding.source": Known(parameters={"hash_bytes": False}),
    "nxdi.cpu_mode": Known(
        values={"lora": None, "adapters": None},
        reworded={
            "[*model.kv_mgr.past_key_values, *adapters]": "[*model.kv_mgr.past_key_values]",
            "last: caches, and the adapters in use.": "last: caches.",
        },
    ),
    "nxdi.kv_cache": Known(
        values={"self.neuron_config.kernels": False},
        dropped=("LatentKVCacheManager.get_cache",),
        reworded={
            "NxDI adds to it.\n\n        Kernels are given the whole cache: a graph would copy a "
            "part of it before the call.\n        ": "NxDI adds to it.",
        },
    ),
    "kimi_k2.quantization.stored": Known(replaced={"Registry": _REGISTRY}),
    "kimi_k2.sharding.layout": Known(
        values={"self.kernels": False, "self.query_group": 0, "in_tiles": False, "self.target": "neuron", "held": None},
        dropped=("Layout.kernels", "Layout.attention_tiles", "Layout.query_group", "STORED", "AttentionTiles"),
        replaced={"Decode": 'Decode = Literal["xla"]', "Target": 'Target = Literal["neuron"]'},
    ),
    "kimi_k2.sharding.plan": Known(
        reworded={
            "    held = layout.held(config)\n": "",
            "_neuron_layer(config, layout, layer, experts) if experts else _cuda_layer(held, layout, "
            "layer)": "_neuron_layer(config, layout, layer, experts)",
        },
        values={
            "layout.target": "neuron",
            "layout.query_group": 0,
            "layout.attention_tiles(config)": "",
            "layout.kernels": False,
            "experts.tiles": False,
            "experts.shared": None,
            "tiled": (),
        },
    ),
    "kimi_k2.sharding.convert": Known(
        values={
            "self.held": None,
            "layout.kernels": False,
            "self.layout.target": "neuron",
            "layout.target": "neuron",
            "neuron": True,
            "self.experts.tiles": False,
            "in_tiles": False,
            "tiles": "",
            "self.following": None,
            "len(unit.modules) == len(_FOLDED)": False,
            "shared": False,
            "folded": [],
        },
        parameters={"following": None, "ranks": None, "shared": False},
        dropped=(
            "Converter._attention_tiles",
            "Converter._early_router",
            "Converter._cuda",
            "Converter._kept",
            "Converter.holds_shared",
            "_FOLDED",
        ),
        reworded={
            "if experts is None and not layout.keeps:": "if experts is None:",
            "{'shared_experts' if shared else 'mlp_op'}": "mlp_op",
        },
    ),
    "kimi_k2.sharding.whole": Known(
        values={"layout.kernels": False},
        parameters={
            "query_group": 0,
            "ranks": None,
            "following": None,
            "decode": "xla",
            "keep": False,
            "shared": False,
        },
    ),
    "kimi_k2.sharding.experts.format": Known(
        values={"tiles": False},
        dropped=("ExpertFormat.tiles", "ExpertFormat.shared"),
        reworded={"(one.quantization_type, one.tiles) == (wanted, tiles)": "one.quantization_type == wanted"},
    ),
    "kimi_k2.checkpoint.reader": Known(values={"self.vision": False}, parameters={"vision": False}),
    "kimi_k2.sharding.manifest": Known(
        parameters={"vision": None},
        dropped=("_ADDED", "_BEFORE", "options_of_this_version"),
        reworded={
            "from kimi_k2 import __version__\n": "",
            """    # Models without a tower keep the digest that they had before there was such a field.
    absent = {"vision"} if config.vision is None else set()
""": "",
            "model_dump_json(exclude=absent)": "model_dump_json()",
            '"version": __version__': '"version": "contrib"',
            'options_of_this_version(made_from["options"], path)': 'made_from["options"]',
            "{**dict.fromkeys(_ADDED), **_options(layout)}.items()": "_options(layout).items()",
            "    options = {\n": "    return {\n",
            "    return options | {name: value for name in _ADDED if (value := getattr(layout, "
            'name)) not in ("xla", 0)}\n': "",
        },
    ),
    "kimi_k2.sharding.presharder": Known(
        values={
            "self.layout.target": "neuron",
            "self.verify_output": False,
            "finished": False,
            "layer in done": False,
            "self._journal": None,
            "self._journal.begin(self.made_from, self._checksum)": None,
            "self._journal.remove()": None,
            "self._trusted": None,
            "done": None,
            "self.looked_through": False,
        },
        parameters={
            "following": None,
            "shared": False,
            "verify_source": False,
            "verify_output": False,
            "hash_bytes": False,
            "vision": False,
            "tower": None,
            "resume": False,
            "repair": False,
            "journal": False,
            "done": None,
        },
        dropped=("Presharder._following",),
        reworded={
            "self.layout, self.report, self.verify_source = layout, report, verify_source": (
                "self.layout, self.report = layout, report"
            ),
            'options_of_this_version(made_from["options"], file)': 'made_from["options"]',
            "done or {}, repair=finished": "",
            """                if not wanted:
                    self.on_bytes(self._layer_bytes(layer))
                    continue
""": "",
            "\n    # -- resuming "
            "------------------------------------------------------------------------------------\n": "",
            """directory to write; with an unfinished conversion of the same source and options it is resumed, and a
            finished one is looked through: files that are gone or have another size or header are made again.""": (
                "directory to write; what an unfinished conversion left there is made anew."
            ),
            "        # An earlier run may have begun with another kind of checksum; then all of them "
            "are of that kind.\n": "",
            "is whole on the disk: say so in the journal.": "is whole on the disk.",
            "Convert what is not yet converted; returns the manifest.": "Convert; returns the manifest.",
            "with DirectoryLock(self.output):": "if True:",
            "self.verify_output, self.looked_through = verify_output, False": "self.looked_through = False",
            "            tower = self._write_vision()\n": "",
            "modules_by_layer(name for name in self.reader.names() if not VISION.match(name))": (
                "modules_by_layer(self.reader.names())"
            ),
            "        needed += sum(one.nbytes for name, one in self.reader.tensors.items() if "
            "VISION.match(name))\n": "",
        },
    ),
    "kimi_k2.model.linear": Known(
        reworded={
            "linear, rms_norm": "linear, _normed",
            "return rms_norm": "return _normed",
            "`ops.linear.rms_norm`": "RMSNorm",
        },
    ),
    "kimi_k2.ops.embedding": Known(
        reworded={"@operation(batch_invariant=ELEMENTWISE)\ndef apply": "def apply"},
    ),
    "nxdi.block_kv_cache": Known(dropped=("LatentBlockKVCacheManager.get_cache",)),
    "nxdi.attention": Known(
        values={
            "neuron.kernels": False,
            "self.kernel": None,
            "kind": "",
            "self.tiles": None,
            "in_tiles": False,
            "self.block": None,
            "self.tiles_alone": False,
            "w_uv is None": False,
            "one": False,
        },
        parameters={"early": None, "moe": False, "adapter_ids": None, "decode": False},
        dropped=("KimiK2Attention._in_one_kernel", "KimiK2Attention._with_present"),
        reworded={
            "tuple[Tensor, Tensor | None]": "tuple[Tensor, Tensor]",
            "[h, nope, rank] and [h, v, rank]; the second is None where it lies in tiles alone.": (
                "[h, nope, rank] and [h, v, rank]."
            ),
            "w_uv: Tensor | None": "w_uv: Tensor",
            "project(self.q_b_proj, normed, adapter_ids)": "self.q_b_proj(normed)",
            "project(self.o_proj, values, adapter_ids)": "self.o_proj(values)",
            "        if projected is None:\n            projected = self.qkv_a_proj(hidden_states)\n": (
                "        projected = self.qkv_a_proj(hidden_states)\n"
            ),
            "        projected: Tensor | None = None,\n": "",
            "[B, S, H], normed; with sequence parallelism [B, S / ranks, H], as is the output. Where the\n"
            "                down projections are `projected` its values are not looked at.": (
                "[B, S, H], normed; with sequence parallelism [B, S / ranks, H], as is the output."
            ),
            "\n            projected: [B, S, q_lora_rank + cache_dim], the down projections where they are known.": "",
        },
    ),
    "nxdi.experts": Known(
        values={"self.tiles": None, "self.shared_experts": None, "self.kernel": None},
        parameters={"tiles": None, "kernel_cores": 0, "shared_width": 0, "shared_tiles": None, "early": None},
        dropped=(
            "over_experts",
            *(
                f"KimiK2ExpertMLPs.{name}"
                for name in (
                    "forward_early",
                    "_selective",
                    "_on_kernel",
                    "_with_early_shared",
                    "forward_kernel",
                    "local_affinities",
                    "_with_shared",
                )
            ),
        ),
        reworded={
            "self.tiles, self.block, self.early = tiles, block, early": "self.block = block",
            """self._with_shared(
                self.forward_selective(hidden_states, expert_affinities, expert_index), hidden_states
            )""": "self.forward_selective(hidden_states, expert_affinities, expert_index)",
            "self._with_shared(out, hidden_states)\n\n    def _with_shared": "out\n\n    def _with_shared",
        },
    ),
    "nxdi.tiles": Known(dropped=("TileWeights.scales", "TiledExperts")),
    "nxdi.router": Known(
        values={"self._given": None, "self.kernel": None, "self.transposed": False},
        parameters={"kernel_cores": 0, "transposed": False},
        dropped=("KimiK2Router.given",),
    ),
    "nxdi.quantized": Known(values={"neuron_config.kernels": False}),
    "nxdi.checkpoint": Known(
        dropped=("_layout",),
        replaced={"_ranked": _RANKED},
        reworded={", **_layout(neuron_config)": ""},
    ),
    "nxdi.presharding": Known(
        parameters={"query_group": 0},
        reworded={"An interrupted run goes on where it stopped.": "An interrupted run begins again."},
    ),
    "nxdi.config": Known(
        values={
            "lora.check(self)": None,
            "lora.in_xla_form(decode, kwargs) != decode": False,
            "neuron.kernels": False,
            "self.query_group": 0,
            "self.kernels": False,
            "held.tiles": False,
        },
        parameters={"decode_layers_per_kernel": None},
        dropped=(
            "EXPERTS_OF_KERNEL",
            "KimiK2NeuronConfig.kernels",
            "KimiK2NeuronConfig.query_group",
            "KimiK2InferenceConfig.shared_width",
            "KimiK2InferenceConfig.shared_tiles",
            "KimiK2InferenceConfig._check_kernels",
        ),
        reworded={
            "self.decode, self.decode_layers_per_kernel = decode, decode_layers_per_kernel": "self.decode = decode",
            """`xla`: PyTorch operations. `kernels`: router, attention and experts on NKI
            kernels (the vendor's `nki` where it is importable, and in CPU mode its emulator), with the router's logits
            and the next layer's down projections in the all-reduces of what comes before them (early_router.py,
            early_qkv_a.py). `layers`: all MoE layers in one kernel with its collectives inside (decode_layers.py). The
            weights are those of `kimi-k2 convert --decode`. With `lora_config` it is always `xla`.""": (
                "`xla`, PyTorch operations."
            ),
        },
    ),
    "nxdi.options": Known(
        values={
            "_check_drafts(config)": None,
            "config.kernels": False,
            "config.tensor_capture_config is not None": False,
        },
        dropped=("FUSED_REFUSED", "_check_drafts"),
        reworded={
            "what NKI kernels at decode, and experts in tiles, do not follow;": "forms of decode that are not here;",
            '"kv_cache_batch_size", "lora_config", ': '"kv_cache_batch_size", ',
            '    "tensor_capture_config", "tkg_batch_size"': '    "tkg_batch_size"',
            '    "enable_eagle_speculation", "enable_fused_speculation", "flash_': '    "flash_',
            '"is_eagle3", "is_eagle_draft", "is_prefix_caching"': '"is_prefix_caching"',
            '"drafts come from an Eagle3 head inside the graph (is_eagle3), or beside it (speculation_length)"': (
                '"this folder\'s class has no draft in the graph; one beside it works, see speculation_length"'
            ),
            '    "is_full_model_shuffled"': '''    "enable_eagle_speculation": ((False,), _DRAFT),
    "enable_fused_speculation": ((False,), _DRAFT),
    "is_eagle3": ((False,), _DRAFT),
    "is_eagle_draft": ((False,), _DRAFT),
    "is_full_model_shuffled"''',
            '    "medusa_speculation_length"': '''    "lora_config": ((None,), "this folder's class has no adapters"),
    "tensor_capture_config": ((None,), "this folder's class captures nothing in CPU mode, so it was not tried"),
    "medusa_speculation_length"''',
        },
    ),
    "nxdi.mlp": Known(values={"config.neuron_config.kernels": False}, parameters={"following": None}),
    "nxdi.modeling_kimi_k2": Known(
        values={
            "fused": None,
            "reads": False,
            "self.aux_layers": (),
            "self.neuron_config.enable_fused_speculation": False,
            "self.neuron_config.is_eagle_draft": False,
            "self.neuron_config.kernels": False,
            "self.neuron_config.lora_config": None,
            "self.neuron_config.tensor_capture_config": None,
            "config.shared_width": 0,
            "kernel_cores": 0,
            "self.early_router": None,
            "self.early_qkv_a": None,
            "projected": None,
            "self.whole": None,
            "sizes": None,
            "early": None,
            "shared_width": 0,
            "tiles": None,
        },
        parameters={
            "early": None,
            "following": None,
            "whole": None,
            "tensor_rank": None,
            "decode": False,
            "idx": 0,
            "projected": None,
            "kernel_cores": 0,
            "states": None,
            "transposed": False,
            "tiles": None,
            "shared_tiles": None,
            "shared_width": 0,
        },
        dropped=(
            "plain_mlp_width",
            "NeuronKimiK2Model._sample_on_device",
            "NeuronKimiK2ForCausalLM._load_fused",
        ),
        reworded={
            "        Beside converted files of the target, which know no draft, a head is cut as it is loaded.\n\n": "",
            "        `states` takes what a draft reads of the residual around this layer, number `idx`.\n": "",
            """ own.

        Raises:
            ConfigError: fused speculation without a draft, or a draft's own settings.
        \"\"\"""": ' own."""',
            "KimiK2Attention(config, hf.is_moe_layer(layer))": "KimiK2Attention(config)",
            "KimiK2MoE": "MoE",
            "from .early_qkv_a import EarlyProjections, Following, MoE": (
                "from neuronx_distributed.modules.moe.model import MoE"
            ),
        },
    ),
}
