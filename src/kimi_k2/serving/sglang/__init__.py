"""Plugins of SGLang; `plugin.register` is the entry point."""
