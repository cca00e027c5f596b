"""What the columns of the probe's tables and the values of its summary mean.

A sampler is a decoder, or a decoder with a fault. A cell is a token, or with `probe.laws=draft` a pair of tokens.
"""

MEANINGS = {
    "values": {
        "num_draws": "draws of each sampler",
        "overlap": "sum of min(p, q): the share of drafts that rejection sampling accepts",
        "{sampler}/max_deviation": "see `samplers`",
    },
    "samplers": {
        "decoder": "rule that verifies the draft",
        "fault": "mistake in it; empty for the correct rule",
        "max_deviation": "largest distance of a cell's frequency from its probability p",
        "standard_error": "standard error of the frequency that varies most",
        "in_standard_errors": "`max_deviation` divided by `standard_error`",
        "total_variation": "half of the sum of all distances of frequencies from p",
        "chi_square_p": "p-value of Pearson's test that the draws come from p",
        "acceptance": "share of drafted tokens that are accepted",
        "draws": "draws of the sampler",
    },
    "tokens": {
        "token": "number of a token, or the text of a pair of tokens; the cells with the largest p",
        "p": "its probability under the target",
        "q": "its probability under the draft",
        "{sampler}": "frequency among the sampler's draws minus p",
    },
    "course": {
        "draws": "draws up to here",
        "standard_error": "as in `samplers`, for so many draws",
        "{sampler}": "`max_deviation` after so many draws",
    },
}
