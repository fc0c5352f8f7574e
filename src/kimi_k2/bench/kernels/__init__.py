"""Timings of the fast operations against the ceilings measured beside them."""
