"""Synthetic checkpoints: shrunk configurations, deterministic random weights and vocabularies, in the real layout."""
