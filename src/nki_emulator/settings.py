"""What the emulator lets pass; everything is an error unless a test of someone else's kernels says otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """Switches.

    Attributes:
        spills_allowed: tiles that the compiler places may exceed SBUF or PSUM; it would move some to HBM and back
            (memory-hierarchy-overview.rst). Counted in `Launch.spilled`.
        races_allowed: two cores may write the same memory without a barrier. Counted in `Launch.races`.
        unwritten_allowed: memory that nothing has written may be read; it holds NaN, or all ones in integers. Counted
            in `Launch.unwritten`.
    """

    unwritten_allowed: bool = False
    spills_allowed: bool = False
    races_allowed: bool = False


settings = Settings()
