"""What the columns of the probe's tables and the values of its summary mean.

A proposal is a block of the draft, or of the target token by token. A simulated chain proposes `probe.num_samples` of them.
"""

_PROPOSAL = {
    "proposal": "`draft` or `target`",
    "temperature": "temperature of the draft; empty for the target, which draws from p^alpha token by token",
    "weights": "target's probabilities in log w: `joint` given the drawn tokens, `reference` given the measured answer's",
}
_BLOCKS = {"blocks": "blocks of the row"}
_TOKENS = {"tokens": "predicted tokens of the row; empty for the target, which has no distance to itself"}
_TIMED = {"timed_problems": "problems whose proposals were timed", "timed_rows": "chains that proposed at once"}
_TVD = "total variation distance of the draft from the sharpened target p^alpha"
_OF_BLOCKS = {
    "acceptance": "mean share of a simulated chain's proposals that are accepted",
    "acceptance_median": "median of this share over blocks",
}

MEANINGS = {
    "values": {
        "num_problems": "measured answers",
        "num_skipped": "answers with nothing to measure, or with logits that are not numbers",
        "num_blocks": "measured blocks",
        "num_predicted_tokens": "predicted tokens: all of a block but the known one",
        "acceptance_floor": "mean simulated acceptance of useless proposals, with so many samples",
        "token_acceptance": "mean of 1 - total variation distance over tokens, at the draft's lowest temperature",
        "block_acceptance": "mean simulated acceptance of its blocks",
        "block_acceptance_median": "median simulated acceptance of its blocks",
        "block_moved": "mean share of its proposals that are accepted and differ from the state",
        "kl": "mean KL(p^alpha || q) of a token at this temperature, nats",
    },
    "aggregate": {
        **_PROPOSAL,
        "kl": "mean KL divergence of p^alpha from the draft's law of a token, KL(p^alpha || q), nats",
        "tvd": f"mean {_TVD}, for a token",
        "token_acceptance": "mean of 1 - `tvd`",
        "block_product": "mean over blocks of the product of their tokens' acceptances",
        **_OF_BLOCKS,
        "equilibrium": "acceptance of a chain in equilibrium, from all pairs of samples",
        "moved": "mean share of proposals that are accepted and differ from the state",
        "log_w": "mean log importance weight of a proposal, nats",
        "log_w_std": "standard deviation of the log weights of a block, nats",
        "effective": "Kong's effective number of samples of a block",
        "log_w_per_token": "`log_w` divided by the tokens of a proposal, nats",
        **_BLOCKS, **_TOKENS,
    },
    "baseline": {
        "kl": "mean KL(p || q) of a token for the target p and the draft q, both at temperature 1, nats",
        "tvd": "mean total variation distance of the two",
        "token_acceptance": "mean of 1 - `tvd`",
        "tokens": "predicted tokens",
    },
    "percentiles": {**_PROPOSAL, "p{level}": "percentile of the blocks' simulated acceptance", **_BLOCKS},
    "thresholds": {**_PROPOSAL, "above_{percent}_percent": "share of blocks with a larger simulated acceptance", **_BLOCKS},
    "positions": {
        **_PROPOSAL,
        "position": "`early`, `mid` or `late` blocks of an answer, by `probe.position_edges`",
        **_OF_BLOCKS,
        "kl": "mean KL(p^alpha || q) of a token, nats",
        **_BLOCKS, **_TOKENS,
    },
    "tokens": {
        "against": "law that the draft is compared with: the sharpened `p^alpha`, or `p`",
        "temperature": "temperature of the draft",
        "p{level}": "percentile of the tokens' acceptance, 1 - total variation distance",
        "tokens": "predicted tokens",
    },
    "convergence": {
        **_PROPOSAL,
        "steps": "steps of a chain, `probe.chain_steps`",
        "median_{count}": "probability of one move, or of three, if every step moves with the median acceptance",
        "blocks_{count}": "the same with each block's own rate of moves, mean over blocks",
        **_BLOCKS,
    },
    "weights": {
        "temperature": "temperature of the draft",
        "log_w_difference": "mean of log w with joint weights minus log w with reference weights, nats",
        "log_w_std_difference": "this difference for the standard deviation of log w, nats",
        "acceptance_difference": "this difference for the simulated acceptance",
        "acceptance_apart_difference": "mean absolute value of the difference in acceptance",
        "moved_difference": "this difference for the share of proposals that move",
        **_BLOCKS,
    },
    "throughput": {
        **_PROPOSAL,
        "proposals_per_second": "proposals for each second",
        "speed": "this rate divided by that of the target's proposals",
        "acceptance": "mean simulated acceptance of blocks",
        "accepts_per_second": "accepted proposals for each second",
        "moved": "mean share of proposals that are accepted and differ from the state",
        "moves_per_second": "such proposals for each second",
        **_BLOCKS, **_TIMED,
    },
    "strata": {
        "difficulty": "`easy` (acceptance of the draft's block above 0.7), `middle`, or `hard` (below 0.1)",
        "share": "share of blocks",
        "{proposal}_acceptance": "mean simulated acceptance of these blocks",
        "{proposal}_acceptance_per_second": "accepted proposals for each second on these blocks",
        "{proposal}_moved": "share of proposals on these blocks that are accepted and differ from the state",
        "{proposal}_moved_per_second": "such proposals for each second on these blocks",
        **_BLOCKS, **_TIMED,
    },
    "models": {
        "role": "`target` or `draft`",
        "name": "folder or name of the checkpoint",
        "parameters": "number of parameters; a draft's are without the target's embedding and head",
        "hidden_size": "width",
        "layers": "number of layers",
        "reads_layers": "layers of the target that the draft reads, from 0",
        "block_size": "tokens of a block, with the known one",
    },
    "configuration": {
        "dataset": "name of the dataset",
        "problems": "measured answers",
        "skipped": "answers that were left out",
        "blocks": "measured blocks",
        "tokens": "predicted tokens",
        "max_new_tokens": "`dataset.max_new_tokens`",
        "alpha": "power of the target",
        "draft_temperatures": "temperatures of the draft",
        "samples": "samples of a simulated chain",
        "elapsed_seconds": "seconds in which the problems were drawn and measured, without loading the models, summed over "
                           "processes and starts",
    },
    "blocks": {
        **_PROPOSAL,
        "number": "number of the block in its answer, from 0",
        "acceptance": "its simulated acceptance",
        "moved": "share of its proposals that are accepted and differ from the state",
    },
    "token_acceptance": {
        "against": "as in `tokens`",
        "temperature": "temperature of the draft",
        "acceptance": "a value of 1 - total variation distance",
        "share": "share of tokens with at most this acceptance",
    },
}
