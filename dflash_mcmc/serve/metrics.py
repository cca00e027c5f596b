"""Counters of the server in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

import bisect
import threading
from collections import Counter

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_HELP = {
    "requests_total": "Requests by path and status.",
    "answers_total": "Drawn answers, by reason of their end.",
    "prompt_tokens_total": "Tokens of prompts.",
    "generated_tokens_total": "Tokens of answers.",
    "token_forwards_total": "Positions at which the target was evaluated.",
    "proposals_total": "Metropolis-Hastings proposals.",
    "accepted_total": "Accepted proposals.",
    "moved_total": "Accepted proposals that differ from the sequence they replace.",
    "dropped_total": "Chains that ended early, because the client had gone or the time was over.",
    "engine_failures_total": "Failures of the engine."}


class Metrics:
    """Counters, which any thread may add to."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[tuple[str, str]]()
        self._buckets, self._seconds = [0] * (len(_BOUNDS) + 1), 0.0

    def add(self, name: str, amount: int = 1, labels: str = "") -> None:
        """Adds to a counter of `_HELP`. Labels are written as `path="/health",status="200"`."""
        with self._lock:
            self._counts[name, labels] += amount

    def took(self, seconds: float) -> None:
        """Adds a request to the histogram of times."""
        with self._lock:
            self._buckets[bisect.bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def text(self, gauges: dict[str, float]) -> str:
        """All counters, the histogram, and gauges by name."""
        with self._lock:
            counts, buckets, seconds = Counter(self._counts), list(self._buckets), self._seconds
        lines = []
        for name, meaning in _HELP.items():
            found = sorted((labels, count) for (known, labels), count in counts.items() if known == name) or [("", 0)]
            lines += [f"# HELP dflash_mcmc_{name} {meaning}", f"# TYPE dflash_mcmc_{name} counter"]
            lines += [f"dflash_mcmc_{name}{{{labels}}} {count}" if labels else f"dflash_mcmc_{name} {count}"
                      for labels, count in found]
        lines += ["# HELP dflash_mcmc_request_seconds Seconds from a request to the end of its answer.",
                  "# TYPE dflash_mcmc_request_seconds histogram"]
        upto = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), buckets, strict=True):
            upto += count
            lines.append(f'dflash_mcmc_request_seconds_bucket{{le="{bound}"}} {upto}')
        lines += [f"dflash_mcmc_request_seconds_sum {seconds:.6f}", f"dflash_mcmc_request_seconds_count {upto}"]
        for name, value in gauges.items():
            lines += [f"# TYPE dflash_mcmc_{name} gauge", f"dflash_mcmc_{name} {value:g}"]
        return "\n".join(lines) + "\n"
