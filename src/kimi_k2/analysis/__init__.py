"""Counting what a configuration or a compiled graph costs: memory, bytes, operations, communication."""
