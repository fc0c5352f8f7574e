"""Layers with adapters over batches as engines make them: of each sequence the plain model with its own merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapters import merge, write_adapter
from safetensors.torch import load_file
from test_paged_layer import LENGTHS, STEPS, Layers
from torch import Tensor

from kimi_k2.model.decoder import DecoderLayer, KimiK2ForCausalLM
from kimi_k2.serving.paged.adapted import EXPERTS, PROJECTIONS, AdaptedStep, Adapters, LowRank

SLOTS, RANK = 3, 6
HELD = {1: 2, 2: 0}  # the slot of the second and the third sequence; the first has no adapter


def zeros(rows: int, columns: int, *experts: int) -> LowRank:
    return LowRank(torch.zeros(SLOTS, *experts, RANK, columns), torch.zeros(SLOTS, *experts, RANK, rows))


class Adapted(Layers):
    """With adapters in slots, each of them in a directory."""

    def __init__(self, model: KimiK2ForCausalLM, directories: dict[int, Path]) -> None:
        super().__init__(model)
        self.adapters = Adapters(SLOTS, torch.empty(0))
        for number, layer in enumerate(model.model.layers):
            assert isinstance(layer, DecoderLayer)
            added: dict[str, LowRank] = {}
            experts: dict[str, LowRank] = {}
            touched: set[int] = set()
            for slot, directory in directories.items():
                about = json.loads((directory / "adapter_config.json").read_text())
                tensors = load_file(directory / "adapter_model.safetensors")
                prefix = f"base_model.model.model.layers.{number}."
                for name, a in tensors.items():
                    if not name.startswith(prefix) or ".lora_A." not in name:
                        continue
                    b = tensors[name.replace(".lora_A.", ".lora_B.")] * (about["lora_alpha"] / about["r"])
                    module = name.removeprefix(prefix).removesuffix(".lora_A.weight")
                    sizes = len(b), a.shape[1]
                    if not module.startswith(f"{EXPERTS}."):
                        added.setdefault(module, zeros(*sizes)).put(slot, a, b)
                        continue
                    expert, projection = module.removeprefix(f"{EXPERTS}.").split(".")
                    touched.add(slot)
                    held = experts.setdefault(projection, zeros(*sizes, model.config.n_routed_experts))
                    held.expert(int(expert)).put(slot, a, b)
            assert experts.keys() in ({}.keys(), set(PROJECTIONS))
            self.steps[number] = AdaptedStep(layer, lambda x: x, self.adapters, added, experts, touched)

    def step(self, new: dict[int, int], ids: list[Tensor], padding: int) -> dict[int, Tensor]:
        host = [HELD.get(row, -1) for row, count in new.items() for _ in range(count)]
        self.adapters.tell(host, torch.tensor([*host, *[1] * padding]))  # behind them what the buffer held
        return super().step(new, ids, padding)


@pytest.mark.parametrize("name", ["bf16", "thinking"])
def test_each_sequence_has_its_own(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """One adapter touches everything that may be, the other all but routed experts; one sequence has none."""
    model = KimiK2ForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32)
    rows = {
        1: write_adapter(model, tmp_path / "all", 6, 1),
        2: write_adapter(model, tmp_path / "s", 4, 2, experts=False),
    }
    ids = [torch.randint(10, model.config.vocab_size, (length,)) for length in LENGTHS]
    with torch.inference_mode():
        layers = Adapted(model, {HELD[row]: directory for row, directory in rows.items()})
        found = [list[Tensor]() for _ in LENGTHS]
        for number, new in enumerate(STEPS):
            for row, states in layers.step(new, ids, padding=number % 3).items():
                found[row].append(states)
        base = []
        for row, sequence in enumerate(ids):
            plain = KimiK2ForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32)
            given = sequence.unsqueeze(0), torch.arange(len(sequence)).unsqueeze(0), None, len(sequence)
            base.append(plain.model(*given)[0])
            if row in rows:
                merge(plain, rows[row])
            wanted = plain.model(*given)[0]
            assert torch.allclose(base[-1], wanted, rtol=0, atol=0.01) == (row not in rows)
            torch.testing.assert_close(torch.cat(found[row]), wanted, rtol=0, atol=5e-5 * float(wanted.abs().max()))
