"""Measurements: nothing here is a test, and no test depends on a time."""
