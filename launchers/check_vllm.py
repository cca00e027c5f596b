"""What engine=vllm does on this machine beside engine=slots: three checks, and a table of what ran and what did not.

    python launchers/check_vllm.py                    the embedded model
    python launchers/check_vllm.py model=qwen3_4b     further arguments are overrides of every run

Each run is a process of its own, since both engines want the memory of the GPU. A run that fails does not end the others. Runs
are in `outputs/check_vllm`, and a second call goes on with what is missing.
"""

import json
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

OUTPUTS = Path("outputs") / "check_vllm"
CHECKS = {"parity": ["sampler=greedy", "model.dtype=float32"], "rate": ["condition=temp", "num_chains=8"],
          "table": ["condition=ps"]}
ENGINES = ("slots", "vllm")


def draw(name: str, engine: str, overrides: list[str]) -> str:
    """Makes a run. Returns `ran`, or the last line of its error."""
    given = {override.partition("=")[0] for override in overrides}
    chosen = [each for each in (*CHECKS[name], "dataset.limit=20", "tracker=none") if each.partition("=")[0] not in given]
    done = subprocess.run([sys.executable, "-m", "dflash_mcmc", *chosen, *overrides, f"engine={engine}",
                           f"name={name}_{engine}", f"paths.outputs={OUTPUTS}"], stderr=subprocess.PIPE, text=True)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "ran" if not done.returncode else f"did not run: {lines[-1] if lines else done.returncode}"


def records(name: str, engine: str) -> dict[tuple[str, int], dict]:
    """The records of a run by problem and chain."""
    lines = [line for path in (OUTPUTS / f"{name}_{engine}").glob("*/records.jsonl") for line in path.read_text().splitlines()]
    return {(record["problem"], record["chain"]): record for record in map(json.loads, lines)}


def found(name: str, engine: str) -> str:
    """What a run shows."""
    mine, others = records(name, engine), records(name, ENGINES[0])
    if name == "parity":
        equal = sum(key in others and mine[key]["tokens"] == others[key]["tokens"] for key in mine)
        return f"{equal} of {len(mine)} answers of {ENGINES[0]}, but for near-ties all of them"
    if name == "rate":
        tokens, seconds = (sum(each[field] for each in mine.values()) for field in ("num_tokens", "share_seconds"))
        return f"{tokens / seconds:,.0f} tokens/s"
    return f"{sum(each['verdict'] == 'correct' for each in mine.values())} of {len(mine)} correct"


def main(overrides: list[str]) -> int:
    """Makes all runs and prints the table. Returns the number of runs that failed."""
    rows = []
    for name in CHECKS:
        for engine in ENGINES:
            state = draw(name, engine, overrides)
            rows.append((name, engine, state, found(name, engine) if state == "ran" else ""))
    print("\n" + tabulate(rows, headers=("check", "engine", "run", "found"), tablefmt="github"))
    return sum(state != "ran" for _, _, state, _ in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
