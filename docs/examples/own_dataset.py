"""Problems of your own: a file of questions and answers, a run on it, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import dflash_mcmc as dm

ROWS = [{"question": "Lena has 12 red pens and 9 blue pens. How many pens does she have?", "answer": "21"},
        {"question": "Compute 4*(3+2).", "answer": "20"},
        {"question": "What is 7*6?", "answer": "42"}]


def main() -> None:
    """Writes the file, and makes a run with power sampling."""
    file = Path("my_problems.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = dm.run("condition=ps", "sampler.num_steps=1", "dataset=jsonl", f"dataset.path={file}", "dataset.prompt=plain",
                  "dataset.max_new_tokens=64", "tracker=none", "name=mine")
    print(dm.read(done)[["problem", "verdict", "answer", "gold", "log_p"]].to_string(index=False))
    print(f"{done.summary['correct']:g} of {done.summary['num_samples']} correct; everything is in {done.folder}")


if __name__ == "__main__":
    main()
