"""Run in a process of its own: serve requests that arrive while others are served; JSON in, JSON out.

`sglang_requests.py MODEL_DIR JOB RESULT`; the job is {dtype, requests: [[{prompt, new_tokens, arrival}]] by round,
options}, where arrival is in 60ths of a second after the round's start. The result is {tokens, cached} by round and
request, and by rank: {calls, steps}, where steps are [sequences with one new token, prompts] and calls are by operation
and entry.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kimi_k2.engine.batch import Batch

RECORD, PAGES = "KIMI_K2_TEST_RECORD", "KIMI_K2_TEST_PAGES"


def record_steps(path: str) -> None:
    """Have the model of this process, if it is to hold one, write what it has run after each step."""
    from kimi_k2.ops.registry import TABLE
    from kimi_k2.serving.paged.model import PagedModel

    run, steps = PagedModel.run, list[tuple[int, int]]()

    def recorded(self: PagedModel, x: Tensor, batch: Batch | None, *given: Any) -> Tensor:
        hidden = run(self, x, batch, *given)
        assert batch is not None
        steps.append((batch.decodes, len(batch.seq_lens) - batch.decodes))
        calls = {
            name: {entry.name: entry.calls for entry in (*operation.entries, operation.plain)}
            for name, operation in TABLE.items()
        }
        rank = self.loader.rank
        written = Path(f"{path}.{rank}.new")
        written.write_text(json.dumps({"calls": calls, "steps": steps}))
        written.replace(f"{path}.{rank}")
        return hidden

    PagedModel.run = recorded  # type: ignore[method-assign, assignment]


def take_pages(size: int) -> None:
    """Have SGLang and our plugin take pages of this size on a CPU, in the engine's processes too."""
    from sglang.srt.mem_cache import allocation

    from kimi_k2.serving.sglang import support

    os.environ[PAGES] = str(size)
    support.PAGES_ON_CPU = (size,)
    allocation.get_last_loc_triton = allocation.get_last_loc_torch  # what it takes with its own backend for a CPU


async def serve(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to one round's requests."""

    async def ask(request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(request["arrival"] / 60)
        sampling = {"temperature": 0, "max_new_tokens": request["new_tokens"], "ignore_eos": True}
        answer: dict[str, Any] = await engine.async_generate(input_ids=request["prompt"], sampling_params=sampling)
        return answer

    return list(await asyncio.gather(*map(ask, requests)))


def main(model: str, job_file: str, result_file: str) -> None:
    import sglang

    os.environ[RECORD] = f"{result_file}.rank"
    job = json.loads(Path(job_file).read_text())
    if "page_size" in job["options"]:
        take_pages(job["options"]["page_size"])
    options = {"max_total_tokens": 4096, "context_length": 512, "max_running_requests": 4, **job["options"]}
    engine = sglang.Engine(
        model_path=model, device="cpu", dtype=job["dtype"], skip_tokenizer_init=True, log_level="info", **options
    )
    rounds = [engine.loop.run_until_complete(serve(engine, requests)) for requests in job["requests"]]
    ranks = [json.loads(path.read_text()) for path in sorted(Path(result_file).parent.glob("*.rank.[0-9]"))]
    result = {
        "tokens": [[answer["output_ids"] for answer in answers] for answers in rounds],
        "cached": [[answer["meta_info"]["cached_tokens"] for answer in answers] for answers in rounds],
        "ranks": ranks,
    }
    Path(result_file).write_text(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
elif __name__ == "__mp_main__" and RECORD in os.environ:  # a process of the engine's
    record_steps(os.environ[RECORD])
    if PAGES in os.environ:
        take_pages(int(os.environ[PAGES]))
