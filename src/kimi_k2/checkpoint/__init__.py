"""Checkpoints in Hugging Face's format: names, index, streaming reader and writer."""
