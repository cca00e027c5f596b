"""The tables of the speculative MCMC probe, computed from its records. Section numbers are those of the document."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.speculative_mcmc.columns import Columns, Proposal, Speed
from dflash_mcmc.probe.speculative_mcmc.independence import acceptance_floor, chance_of_moves
from dflash_mcmc.statistics.intervals import IntervalEstimate

PERCENTILES = (5, 10, 25, 50, 75, 90, 95)
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.5, 0.7)
EASY, HARD = 0.7, 0.1
"""A block is easy if its acceptance is larger than EASY, and hard if it is smaller than HARD (section 3.2)."""


def summary(records: list[dict], num_samples: int, chain_steps: int, position_edges: Sequence[int],
            timed_rows: int) -> Summary:
    """All tables, and the data of the figures.

    Args:
        timed_rows: number of chains that propose at once in the reported timings; timings of other batches are left out.
    """
    columns = Columns(records)
    counts = {"num_problems": len(columns.records), "num_skipped": len(records) - len(columns.records),
              "num_blocks": columns.blocks.size, "num_predicted_tokens": columns.tokens.size,
              "acceptance_floor": acceptance_floor(num_samples)}
    if not columns.records:
        return Summary(counts, {}, {})
    sharpest = Proposal(columns.temperatures[-1], _last_weights(columns))
    values = {"token_acceptance": float(1.0 - columns.of_tokens(sharpest.name, "tvd").mean()),
              "block_acceptance": float(columns.of_blocks(sharpest, "acceptance").mean()),
              "block_acceptance_median": _median(columns, sharpest).value,
              "block_moved": float(columns.of_blocks(sharpest, "moved").mean()),
              "kl": float(columns.of_tokens(sharpest.name, "kl").mean())}
    tables = {
        "aggregate": [_aggregate(columns, proposal) for proposal in columns.proposals],
        "baseline": [_baseline(columns)],
        "percentiles": [_percentiles(columns, proposal) for proposal in columns.proposals],
        "thresholds": [_thresholds(columns, proposal) for proposal in columns.proposals],
        "positions": [row for proposal in columns.proposals for row in _positions(columns, proposal, position_edges)],
        "tokens": [_tokens(columns, name) for name in ("p", *columns.temperatures)],
        "convergence": [_convergence(columns, proposal, chain_steps) for proposal in columns.proposals],
        "weights": [_weights(columns, name) for name in columns.temperatures
                    if Proposal(name, "joint") in columns.proposals],
        "throughput": _throughput(columns, Speed(columns, timed_rows)),
        "strata": _strata(columns, Speed(columns, timed_rows)),
    }
    data = {"blocks": _blocks(columns), "token_acceptance": _token_acceptance(columns)}
    return Summary({**counts, **values}, {name: rows for name, rows in tables.items() if rows}, data)


def _last_weights(columns: Columns) -> str:
    return "joint" if Proposal(columns.temperatures[-1], "joint") in columns.proposals else "reference"


def _median(columns: Columns, proposal: Proposal) -> IntervalEstimate:
    """Median of the blocks' simulated acceptance. Like all quantiles here it is one of the observations."""
    return columns.blocks.quantiles(columns.of_blocks(proposal, "acceptance"), [0.5])[0]


def _aggregate(columns: Columns, proposal: Proposal) -> dict:
    """Section 3.1. Token distances do not depend on the weights of blocks, and the target has no distance to itself."""
    found: dict[str, IntervalEstimate] = {}
    if proposal.name != "target":
        found = {"kl": columns.tokens.mean(columns.of_tokens(proposal.name, "kl")),
                 "tvd": columns.tokens.mean(columns.of_tokens(proposal.name, "tvd")),
                 "token_acceptance": columns.tokens.mean(1.0 - columns.of_tokens(proposal.name, "tvd")),
                 "block_product": columns.blocks.mean(columns.products(proposal.name))}
    acceptance = columns.of_blocks(proposal, "acceptance")
    found |= {"acceptance": columns.blocks.mean(acceptance),
              "acceptance_median": _median(columns, proposal),
              **{name: columns.blocks.mean(columns.of_blocks(proposal, name))
                 for name in ("equilibrium", "moved", "log_w", "log_w_std", "effective")},
              "log_w_per_token": columns.blocks.mean(columns.of_blocks(proposal, "log_w") / columns.drafted)}
    return {**proposal.columns(), **_flat(found), "blocks": columns.blocks.size, **_tokens_of(columns, proposal)}


