"""Which release a kernel is held to, and what passes; all is an error unless a test of others' kernels says not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """Switches.

    Attributes:
        spills_allowed: tiles that the compiler places may exceed SBUF or PSUM; it would move some to HBM and back
            (memory-hierarchy-overview.rst).
        races_allowed: two cores may write the same memory without a barrier.
        unwritten_allowed: memory that nothing has written may be read; it holds NaN, or all ones in integers.
        release: of NKI, such as "0.3", whose rules hold for arguments, results and views; None: of those that only some
            releases have, none. `nki_emulator.check` holds the kernel's source to a release.
    """

    release: str | None = None
    unwritten_allowed: bool = False
    spills_allowed: bool = False
    races_allowed: bool = False


settings = Settings()


def before(release: str) -> bool:
    """Whether kernels are held to a release before this one."""
    return settings.release is not None and float(settings.release) < float(release)
