"""The tables of the workloads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.probe import Summary
from dflash_mcmc.probe.sampled_verify import texts
from dflash_mcmc.probe.sampled_verify.arms import AGENT, LONG, MATCH, PLAIN, SAME_KEY, SHORT
from dflash_mcmc.statistics import swaps
from dflash_mcmc.statistics.intervals import Clusters
from dflash_mcmc.statistics.shares import wilson

_DISTINCT = 4


class Generation(NamedTuple):
    """A drawn generation."""

    problem: str
    number: int
    tokens: list[int]
    target_forwards: int
    seconds: float
    prompt_tokens: int
    tool_call: bool | None


Generations = dict[tuple[float, str], list[Generation]]
"""The generations of a workload by temperature and decoder. Generations at the same index of two lists are a pair."""


def summary(records: Sequence[dict]) -> Summary:
    """The tables `short`, `long`, `agent` and `same_key`, each where the records have its workload."""
    found = {name: _generations(records, name) for name in (SHORT, LONG, AGENT)}
    rows = {SHORT: _short, LONG: _long, AGENT: _agent}
    tables = {name: rows[name](drawn) for name, drawn in found.items() if drawn}
    same = [row for name, drawn in found.items() for row in _same(name, drawn)]
    values: dict[str, float | int | str | None] = {
        "num_failed": sum("failure" in cell for record in records for cell in record["cells"]),
        "equal_with_same_key": sum(row["equal"] for row in same), "pairs_with_same_key": sum(row["n"] for row in same)}
    for name, mine in tables.items():
        for row in (row for row in mine if row["decoder"] == MATCH):
            values.update({f"{name}/{row['temperature']:g}/{column}": row[column]
                           for column in ("tokens_per_forward", "speed_ratio", "histogram_p")})
    return Summary(values, {**tables, "same_key": same}, {})


def _generations(records: Sequence[dict], workload: str) -> Generations:
    """A unit that a decoder failed to draw is left out for all decoders, so that pairs stay pairs."""
    found: Generations = defaultdict(list)
    for record in records:
        if record["workload"] == workload and not any("failure" in cell for cell in record["cells"]):
            for cell, seconds in zip(record["cells"], record["seconds"], strict=True):
                found[cell["temperature"], cell["decoder"]].append(Generation(
                    record["problem"], record["chain"], cell["tokens"], cell["target_forwards"], seconds,
                    record["prompt_tokens"], cell.get("tool_call")))
    return found


def _common(drawn: Generations, temperature: float, decoder: str) -> dict:
    """Columns of every table: lengths, speed, and the distance of token histograms from those of plain decoding."""
    mine, plain = drawn[temperature, decoder], drawn[temperature, PLAIN]
    clusters = Clusters([one.problem for one in mine] if len({one.problem for one in mine}) > 1
                        else [one.number for one in mine])
    lengths = [len(one.tokens) for one in mine]
    test = None if decoder == PLAIN else swaps.histograms(*_counts([one.tokens for one in plain],
                                                                  [one.tokens for one in mine]))
    return {"temperature": temperature, "decoder": decoder, "n": len(mine), "mean_tokens": float(np.mean(lengths)),
            **clusters.ratio(lengths, [one.target_forwards for one in mine]).columns("tokens_per_forward"),
            "speed_ratio": _rate(mine) / _rate(plain), "tokens_per_second": _rate(mine), **_columns("histogram", test)}


def _short(drawn: Generations) -> list[dict]:
    rows = []
    for temperature, decoder in _compared(drawn):
        mine, plain = drawn[temperature, decoder], drawn[temperature, PLAIN]
        first = None if decoder == PLAIN else swaps.histograms(*_counts([one.tokens[:1] for one in plain],
                                                                       [one.tokens[:1] for one in mine]))
        rows.append({**_common(drawn, temperature, decoder), "same_first_token": _same_first(mine),
                     "first_token_p": first.p if first else None})
    return rows


def _long(drawn: Generations) -> list[dict]:
    rows = []
    for temperature, decoder in _compared(drawn):
        new, plain = (np.array([texts.distinct(one.tokens, _DISTINCT) for one in drawn[temperature, name]])
                      for name in (decoder, PLAIN))
        mine = [one.tokens for one in drawn[temperature, decoder]]
        rows.append({**_common(drawn, temperature, decoder),
                     **Clusters(range(len(new))).mean(new).columns("distinct_4"),
                     "distinct_4_p": None if decoder == PLAIN else swaps.means(plain, new).p,
                     "longest_repeat": float(np.mean([texts.longest_repeat(tokens) for tokens in mine])),
                     "end_in_loop": sum(texts.ends_in_loop(tokens) for tokens in mine)})
    return rows


def _agent(drawn: Generations) -> list[dict]:
    rows = []
    for temperature, decoder in _compared(drawn):
        mine = drawn[temperature, decoder]
        calls = [one.tool_call for one in mine if one.tool_call is not None]
        rows.append({**_common(drawn, temperature, decoder), "prompt_tokens": mine[0].prompt_tokens,
                     "tool_calls": sum(calls) if calls else None,
                     **wilson(sum(calls), len(calls)).columns("tool_call_share")})
    return rows


def _same(workload: str, drawn: Generations) -> list[dict]:
    """How many generations by sample and match equal those of plain decoding with the same key."""
    rows = []
    for temperature in dict.fromkeys(temperature for temperature, _ in drawn):
        pairs = list(zip(drawn[temperature, PLAIN], drawn[temperature, SAME_KEY], strict=True))
        rows.append({"workload": workload, "temperature": temperature,
                     "equal": sum(one.tokens == other.tokens for one, other in pairs), "n": len(pairs)})
    return rows


def _compared(drawn: Generations) -> list[tuple[float, str]]:
    """Rows of a table. `same_key` is left out, because it isn't an independent sample."""
    return [place for place in drawn if place[1] != SAME_KEY]


def _columns(name: str, test: swaps.SwapTest | None) -> dict[str, float | None]:
    values = (None, None, None) if test is None else test
    return dict(zip((f"{name}_distance", f"{name}_noise", f"{name}_p"), values, strict=True))


def _rate(mine: Sequence[Generation]) -> float:
    """Tokens per second."""
    return sum(len(one.tokens) for one in mine) / sum(one.seconds for one in mine)


def _same_first(mine: Sequence[Generation]) -> float:
    """Share of generations that open with the most frequent first token among this decoder's generations of the problem."""
    by_problem: dict[str, Counter[int]] = defaultdict(Counter)
    for one in mine:
        by_problem[one.problem][one.tokens[0]] += 1
    return sum(max(counts.values()) for counts in by_problem.values()) / len(mine)


def _counts(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Histograms (generations, tokens that occur) of both samples."""
    place = {token: number for number, token in enumerate(sorted({token for part in (one, other) for mine in part
                                                                  for token in mine}))}

    def counted(part: Sequence[Sequence[int]]) -> np.ndarray:
        return np.stack([np.bincount([place[token] for token in mine], minlength=len(place)) for mine in part])

    return counted(one), counted(other)
