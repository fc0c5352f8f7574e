"""Kimi-K2 for NxD Inference: the hand-written contrib model (`kimi_k2.contrib_model`) with what more there is."""