def _tokens_of(columns: Columns, proposal: Proposal, here: np.ndarray | None = None) -> dict[str, int]:
    """The number of tokens over which distances are computed; missing for the target, which has no distance to itself."""
    blocks = columns.blocks.size if here is None else int(here.sum())
    return {} if proposal.name == "target" else {"tokens": blocks * columns.drafted}


def _baseline(columns: Columns) -> dict:
    """Section 2.4: the draft at temperature 1 against p itself, its training objective."""
    tvd = columns.of_tokens("p", "tvd")
    return _flat({"kl": columns.tokens.mean(columns.of_tokens("p", "kl")), "tvd": columns.tokens.mean(tvd),
                  "token_acceptance": columns.tokens.mean(1.0 - tvd)}) | {"tokens": columns.tokens.size}


def _percentiles(columns: Columns, proposal: Proposal) -> dict:
    """Section 3.2: percentiles of the blocks' simulated acceptance."""
    found = columns.blocks.quantiles(columns.of_blocks(proposal, "acceptance"), [p / 100 for p in PERCENTILES])
    return {**proposal.columns(), **_flat(dict(zip((f"p{p}" for p in PERCENTILES), found, strict=True))),
            "blocks": columns.blocks.size}


def _thresholds(columns: Columns, proposal: Proposal) -> dict:
    """Section 3.2: shares of blocks above each threshold."""
    acceptance = columns.of_blocks(proposal, "acceptance")
    return {**proposal.columns(), **_flat({f"above_{round(100 * t)}_percent": columns.blocks.mean(acceptance > t)
                                           for t in THRESHOLDS}), "blocks": columns.blocks.size}


def _positions(columns: Columns, proposal: Proposal, edges: Sequence[int]) -> list[dict]:
    """Section 3.3: acceptance and KL of early, middle and late blocks."""
    rows = []
    early, late = columns.number < edges[0], columns.number >= edges[1]
    acceptance = columns.of_blocks(proposal, "acceptance")
    kl = None if proposal.name == "target" else columns.of_tokens(proposal.name, "kl").reshape(columns.blocks.size, -1)
    for name, here in (("early", early), ("mid", ~early & ~late), ("late", late)):
        if here.any():
            own = columns.blocks.among(here)
            found = {"acceptance": own.mean(acceptance[here]), "acceptance_median": own.quantiles(acceptance[here], [0.5])[0]}
            if kl is not None:
                found["kl"] = own.mean(kl[here].mean(axis=1))
            rows.append({**proposal.columns(), "position": name, **_flat(found), "blocks": int(here.sum()),
                         **_tokens_of(columns, proposal, here)})
    return rows


def _tokens(columns: Columns, name: str) -> dict:
    """Section 3.4: percentiles of the tokens' acceptance 1 - TVD; `p` is the unsharpened target at temperature 1."""
    levels = (5, 25, 50, 75, 95)
    found = columns.tokens.quantiles(1.0 - columns.of_tokens(name, "tvd"), [level / 100 for level in levels])
    return {"against": "p" if name == "p" else "p^alpha", "temperature": 1.0 if name == "p" else float(name),
            **_flat(dict(zip((f"p{level}" for level in levels), found, strict=True))), "tokens": columns.tokens.size}


def _convergence(columns: Columns, proposal: Proposal, steps: int) -> dict:
    """Section 4.3: probability that a chain moves at least once, or three times.

    The document uses the median acceptance in a binomial distribution (`median_*`). But blocks differ, and not every accepted
    proposal is a move. `blocks_*` therefore use the rate of moves of each block, and average the probability over blocks.
    """
    moved, median = columns.of_blocks(proposal, "moved"), _median(columns, proposal)
    row: dict[str, object] = {**proposal.columns(), "steps": steps}
    for least, name in ((1, "once"), (3, "three_times")):
        # The probability increases with the rate, so it maps the ends of the rate's interval to the ends of its own.
        row |= median.mapped(partial(chance_of_moves, steps=steps, least=least)).columns(f"median_{name}")
        own = np.array([chance_of_moves(rate, steps, least) for rate in moved])
        row |= columns.blocks.mean(own).columns(f"blocks_{name}")
    return {**row, "blocks": columns.blocks.size}


