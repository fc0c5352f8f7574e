"""Kimi's special tokens: 256 slots after the base vocabulary (163584 ranks in the published one)."""

from __future__ import annotations

NUM_SPECIAL_SLOTS = 256

BOS = "[BOS]"
EOS = "[EOS]"
EOT = "[EOT]"
UNK = "[UNK]"
PAD = "[PAD]"
IM_END = "<|im_end|>"
IM_USER = "<|im_user|>"
IM_ASSISTANT = "<|im_assistant|>"
IM_SYSTEM = "<|im_system|>"
IM_MIDDLE = "<|im_middle|>"
SECTION_BEGIN = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
THINK = "<think>"
THINK_END = "</think>"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
# No token of the published vocabulary: K2.5's template writes it, and its processor puts a video's frames in its place.
VIDEO_PLACEHOLDER = "<|kimi_k25_video_placeholder|>"

# Offset from the base vocabulary's size -> name; the other slots are reserved.
NAMED: dict[int, str] = {
    0: BOS,
    1: EOS,
    2: IM_END,
    3: IM_USER,
    4: IM_ASSISTANT,
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: EOT,
    10: IM_SYSTEM,
    11: SECTION_BEGIN,
    12: SECTION_END,
    13: CALL_BEGIN,
    14: ARGUMENT_BEGIN,
    15: CALL_END,
    17: IM_MIDDLE,
    18: MEDIA_BEGIN,
    19: MEDIA_CONTENT,
    20: MEDIA_END,
    21: MEDIA_PAD,
    22: THINK,
    23: THINK_END,
    254: UNK,
    255: PAD,
}


def special_tokens(base: int) -> dict[str, int]:
    """Name -> id of all 256 slots for a base vocabulary of `base` ranks; unnamed ones are `<|reserved_token_N|>`."""
    return {NAMED.get(i, f"<|reserved_token_{base + i}|>"): base + i for i in range(NUM_SPECIAL_SLOTS)}
