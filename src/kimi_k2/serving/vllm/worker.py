"""vLLM's worker, with decode steps of ours where the batch has not changed; all else is vLLM's own worker."""

from __future__ import annotations

from typing import Any

import torch

from kimi_k2.serving.vllm.adapter import platform, unless_changed

if platform() == "cpu":
    from kimi_k2.serving.vllm.adapter import CPUWorker as Worker
else:
    from kimi_k2.serving.vllm.adapter import Worker  # type: ignore[no-redef]


class KimiK2Worker(Worker):  # type: ignore[misc]  # vLLM has no types for mypy here
    """For `ParallelConfig.worker_cls`; see `plugin`."""

    _steps: Any = None  # `DecodeSteps`; the module is imported late, as it stands on names that vLLM may lose

    def compile_or_warm_up_model(self) -> Any:
        """Behind vLLM's own graphs, those of decode steps."""
        done = super().compile_or_warm_up_model()
        with unless_changed("decode steps are prepared by vLLM"):
            from kimi_k2.serving.vllm.decode_steps import DecodeSteps, decode_steps
            from kimi_k2.serving.vllm.runner import Runner

            ours, runner, kind = self._ours(), Runner(self), DecodeSteps
            if runner.width > 1:
                from kimi_k2.serving.vllm.verify_steps import VerifySteps

                kind = VerifySteps
            if ours is not None:
                with torch.inference_mode():
                    self._steps = decode_steps(runner, ours, kind)
        return done

    def _ours(self) -> Any:
        """Our model in vLLM's; None without."""
        from kimi_k2.serving.vllm.model import _KimiK2
        from kimi_k2.serving.vllm.step import model_in

        return model_in(self, _KimiK2)

    def sleep(self, level: int = 1) -> None:
        """vLLM's, which at level 2 keeps no weights: no step runs before they have come again."""
        super().sleep(level)
        if level == 2 and platform() != "cpu" and (ours := self._ours()) is not None:
            ours.paged.loader.forget()

    @torch.inference_mode()
    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's; what comes back without its values holds zeros, as at start: masked values may be no NaN."""
        super().wake_up(tags)
        ours = None if platform() == "cpu" else self._ours()
        if ours is None:
            return
        if tags is None or "kv_cache" in tags:
            for layer in ours.held:
                layer.cache.view(torch.uint8).zero_()
        if (tags is None or "weights" in tags) and ours.paged.loader.emptied and ours.loras is not None:
            from kimi_k2.serving.vllm.step import forget_adapters

            ours.loras.forget()
            forget_adapters(self)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> Any:
        """A step; None where `sample_tokens` is to end it."""
        rows = None if self._steps is None else self._steps.rows(scheduler_output)
        if rows is None:
            return super().execute_model(scheduler_output)
        with self.annotate_profile(scheduler_output):
            self._steps.run(scheduler_output, rows)
        return None
