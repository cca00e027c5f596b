"""The trace of speculation: for each drafted block its tokens, their probabilities, and the tokens that were kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflash_mcmc.engine.batching.chains import Slot
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.speculator import Speculator


class Tracer:
    """Collects a trace entry for each block of each chain.

    Args:
        speculator: its `walk` describes the latest step.
    """

    def __init__(self, speculator: Speculator):
        self._speculator = speculator

    def keep(self, slots: Sequence[Slot]) -> None:
        """Adds one entry to every slot whose row has gained a token in the latest step. Waits for the device."""
        walk, self._speculator.walk = self._speculator.walk, None  # the next step may verify no block
        if walk is None:
            return
        log_p = rules.target_log_p(walk.block)
        log_q = rules.draft_log_q(walk.block) if walk.block.draft is not None else None
        columns = [x.cpu().tolist() for x in (
            walk.anchor, walk.block.drafted, walk.verdict.accepted, walk.verdict.tokens, walk.gained, walk.uniforms.tokens,
            log_p)]
        offered = None if walk.block.offered is None else walk.block.offered.cpu().tolist()
        accepting, draft = walk.uniforms.accepting.cpu().tolist(), None if log_q is None else log_q.cpu().tolist()
        for row, (slot, anchor, drafted, accepted, tokens, gained, uniforms, p) in enumerate(
                zip(slots, *columns, strict=False)):
            if gained:
                slot.walk.append({
                    "anchor": anchor - len(slot.operation.trajectory.prompt), "drafted": drafted,
                    "log_p": [_number(value) for value in p], "log_q": None if draft is None else draft[row],
                    "accepting": accepting[row] or None, "uniforms": uniforms, "accepted": accepted,
                    "tokens": tokens[: accepted + 1], "gained": gained,
                    **({} if offered is None else {"offered": offered[row]})})


def _number(log_p: float) -> float | None:
    """None for a token of probability zero: JSON has no infinities."""
    return log_p if math.isfinite(log_p) else None
