"""What the columns of the probe's tables and the values of its summary mean. A cell is one setting of the grid."""

_SETTING = {
    "alpha": "power of the target, p^alpha",
    "temperature": "temperature of the proposal",
    "early_reject": "`sampler.early_reject`",
}
_WINDOW = {
    "window": "steps that count: `all`, `last_half`, or `last_stage` (the last stage of the sampler)",
    "fewest_steps": "smallest number of steps of a chain in the window",
    "most_steps": "largest number of steps of a chain in the window",
}
_RATES = {
    "acceptance": "share of proposals that are accepted",
    "moved_rate": "share of proposals that are accepted and differ from the state",
    "abandoned": "share of proposals that early rejection ends",
    "proposals": "proposals of the row",
}
_LAGS = {
    **_SETTING,
    "window": "as in `convergence`",
    "lag": "distance of two steps",
    "autocorrelation": "mean autocorrelation of log p at this lag, over chains that move",
    "independent": "value for independent draws in chains of this length",
    "chains": "chains that move",
    "stuck": "chains that keep one state in the window and have no autocorrelation",
}

MEANINGS = {
    "values": {
        "num_cells": "settings of the grid",
        "num_failed": "chains that could not be drawn",
        "{cell}acceptance": "see `cells`; of several cells, the name begins with one: `alpha=4/temperature=0.25/off/rhat`",
        "{cell}moved_rate": "see `cells`",
        "{cell}stuck": "see `convergence`, for the last half of the steps",
        "{cell}rhat": "see `convergence`, for the last half of the steps",
        "{cell}rhat_above_1.1": "see `convergence`, for the last half of the steps",
        "{cell}ess_per_1000_token_forwards": "see `effective_samples`, for the last half of the steps",
    },
    "cells": {
        **_SETTING, **_RATES,
        "identical": "share of proposals that equal the state",
        "log_p": "mean log p of the chains' last states, nats",
        "chains": "chains of the cell",
        "problems": "problems of the cell",
        "failed": "chains that could not be drawn",
    },
    "convergence": {
        **_SETTING, **_WINDOW,
        "stuck": "share of chains that keep one state in the window",
        "chains": "chains in the window",
        "all_stuck": "share of problems whose chains are all stuck",
        "problems": "problems whose chains have enough steps",
        "rhat": "median over problems of the rank-normalised split R-hat of log p; 1 means that the chains agree",
        "rhat_above_{limit}": "share of problems whose R-hat is larger",
        "independent_above_{limit}": "this share for independent draws in equally few chains and steps",
        "rhat_infinite": "share of problems whose chains have no variance within and some between",
        "rhat_problems": "problems whose R-hat is defined",
        "too_short": "problems that are left out because their chains have too few steps",
    },
    "effective_samples": {
        **_SETTING, **_WINDOW,
        "ess_per_step": "effective sample size of log p (bulk ESS) divided by the steps of all chains",
        "ess_per_1000_token_forwards": "effective sample size for 1,000 token-forwards of the whole chains",
        "problems": "problems whose chains have enough steps",
        "too_short": "problems that are left out because their chains have too few steps",
    },
    "autocorrelation": _LAGS,
    "by_cut": {**_SETTING, "cut": "range of the cut's place divided by the length of the state", **_RATES},
    "by_length": {**_SETTING, "suffix": "range of the number of tokens of the state that are drawn again", **_RATES},
    "log_ratios": {
        **_SETTING,
        "proposals": "which proposals: complete ones, complete ones that differ from the state, or all, where an abandoned "
                     "one counts with its upper bound",
        "P{level}": "percentile of the log acceptance ratio, nats",
        "n": "proposals of the row",
        "abandoned": "abandoned proposals among them",
    },
    "moves": {
        **_SETTING,
        "steps": "number n of last steps of a chain",
        "at_least": "number of moves",
        "share": "share of chains with at least so many moves in these steps",
        "by_acceptance": "the share if each of n independent steps moved with the mean acceptance",
        "by_moved_rate": "the share if each of n independent steps moved with the mean moved rate",
        "chains": "chains with at least n steps",
    },
    "cost": {
        **_SETTING,
        "complete_tokens": "mean tokens of a complete proposal",
        "complete": "complete proposals",
        "abandoned_tokens": "mean tokens of an abandoned proposal until its end",
        "abandoned": "abandoned proposals",
        "skipped_share": "share of tokens that are taken from the state without the target",
        "tokens": "tokens that this share is over",
        "token_forwards": "mean positions that the target evaluates for a chain",
        "target_forwards": "mean forward passes of the target for a chain",
        "chains": "chains of the cell",
    },
    "early_rejection": {
        **_SETTING,
        "tokens_drawn": "drawn tokens, divided by those of the same cell without early rejection",
        "token_forwards": "the same for positions that the target evaluates",
        "target_forwards": "the same for forward passes of the target",
        "same": "share of chains whose steps all agree with those without early rejection",
        "chains": "pairs of chains",
    },
    "autocorrelation_by_lag": _LAGS,
    "log_ratio_counts": {
        **_SETTING,
        "low": "lower end of the bin of log acceptance ratios, nats; empty for the open end",
        "high": "upper end of the bin",
        "identical": "proposals that equal the state",
        "different": "complete proposals that differ from the state",
        "abandoned": "abandoned proposals, at their upper bound",
    },
}
