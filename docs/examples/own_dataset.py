"""Problems of your own: a file of questions and answers, a run on it, and its table."""

import json
from pathlib import Path

import dflash_mcmc as dm

ROWS = [{"question": "Ann has 13 pens. Ann buys 24 more. How many pens does Ann have?", "answer": "37"},
        {"question": "Eva has 96 coins. Eva gives away 20. How many coins does Eva have?", "answer": "76"},
        {"question": "Ben has 14 cards. Ben gets 3 bags of 10. How many cards does Ben have?", "answer": "44"}]
"""Questions in the words that the embedded model has learned; a larger model answers others."""


def main() -> None:
    """Writes the file, and makes a run with power sampling."""
    file = Path("my_problems.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = dm.run("condition=ps", f"dataset={file}", "dataset.prompt=plain", "dataset.max_new_tokens=64", "tracker=none",
                  "name=mine")
    print(dm.read(done)[["problem", "verdict", "answer", "gold", "log_p"]].to_string(index=False))
    print(f"{done.summary['correct']:g} of {done.summary['num_samples']} correct; everything is in {done.folder}")


if __name__ == "__main__":
    main()
