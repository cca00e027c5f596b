"""The acceptance walk, position by position: what a drafted block was, what the target thought of it, what was kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflash_mcmc.engine.slots import Slot
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.speculator import Walk


class Tracer:
    """Collects the walks of all rows, each for its chain."""

    def keep(self, walk: Walk, slots: Sequence[Slot]) -> None:
        """Adds one entry to every slot whose row has gained a token. Waits for the device."""
        log_p = rules.target_log_p(walk.block)
        log_q = rules.draft_log_q(walk.block) if walk.block.draft is not None else None
        columns = [x.cpu().tolist() for x in (
            walk.anchor, walk.block.drafted, walk.verdict.accepted, walk.verdict.tokens, walk.gained, walk.uniforms.tokens,
            log_p)]
        accepting, draft = walk.uniforms.accepting.cpu().tolist(), None if log_q is None else log_q.cpu().tolist()
        for row, (slot, anchor, drafted, accepted, tokens, gained, uniforms, p) in enumerate(
                zip(slots, *columns, strict=False)):
            if gained:
                slot.walk.append({
                    "anchor": anchor - len(slot.operation.trajectory.prompt), "drafted": drafted,
                    "log_p": [_number(value) for value in p], "log_q": None if draft is None else draft[row],
                    "accepting": accepting[row] or None, "uniforms": uniforms, "accepted": accepted,
                    "tokens": tokens[: accepted + 1], "gained": gained})


def _number(log_p: float) -> float | None:
    """None for a token that the law does not allow: JSON has no infinities."""
    return log_p if math.isfinite(log_p) else None
