"""Routed experts: blockwise FP8 and INT4 (W4A16), for few tokens and many."""
