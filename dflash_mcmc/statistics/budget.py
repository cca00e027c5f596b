"""The words that the plan of a budget and its report share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_mcmc.statistics.outcomes import Cost

TOLERANCE = 0.25
"""The largest share of a budget by which the cost of an answer may differ from it and still be compared at this budget."""
UNITS: dict[str, Cost] = {"token_forwards": "token_forwards", "seconds": "share_seconds"}
"""The field of a record that holds the cost, by the value of `budget_unit`."""
