"""What the columns of the probe's tables and the values of its summary mean.

A reader is `target`, or a mode of the draft: `mask`, `gold`, `random`, `reinject`.
"""

_MODE = {"mode": "how the draft reads the block: `mask` (as in drafting), `gold` (with the gold tokens before each position), "
                 "`random` (with noise instead of the target's features), `reinject` (with the prompt's features again)"}
_RANK = "of a gold token among all tokens by logit, from 1 (best)"
_N = {"n": "tokens of the row"}
_WINS = {
    "rank_draft_wins": "share of tokens with a strictly better rank under the draft than under the target",
    "p_draft_wins": "share of tokens with a strictly higher probability under the draft than under the target",
}
_CURVE = {
    "reader": "`target`, or a mode of the draft",
    "mean_rank": f"mean rank {_RANK}",
    "geometric_mean_rank": "geometric mean of these ranks",
    "mean_p": "mean probability of the gold tokens",
    **_N,
}

MEANINGS = {
    "values": {
        "num_problems": "measured answers",
        "num_skipped": "answers with nothing to measure, or with logits that are not numbers",
        "num_tokens": "compared tokens",
        "num_low_confidence_tokens": "tokens that the target gives a probability below 0.01",
        "mean_rank_{reader}": "mean rank of all compared tokens for this reader",
        "mean_p_{reader}": "mean probability of all compared tokens for this reader",
        "{signal}_factor": "`factor` of the signal in `decomposition` (features, gold, reinject, target), over all tokens",
        "{signal}_factor_low_confidence": "the same over the tokens that the target gives a probability below 0.01",
    },
    "overall": {
        **_MODE,
        "mean_p_target": "mean probability of the gold tokens under the target",
        "mean_p_draft": "mean probability of the gold tokens under the draft",
        "mean_rank_target": f"mean rank {_RANK}, under the target",
        "mean_rank_draft": "mean rank under the draft",
        "median_rank_target": "median rank under the target",
        "median_rank_draft": "median rank under the draft",
        **_WINS, **_N,
    },
    "confidence": {
        "p_target": "range of the target's probability of the token",
        **_MODE,
        "mean_rank_target": "mean rank under the target",
        "mean_rank_draft": "mean rank under the draft",
        **_WINS, **_N,
    },
    "decomposition": {
        "tokens": "`all`, or the tokens that the target gives a probability below 0.01",
        "component": "source of signal that is added",
        "computation": "modes that are compared: before -> after",
        "mean_rank": "mean rank with the added signal",
        "factor": "mean rank before divided by mean rank after; above 1 the signal helps",
        "factor_of_geometric_means": "the same for geometric means of ranks, which outliers move less",
        **_N,
    },
    "blocks": {
        "block": "number of the block in the answer, from 0, or a range of numbers",
        "context_positions": "mean number of positions before the block that the draft sees",
        "rank_{reader}": "mean rank for this reader",
        **_N,
    },
    "reinjection": {
        "blocks": "whether the blocks of the row see the prompt's features again",
        "mean_rank_{reader}": "mean rank for this reader",
        "factor": "mean rank in the mode `mask` divided by that in the mode `reinject`",
        "factor_of_geometric_means": "the same for geometric means of ranks",
        "rank_improved": "share of tokens with a better rank in the mode `reinject`",
        "rank_worsened": "share of tokens with a worse rank in the mode `reinject`",
        **_N,
    },
    "parameters": {
        "component": "part of target or draft",
        "parameters": "number of its parameters",
        "of_target_layers": "this number divided by that of the target's layers",
        "role": "what the part does",
    },
    "configuration": {
        "dataset": "name of the dataset",
        "answers": "`probe.answers`",
        "context": "`probe.context`",
        "reinject_every": "`probe.reinject_every`",
        "seed": "`seed`",
        "target_parameters": "parameters of the target; a head that is the embedding counts once",
        "draft_parameters": "parameters of the draft without the target's embedding and head",
        "hidden_size": "width of both",
        "target_layers": "layers of the target",
        "draft_layers": "layers of the draft",
        "reads_layers": "layers of the target that the draft reads, from 0",
        "block_size": "tokens of a block, with the known one",
        "problems": "measured answers",
        "skipped": "answers that were left out",
        "blocks": "measured blocks",
        "tokens": "compared tokens",
    },
    "block_curves": {
        "first_block": "first block of the group, from 0",
        "last_block": "last block of the group",
        **_CURVE,
    },
    "position_curves": {
        "from": "smallest number of positions before the block in this bin",
        "to_below": "end of the bin, exclusive",
        **_CURVE,
    },
}
