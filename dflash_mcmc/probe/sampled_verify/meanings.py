"""What the columns of the probe's tables and the values of its summary mean."""

_COMMON = {
    "temperature": "temperature of the draws",
    "decoder": "`plain`, sample and match, or a decoder with a fault; each has random numbers of its own",
    "n": "generations",
    "mean_tokens": "mean tokens of a generation",
    "tokens_per_forward": "tokens for each forward pass of the target",
    "speed_ratio": "`tokens_per_second` divided by that of plain decoding",
    "tokens_per_second": "tokens of all generations for each second of their draws",
    "histogram_distance": "total variation distance of the token histogram from that of plain decoding",
    "histogram_noise": "mean distance of two samples from equal laws",
    "histogram_p": "p-value of the permutation test that both have one law; it swaps whole generations",
}

MEANINGS = {
    "values": {
        "num_failed": "generations that a decoder could not draw",
        "equal_with_same_key": "generations by sample and match that equal plain decoding with the same random numbers",
        "pairs_with_same_key": "pairs that were compared for this",
        "{workload}/{temperature}/tokens_per_forward": "see the table of the workload, for sample and match",
        "{workload}/{temperature}/speed_ratio": "see the table of the workload, for sample and match",
        "{workload}/{temperature}/histogram_p": "see the table of the workload, for sample and match",
    },
    "short": {
        **_COMMON,
        "same_first_token": "share of generations that open with the most frequent first token of their problem",
        "first_token_p": "p-value of the permutation test for first tokens alone",
    },
    "long": {
        **_COMMON,
        "distinct_4": "different sequences of 4 tokens divided by all sequences of 4 tokens of a generation, mean",
        "distinct_4_p": "p-value of the permutation test that this mean is that of plain decoding",
        "longest_repeat": "mean length of the longest run of tokens that a generation has twice, tokens",
        "end_in_loop": "generations whose last 100 tokens repeat one period of at most 25",
    },
    "agent": {
        **_COMMON,
        "prompt_tokens": "tokens of the agent's prompt",
        "tool_calls": "generations with a valid tool call; empty where the template shows no tools",
        "tool_call_share": "share of generations with a valid tool call",
    },
    "same_key": {
        "workload": "`short`, `long` or `agent`",
        "temperature": "temperature of the draws",
        "equal": "generations by sample and match that equal plain decoding with the same random numbers",
        "n": "pairs that were compared",
    },
}
