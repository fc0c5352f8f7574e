"""Virtual registers: scalars of the engines' sequencers, for addresses and loop bounds."""

from __future__ import annotations

from nki_emulator.errors import UnwrittenError


class VirtualRegister:
    """A register; its value is not known while a kernel is traced, so Python may not branch on it."""

    def __init__(self, value: int | None = None) -> None:
        self._value = value

    @property
    def value(self) -> int:
        """What the register holds."""
        if self._value is None:
            raise UnwrittenError("nki.isa.VirtualRegister", "register", "is written before it is read")
        return self._value

    @value.setter
    def value(self, value: int) -> None:
        self._value = value

    def __bool__(self) -> bool:
        raise TypeError("a register's value is not known while the kernel is traced: use nl.fori_loop or nl.while_loop")

    def __int__(self) -> int:
        raise TypeError("a register's value is not known while the kernel is traced: use nl.fori_loop or nl.while_loop")

    __index__ = __int__
