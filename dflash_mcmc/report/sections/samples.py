"""The samples of the runs, embedded in the page: every problem with the samples of all runs."""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from string import ascii_lowercase
from typing import Any

from dflash_mcmc.grading.verdicts import VERDICTS
from dflash_mcmc.report.parts import EmbeddedSamples, Section, listed, paragraphs
from dflash_mcmc.report.reading import Run
from dflash_mcmc.report.study import Study
from dflash_mcmc.statistics.estimates import by_problem
from dflash_mcmc.store.records import REASONS, Record

MOST_CHARACTERS = 64_000_000
"""Characters of answers in a page. A browser holds all of them while it searches."""
_PART = 300_000
"""Characters of a part. Opening a problem unpacks one part."""
_SHARE = 1_000
"""Values of log p are whole numbers of thousandths of a nat, as differences: most of them are 0."""
_DECISIONS: dict[object, str] = {"accept": "a", "identical": "i", "reject": "r", "abandon": "x", "keep": "k", "leave": "l"}
"""Letters of the decisions in a trace; `samples.js` has them too."""

Asked = tuple[str, Sequence[tuple[str, list[int]]]]
"""The question of a problem, and its different prompts, each with the numbers of the runs that had it."""
_TEXT = """
Every problem has a row and every run a column. A row opens the problem: question, prompt, gold answer, and the answers side by
side, each with its verdict and the grading rule, the reason why it ended, and log p after each step of the sampler, block by
block. The browser needs JavaScript and no network.
"""


def section(study: Study) -> Section:
    """The browser over all runs of the study."""
    known: dict[str, tuple[str, dict[str, list[int]]]] = {}
    for index, run in enumerate(study.runs):
        for problem, of in run.asked.items():
            known.setdefault(problem, (of["question"], {}))[1].setdefault(of["prompt"], []).append(index)
    recorded = {problem for run in study.runs for problem in run.problems}
    asked = {problem: (question, list(prompts.items())) for problem, (question, prompts) in known.items()
             if problem in recorded}
    embedded, text = samples_of(study.runs, asked), paragraphs(_TEXT)
    most = max(run.num_chains for run in study.runs)
    if embedded.num_chains < most:
        text.append(f"The browser has the first {embedded.num_chains:,} of {most:,} chains of each problem; all are in the "
                    "run folders.")
    if embedded.longest is not None:
        text.append(f"Answers are cut after {embedded.longest:,} characters here; they are whole in the run folders.")
    if without := [run.label for run in study.runs if not (run.asked or set(run.problems) <= asked.keys())]:
        text.append("Questions and prompts of these runs are not shown, since their folders have no problems.jsonl: "
                    f"{listed(without)}.")
    return Section("samples", "Samples", text, samples=embedded)


def samples_of(runs: Sequence[Run], asked: Mapping[str, Asked]) -> EmbeddedSamples:
    """The samples of runs over one dataset.

    Args:
        asked: question and prompts of the problems, as far as they are known. Their order is that of the page.
    """
    chains, longest = _within(runs, MOST_CHARACTERS)
    of_run = [by_problem(sorted((record for record in run.records if record["chain"] < chains), key=itemgetter("chain")))
              for run in runs]
    recorded = dict.fromkeys(problem for run in runs for problem in run.problems)
    ids = [*(problem for problem in asked if problem in recorded), *(problem for problem in recorded if problem not in asked)]
    parts, rows, waiting, size = list[str](), [], list[str](), 0
    for problem in ids:
        samples = [records.get(problem, []) for records in of_run]
        first: Mapping[str, Any] = next((own[0] for own in samples if own), {})  # type: ignore[assignment]
        question, prompts = asked.get(problem, (None, []))
        content = json.dumps({"q": question, "p": prompts, "g": first.get("gold"),
                              "r": [[_sample(record, longest) for record in own] for own in samples]})
        if waiting and size + len(content) > _PART:
            parts.append(_packed(f"[{','.join(waiting)}]"))
            waiting, size = [], 0
        rows.append([problem, len(parts), len(waiting), first.get("level"), first.get("subject")])
        waiting.append(content)
        size += len(content)
    parts.append(_packed(f"[{','.join(waiting)}]"))
    letters = [["".join(ascii_lowercase[place] for record in records.get(problem, []) for place in (  # two for each sample
        VERDICTS.index(record["verdict"]), REASONS.index(record["finish_reason"]))) for problem in ids]
        for records in of_run]
    overview = {"runs": [run.label for run in runs], "verdicts": VERDICTS, "reasons": REASONS, "problems": rows,
                "samples": letters}
    return EmbeddedSamples(_packed(json.dumps(overview)), parts, chains, longest)


def _within(runs: Sequence[Run], most: int) -> tuple[int, int | None]:
    """How many chains fit, at least one; and the length at which texts are cut, where not even one fits."""
    sizes: dict[int, int] = {}
    for run in runs:
        for record in run.records:
            sizes[record["chain"]] = sizes.get(record["chain"], 0) + len(record["text"])
    total, chains = 0, 0
    for chain, size in sorted(sizes.items()):
        total += size
        if total > most and chains:
            return chains, None
        chains = chain + 1
        if total > most:
            return chains, most // sum(record["chain"] < chains for run in runs for record in run.records)
    return chains, None


def _sample(record: Record, longest: int | None) -> dict[str, Any]:
    text = record["text"]
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]} [... {len(text) - longest:,} more characters are in the run folder]"
    return {"c": record["chain"], "t": text, "a": record["answer"], "u": record.get("rule", ""), "y": record["reason"],
            "n": record["num_tokens"], "l": record["log_p"], "s": record["share_seconds"],
            "m": [record["proposals"], record["accepted"], record["moved"]], "x": list(_series(record.get("trace", [])))}


def _series(trace: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """log p after each proposal, a series for each rung of a ladder: blocks with their numbers of steps, differences of log p,
    and a letter for each decision."""
    steps = [step for step in trace if isinstance(log_p := step.get("log_p"), (int, float)) and abs(log_p) < 1e9]
    for rung in sorted({step.get("rung", 0) for step in steps}, key=str):
        own = [step for step in steps if step.get("rung", 0) == rung]
        scaled = [round(_SHARE * step["log_p"]) for step in own]
        blocks = [[block, len(list(group))] for block, group in groupby(own, key=lambda step: step.get("block", 0))]
        yield {"k": rung, "b": blocks, "p": [scaled[0], *(b - a for a, b in pairwise(scaled))],
               "d": "".join(_DECISIONS.get(step.get("decision"), "?") for step in own)}


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode("ascii"), 6)).decode("ascii")
