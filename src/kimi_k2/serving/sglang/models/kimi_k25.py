"""K2.5 as a model of SGLang: its vision tower and processor, with our model of the text."""

from __future__ import annotations

from typing import Any

from sglang.srt.models import kimi_k25

from kimi_k2.serving.sglang.models.kimi_k2 import DeepseekV3ForCausalLM


class KimiK25ForConditionalGeneration(kimi_k25.KimiK25ForConditionalGeneration):  # type: ignore[misc]
    """SGLang's class, which makes its text model by a name of its module."""

    def __init__(self, *args: Any, **named: Any) -> None:
        stock = kimi_k25.DeepseekV3ForCausalLM
        kimi_k25.DeepseekV3ForCausalLM = DeepseekV3ForCausalLM
        try:
            super().__init__(*args, **named)
        finally:
            kimi_k25.DeepseekV3ForCausalLM = stock


EntryClass = KimiK25ForConditionalGeneration
