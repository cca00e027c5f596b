"""Run folders as a run writes them, generated from counts."""

import json
import re
from pathlib import Path

from dflash_mcmc.config.identity import hash_of
from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.report.reading import read, run_folders
from dflash_mcmc.report.study import Study, study_of
from dflash_mcmc.statistics.summaries import summarise
from dflash_mcmc.store.files import to_line

SAMPLERS = {"greedy": {"sampler": "greedy"}, "temp": {"sampler": "temperature", "sampler.temperature": 0.25},
            "ps": {"sampler": "power_mh", "sampler.alpha": 4.0, "sampler.proposal_temperature": 0.25, "sampler.num_blocks": 16,
                   "sampler.num_steps": 2, "sampler.proposal": None}}
BLENDS = {"": {"blend": "none"}, "blend": {"blend": "layer", "blend.beta": 0.05, "blend.layer": 33},
          "draft_blend": {"blend": "draft", "blend.beta": 0.05, "draft": "dflash", "draft.content": "d" * 32}}
SESSION = {"started": "2026-11-21T19:47:49+00:00", "command": ["python"], "commit": "0" * 40, "dirty": False,
           "python": "3.11.7", "packages": {"torch": "2.13.0", "transformers": "5.23.0"}, "host": "here",
           "device": "x86_64 CPU, 1 threads"}


def record(problem: str, verdict: str = "correct", chain: int = 0, **rest) -> dict:
    """A line of `records.jsonl`."""
    reason = verdict if verdict in UNDRAWN else "stop_id" if rest.get("ended", True) else "length"
    return {"problem": problem, "chain": chain, "level": 1, "subject": "Algebra", "verdict": verdict, "gold": "42",
            "answer": {"correct": "42", "wrong": "41"}.get(verdict), "rule": "", "reason": "", "same_string": None,
            "walls": [], "text": "...", "num_tokens": 600, "ended": True, "finish_reason": reason, "grader": "math",
            "log_p": -2.0, "log_q": -2.5, "proposals": 0, "accepted": 0, "moved": 0, "abandoned": 0, "law_error": 0.0,
            "tokens_drawn": 600, "target_forwards": 600, "token_forwards": 700, "tokens_skipped": 0,
            "blocks_drafted": 0, "tokens_drafted": 0, "tokens_kept": 0, "seconds": 64.0, "share_seconds": 8.0,
            "tokens": [1, 2], "trace": [], **rest}


def identity(condition: str, **changed) -> dict:
    """The identity in `run.json` for a condition of the document; the keyword `sampler__alpha` means `sampler.alpha`."""
    blend, _, sampler = condition.rpartition("_")
    made = {"version": 3, "model": "hf", "draft": "none", "decoder": "plain", "dataset": "math500", "grader": "math",
            "seed": 0, "model.dtype": "bfloat16", "model.content": "a" * 32, "dataset.content": "b" * 32,
            "dataset.prompt": "{question}", "dataset.max_new_tokens": 1024, **SAMPLERS[sampler], **BLENDS[blend]}
    if blend and sampler == "ps":
        made["sampler.proposal"] = "base"
    return {**made, **{name.replace("__", "."): value for name, value in changed.items()}}


def write(folder: Path, condition: str, records: list[dict], made: dict | None = None, *, limit: int | None = None,
          num_chains: int = 1, finished: bool = True, session: dict | None = None, name: str | None = None,
          config: dict | None = None) -> Path:
    """Writes a run folder below `folder`, the experiment's folder, and returns it."""
    made = made or identity(condition)
    run = folder / f"{condition}-{hash_of(made)}"
    run.mkdir(parents=True)
    limit = limit or len({line["problem"] for line in records})
    config = {"name": name or folder.name, "condition": {"name": condition}, "num_chains": num_chains,
              "sampler": {"name": made["sampler"], "alpha": 4.0},
              "dataset": {"name": made["dataset"], "path": "problems.jsonl", "limit": limit}, **(config or {})}
    # JSON is YAML, in which a number with an exponent has a point.
    (run / "config.yaml").write_text(re.sub(r"\b(\d+)e-", r"\1.0e-", json.dumps(config)))
    session = {**SESSION, "num_problems": limit, **(session or {}), **({"engine": {}} if finished else {})}
    (run / "run.json").write_text(json.dumps({"identity": made, "sessions": [session]}))
    (run / "records.jsonl").write_bytes(b"".join(map(to_line, records)))
    if finished:
        (run / "summary.json").write_text(json.dumps(summarise(condition, records)))
    return run


def study_over(folder: Path, **options) -> Study:
    """The study of the runs below the folder."""
    return study_of(read(run_folders([folder]))[0], **options)
