"""Makes this folder's `parser_cases` importable, which importlib mode does not do by itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
