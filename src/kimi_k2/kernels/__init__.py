"""Fast operations for Hopper GPUs, chosen by shape, dtype and device; the plain model is always the fallback."""
