"""An emulator of NKI (Neuron Kernel Interface) in NumPy: kernels for Trainium2 run, and are checked, without one.

`install()` makes `nki`, `nki.isa`, `nki.language` and `nki.collectives` importable where the real ones are not. What is
documented, what is not and was inferred, and what is absent: README.md.
"""

from nki_emulator.install import install

__all__ = ["install"]
