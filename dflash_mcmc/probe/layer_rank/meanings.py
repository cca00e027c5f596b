"""What the columns of the probe's tables and the values of its summary mean. A rank is by logit and begins at 1 (best)."""

_LAYERS = {
    "source": "`layer` (the head on a layer's output), `target`, `draft`, or `target where drafted`: the target on the tokens "
              "that the draft predicts",
    "layer": "number of the layer, from 0",
    "norm": "`none`: the raw output; `final`: after the target's final norm",
    "mean_rank": "mean rank of the answer's tokens",
    "median_rank": "median rank of the answer's tokens",
    "mean_log_p": "mean log-probability of the answer's tokens, nats",
    "share_rank_1": "share of tokens with rank 1",
    "agreement": "share of tokens at which the most likely token is also the target's",
    "n": "tokens of the row",
}
_NORMS = {
    "layer": "number of the layer, from 0",
    "mean_rank_raw_over_normed": "raw mean rank divided by the mean rank after the final norm; above 1 the norm helps",
    "share_better_raw": "share of tokens with a better rank without the norm",
    "share_better_normed": "share of tokens with a better rank after the norm",
    "n": "tokens of the row",
}

MEANINGS = {
    "values": {
        "num_skipped": "answers with nothing to measure, or with logits that are not numbers",
        "num_tokens": "tokens of all answers",
        "num_hard": "hard tokens: those that the target gives a probability below `probe.hard_below`",
        "chance_rank": "mean rank of a token in a random order",
        "published_layer/{norm}/mean_rank": "mean rank for the third layer from the end, raw (`none`) and normed (`final`)",
        "published_layer/{norm}/median_rank": "its median rank",
        "{source}/mean_rank": "mean rank for target, draft, and target where drafted",
        "{source}/median_rank": "its median rank",
    },
    "layers": _LAYERS,
    "hard_layers": _LAYERS,
    "norms": _NORMS,
    "hard_norms": _NORMS,
}
