"""Kernels of Kimi-K2's decode step in NKI, for Trainium2.

Each module imports `nki`: the vendor's, or the emulator after `nki_emulator.install()`.
"""

# Kernels that the classes for Neuron call, and their modules.
MODULES = {
    "decode_layers": "layers",
    "decode_layer": "layers",
    "write_pages": "cache_write",
}
