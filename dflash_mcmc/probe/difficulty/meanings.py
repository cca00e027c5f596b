"""What the columns of the probe's tables and the values of its summary mean.

A case is an answer or an equation in an answer. It is right or wrong.
"""

_CASES = {"cases": "`answers` or `steps` (equations in the answers)"}
_COUNTS = {"wrong": "wrong cases among them", "n": "cases of the row"}
_SIGNAL = {
    "signal": "name of the signal, with `mean` or `max` over the case's tokens; larger values should mean wrong",
    "kind": "what the signal needs: `draft`, `target`, or `other` for neither",
}
_ROWS = {
    "signal": "name of the signal; larger values should mean wrong",
    "kind": "what the signal needs: `draft`, `target`, or `other` for neither",
    "statistic": "mean or maximum over the tokens of a case; empty for a signal of the whole case",
    "auroc": "share of pairs of a wrong and a right case that the signal orders correctly; 0.5 is chance",
    "minus_best": "`auroc` minus that of the best signal that needs no draft, on the same cases",
    "minus_entropy": "`auroc` minus that of the target's entropy with the same statistic",
    "brier": "mean squared difference of outcome and probability, which is predicted from the signal by cross-validated "
             "logistic regression",
    "brier_skill": "1 - `brier` divided by that of the base rate; 0 means that the signal adds nothing",
    "ece": "expected calibration error: mean distance of predicted and observed shares over bins",
    "ece_by_chance": "`ece` that perfectly calibrated probabilities would have on as many cases",
    **_COUNTS,
}

MEANINGS = {
    "values": {
        "num_answers": "measured answers",
        "num_skipped": "answers with nothing to measure, or with logits that are not numbers",
        "num_skipped_not_correct": "answers among them that are not correct",
        "num_no_answer": "measured answers without a final answer",
        "{cases}/n": "number of answers or of steps",
        "{cases}/wrong": "wrong ones among them",
        "{cases}/best_draft": "signal of the draft with the largest AUROC, chosen on these cases",
        "{cases}/best_draft_auroc": "its AUROC",
        "{cases}/best_baseline": "signal without a draft with the largest AUROC, chosen on these cases",
        "{cases}/best_baseline_auroc": "its AUROC",
        "{cases}/difference": "difference of the two AUROCs",
    },
    "outcomes": {
        **_CASES,
        "share_wrong": "share of wrong cases",
        "acceptance_right": "mean expected acceptance of the draft, 1 - total variation, over right cases",
        "entropy_right": "mean entropy of the target over right cases, nats",
        "acceptance_wrong": "the same acceptance over wrong cases",
        "entropy_wrong": "the same entropy over wrong cases, nats",
        **_COUNTS,
        "left_out": "cases that were not measured",
    },
    "answers": _ROWS,
    "steps": _ROWS,
    "combined": {
        **_CASES,
        "baseline": "signal without a draft",
        "signal": "signal of the draft that is added",
        "auroc_baseline": "AUROC of cross-validated probabilities from the baseline, over pairs within a fold",
        "auroc_combined": "AUROC of those from both signals",
        "auroc_gain": "difference of the two",
        "brier_gain": "Brier score of the baseline minus that of both; above 0 the draft helps",
        **_COUNTS,
    },
    "reliability": {
        **_CASES, **_SIGNAL,
        "bin": "bin of predicted probabilities, from 1; bins have equally many cases",
        "predicted": "mean predicted probability of being wrong",
        "observed": "share of wrong cases",
        **_COUNTS,
    },
    "roc": {
        **_CASES, **_SIGNAL,
        "share_of_right": "share of right cases at or above a threshold of the signal",
        "share_of_wrong": "share of wrong cases at or above it",
    },
}
