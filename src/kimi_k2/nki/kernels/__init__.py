"""Kernels of Kimi-K2's decode step in NKI, for Trainium2.

Each module imports `nki`: the vendor's, or the emulator after `nki_emulator.install()`.
"""

# Kernels that the NxDI class calls, and their modules.
MODULES = {
    "noaux_tc_router": "router",
    "noaux_tc_choice": "router",
    "mla_decode": "mla_decode",
    "attention_decode": "attention",
    "selective_experts": "experts",
    "decode_layers": "layers",
}