def _weights(columns: Columns, name: str) -> dict:
    """The differences between joint weights (given the drawn tokens) and reference weights."""
    def difference(column: str) -> np.ndarray:
        reference, joint = (columns.of_blocks(Proposal(name, weights), column) for weights in ("reference", "joint"))
        return joint - reference

    found = {"log_w": columns.blocks.mean(difference("log_w")), "log_w_std": columns.blocks.mean(difference("log_w_std")),
             "acceptance": columns.blocks.mean(difference("acceptance")),
             "acceptance_apart": columns.blocks.mean(np.abs(difference("acceptance"))),
             "moved": columns.blocks.mean(difference("moved"))}
    return {"temperature": float(name), **_flat({f"{key}_difference": value for key, value in found.items()}),
            "blocks": columns.blocks.size}


def _throughput(columns: Columns, speed: Speed) -> list[dict]:
    """Section 5.1, with measured speeds. The document assumed a speed of 8 and an acceptance for the target."""
    rows = []
    for proposal in columns.proposals if speed.num_timed else ():
        found = {"proposals_per_second": speed.proposals(proposal), "speed": speed.against_target(proposal)}
        for name, bought in (("acceptance", "accepts_per_second"), ("moved", "moves_per_second")):
            values = columns.of_blocks(proposal, name)
            found |= {name: columns.blocks.mean(values), bought: speed.bought(proposal, values)}
        rows.append({**proposal.columns(), **_flat(found), "blocks": columns.blocks.size, **speed.counts()})
    return rows


def _strata(columns: Columns, speed: Speed) -> list[dict]:
    """Section 5.2: easy, middle and hard blocks, by the acceptance of the draft at its lowest temperature."""
    sharpest = Proposal(columns.temperatures[-1], _last_weights(columns))
    acceptance = columns.of_blocks(sharpest, "acceptance")
    rows = []
    for name, here in (("easy", acceptance > EASY), ("middle", (acceptance <= EASY) & (acceptance >= HARD)),
                       ("hard", acceptance < HARD)):
        row: dict[str, object] = {"difficulty": name, **columns.blocks.mean(here).columns("share")}
        for proposal in (sharpest, Proposal("target", "joint")):
            if proposal in columns.proposals:
                kind = "target" if proposal.name == "target" else "draft"
                for column in ("acceptance", "moved"):
                    values = columns.of_blocks(proposal, column)
                    row |= columns.blocks.mean(values, here).columns(f"{kind}_{column}")
                    if speed.num_timed and here.any():
                        row |= speed.bought(proposal, values, here).columns(f"{kind}_{column}_per_second")
        rows.append({**row, "blocks": int(here.sum()), **(speed.counts() if speed.num_timed else {})})
    return rows


def _blocks(columns: Columns) -> list[dict]:
    return [{**proposal.columns(), "number": int(number), "acceptance": float(acceptance), "moved": float(moved)}
            for proposal in columns.proposals
            for number, acceptance, moved in zip(columns.number, columns.of_blocks(proposal, "acceptance"),
                                                 columns.of_blocks(proposal, "moved"), strict=True)]


def _token_acceptance(columns: Columns) -> list[dict]:
    """The share of tokens whose acceptance is at most each of 101 values."""
    places = np.linspace(0.0, 1.0, 101)
    rows = []
    for name in ("p", *columns.temperatures):
        ordered = np.sort(1.0 - columns.of_tokens(name, "tvd"))
        shares = np.searchsorted(ordered, places + 1e-9, side="right") / len(ordered)
        rows += [{"against": "p" if name == "p" else "p^alpha", "temperature": 1.0 if name == "p" else float(name),
                  "acceptance": float(place), "share": float(share)} for place, share in zip(places, shares, strict=True)]
    return rows


def _flat(estimates: dict[str, IntervalEstimate]) -> dict[str, float | None]:
    return {key: value for name, estimate in estimates.items() for key, value in estimate.columns(name).items()}
