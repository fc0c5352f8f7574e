"""The emulator stands in for `nki` before any kernel is imported."""

from nki_emulator import install

install()
