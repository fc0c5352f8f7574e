"""vllm_requests.py, whose answer also has `files`: those of ours on the path of the requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import vllm_requests
from traced_files import traced

serve = vllm_requests.serve


def serve_traced(engine: Any, requests: list[dict[str, Any]], steps: int = 0) -> dict[str, Any]:
    """As `serve`."""
    with traced() as files:
        answer = serve(engine, requests, steps)
    return answer | {"files": sorted(files)}


if __name__ == "__main__":
    vllm_requests.serve = serve_traced
    vllm_requests.main(*sys.argv[1:4])
