"""`nki.isa`: instructions of NeuronCore-v3, one function each.

Contract: aws-neuron-sdk `nki/api/nki/isa/__init__.py` (NKI 0.7.0). Rules that it states are enforced, with the
operation, operand and rule in the error.
"""

from __future__ import annotations

from enum import Enum, EnumType
from typing import Any

from nki_emulator.errors import NkiError as NkiValidationError
from nki_emulator.errors import UnsupportedError
from nki_emulator.isa import constants, copies, dma, elementwise, gathers, matmul, reductions  # noqa: F401 - INSTRUCTIONS
from nki_emulator.isa.cores import get_nc_version, register_alloc
from nki_emulator.isa.operands import INSTRUCTIONS
from nki_emulator.registers import VirtualRegister

# Of NeuronCore-v4 (Trainium3), or of random numbers.
ABSENT = (
    "activate2", "dropout", "exponential", "nc_matmul_mx", "quantize_mx", "rand2", "rand_get_state", "rand_set_state",
    "rng", "set_rng_seed",
)  # fmt: skip
_OWN = {
    name: value for name, value in vars(constants).items() if getattr(value, "__module__", "") == constants.__name__
}
_ENUMERATIONS = {name: kind for name, kind in _OWN.items() if isinstance(kind, Enum | EnumType)}
globals().update(INSTRUCTIONS | _ENUMERATIONS)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    where = "of Trainium3 or of random numbers" if name in ABSENT else "unknown"
    raise UnsupportedError(f"nki.isa.{name}", "operation", "one of Trainium2 that the emulator has (README.md)", where)


__all__ = [
    "NkiValidationError", "VirtualRegister", "get_nc_version", "register_alloc", *INSTRUCTIONS, *_ENUMERATIONS,
]  # fmt: skip
