"""The emulator stands in for `nki` before any kernel is imported."""

from kimi_k2.nki import install

install()
