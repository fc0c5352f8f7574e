"""Plugins of vLLM; `plugin.register` is the entry point."""
