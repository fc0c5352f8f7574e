"""MLA attention: decode, prefill, and the launches around it at decode."""
