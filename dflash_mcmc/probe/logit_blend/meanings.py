"""What the columns of the probe's tables and the values of its summary mean.

A blend has logits (1 - beta) * target + beta * source. A token is hard if the target gives it less than `probe.hard_below`.
"""

_ROWS = {
    "source": "what is blended: `layer` (the head on a layer's output), `draft`, or `flattened` (all logits 0), the control",
    "layer": "number of the layer, from 0",
    "beta": "share of the source in the blend",
    "gain": "mean of log p under the blend minus log p under the target, nats",
    "wins": "share of tokens whose log p is larger under the blend",
    "rank_wins": "share of tokens whose rank is better under the blend",
    "rank_losses": "share of tokens whose rank is worse under the blend",
    "gain_over_flattened": "mean of log p under the blend minus log p under the flattened target with this beta, nats",
    "n": "tokens of the row",
}

MEANINGS = {
    "values": {
        "num_skipped": "answers with nothing to measure, or with logits that are not numbers",
        "num_tokens": "tokens of all answers",
        "num_hard": "hard tokens",
        "best/source": "source with the largest `gain` on hard tokens, chosen on these tokens",
        "flattened/source": "always `flattened`",
        "{which}/beta": "beta of the best setting of this source",
        "{which}/gain": "its `gain` on hard tokens, nats",
        "{which}/wins": "its `wins` on hard tokens, share",
        "{which}/wins_over_flattened": "its `wins_over_flattened` on hard tokens, share",
    },
    "grid": _ROWS,
    "hard": {
        **_ROWS,
        "wins_over_flattened": "share of tokens whose log p is larger under the blend than under the flattened target",
        "wins_minus_losses": "share of wins minus share of losses in log p",
        "rank_wins_minus_losses": "share of better ranks minus share of worse ranks",
    },
    "easy": _ROWS,
}
