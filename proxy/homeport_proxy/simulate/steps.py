"""A simulated engine that computes in steps, prefill in chunks beside the decode batch, as vLLM does by default."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from homeport_proxy.routing.cost import decode_step_s, fixed_s, prefill_s
from homeport_proxy.simulate.engine import Job, SimEngine


@dataclass(slots=True, eq=False)
class SteppedEngine(SimEngine):
    """A step yields one token of every sequence and prefills ``chunk_tokens`` at most, first come first served; nobody
    joins before it ends. Without a decode batch one prompt at a time: the first gains nothing by waiting for others.

    Steps without prefill are played in one stretch, which a new prompt cuts off at the next step's end.
    """

    prefilling: list[Job] = field(default_factory=list)
    left: dict[Job, int] = field(default_factory=dict)
    """Tokens that each sequence of the decode batch still has to yield."""
    joining: list[Job] = field(default_factory=list)
    """Sequences prefilled elsewhere, until the next step begins."""
    _chunks: list[tuple[Job, int]] | None = None
    """Prefill of the step under way; empty in a stretch of decoding, None when nothing runs."""
    _since_s: float = 0.0
    _step_s: float = 0.0
    _steps: int = 0

    def begin(self, now_s: float) -> float | None:
        """The next step, or a stretch of them; a stretch under way ends early when prompts wait."""
        if self._chunks is not None:
            if self._chunks or not (self.waiting or self.joining):
                return None
            steps = max(1, math.ceil((now_s - self._since_s) / self._step_s - 1e-9))
            if steps >= self._steps:
                return None
            self._steps = steps
            return self._planned()
        while self.joining:
            self._join(self.joining.pop())
        while self.waiting:
            job = self.waiting.popleft()
            job.computed_tokens = self._find_cached(job)
            self.prefilling.append(job)
        chunks = self._next_chunks()
        if not chunks and not self.left:
            return None
        self._chunks, self._since_s = chunks, now_s
        self._step_s = decode_step_s(self.rates, self.sequences, self.context_tokens) if self.left else 0.0
        self._steps = 1 if chunks else min(self.left.values())
        if chunks:
            work_s = self._noisy(sum(self._chunk_s(job, tokens) for job, tokens in chunks))
            self._worked(now_s, work_s, 1)
            self._step_s += work_s
        return self._planned()

    def _planned(self) -> float:
        self.serial += 1
        return self._since_s + self._steps * self._step_s

    def _next_chunks(self) -> list[tuple[Job, int]]:
        chunks: list[tuple[Job, int]] = []
        room = self.chunk_tokens
        for job in self.prefilling:
            if room <= 0 or (chunks and not self.left):
                break
            chunks.append((job, min(job.call.prompt_tokens - job.computed_tokens, room)))
            room -= chunks[-1][1]
        return chunks

    def _chunk_s(self, job: Job, tokens: int) -> float:
        work_s = prefill_s(self.rates, tokens, job.computed_tokens)
        return work_s if job.computed_tokens == job.cached_tokens else work_s - fixed_s(self.rates)

    def end(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """The step or stretch is over: jobs whose prefill ended, jobs that yielded their last token."""
        chunks, self._chunks = self._chunks or [], None
        for job in self.left:
            self.left[job] -= self._steps
        prefilled = []
        for job, tokens in chunks:
            job.computed_tokens += tokens
            if job.computed_tokens >= job.call.prompt_tokens:
                self.prefilling.remove(job)
                self._use(job.call.keys)
                prefilled.append(job)
                if job.host is self and job.part_of is None:
                    self._join(job)
        finished = [job for job, left in self.left.items() if left <= 0]
        for job in finished:
            del self.left[job]
        return prefilled, finished

    def _join(self, job: Job) -> None:
        job.decoding = True
        self.left[job] = job.call.output_tokens - 1
        self.sequences += 1
        self.context_tokens += job.call.prompt_tokens

    def start_decode(self, job: Job, now_s: float) -> None:
        """A sequence whose first token is there joins the batch, if it did not with the step that prefilled it."""
        if not job.decoding:
            self.joining.append(job)

    def crash(self) -> None:
        """Everything in memory is gone."""
        SimEngine.crash(self)
        self.prefilling.clear()
        self.joining.clear()
        self.left.clear()
        self._chunks = None
