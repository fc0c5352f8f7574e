"""What lies between the GEMMs: norms, RoPE, cache entries, dequantization."""
