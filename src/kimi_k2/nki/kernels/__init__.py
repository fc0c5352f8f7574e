"""Kernels of Kimi-K2's decode step in NKI, for Trainium2.

Each module imports `nki`: the vendor's, or the emulator after `kimi_k2.nki.install()`.
"""
