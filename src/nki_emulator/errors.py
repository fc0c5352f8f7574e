"""What a wrong kernel raises: each error names the operation, the operand and the rule."""

from __future__ import annotations


class NkiError(Exception):
    """A kernel breaks a rule of NKI or of the hardware.

    Attributes:
        operation: such as `nki.isa.nc_matmul`.
        operand: name of the argument at fault.
        rule: what the documentation demands.
    """

    def __init__(self, operation: str, operand: str, rule: str, actual: object = None) -> None:
        self.operation, self.operand, self.rule = operation, operand, rule
        super().__init__(f"{operation}: {operand}: {rule}" + ("" if actual is None else f"; got {actual}"))


class ShapeError(NkiError):
    """Sizes of a tile do not fit the instruction or each other."""


class PlaceError(NkiError):
    """An operand lies in a memory that the engine cannot reach, or at an address that it cannot start from."""


class DtypeError(NkiError):
    """An operand has a dtype that the instruction does not take."""


class CapacityError(NkiError):
    """More is alive in SBUF or PSUM than fits."""


class UnwrittenError(NkiError):
    """Memory is read that nothing has written."""


class OverwrittenError(NkiError):
    """A tile is read whose memory another tile at the same address has overwritten."""


class RaceError(NkiError):
    """Two cores touch the same memory, one of them writing, without a barrier between."""


class DeadlockError(NkiError):
    """A core waits for another that never comes."""


class UnsupportedError(NkiError, AttributeError):
    """Trainium2 does not have it, or the emulator does not."""
