"""Arguments that launches over the new tokens' queries and cache entries at decode have in common."""

from __future__ import annotations

import ctypes

from kimi_k2.kernels.common.launch import fields

POINTERS = ("kv_norm", "cos", "sin", "slots", "w_uk", "cache", "out")
INTEGERS = ("tokens", "heads", "capacity", "kv_stride")


class EntryArguments(ctypes.Structure):
    """`decode::EntryArguments` of csrc/entry.cuh, field for field."""

    _fields_ = fields(POINTERS, INTEGERS, ["kv_eps"])
