"""When speculation pays on this machine: steps of blocks and plain steps, timed, by temperature and number of drafted tokens.

A block costs a forward of the target over more tokens, and the draft. With many chains, or at a high temperature, it can cost
more than the tokens that it gains. Break-even is the tau at which both are equally fast.

`of_trace` says the same of blocks that another engine has verified, from a file of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tabulate import tabulate

from dflash_mcmc.chains import build
from dflash_mcmc.draft import Draft
from dflash_mcmc.drafts.check import engine_of, walked
from dflash_mcmc.errors import ConfigError, UserError
from dflash_mcmc.process import bars

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import Drafter

TEMPERATURES = (0.0, 1.0)
_TURNS = 2
"""Each case is timed so often, and the fastest counts: other programs only make it slower."""


class Pace(NamedTuple):
    """Blocks of a size at a temperature, against plain decoding of the same problems."""

    temperature: float | None
    """None for blocks of another engine."""
    num_drafted: int
    tau: float
    """Tokens for each forward of the target."""
    break_even: float | None
    """The time of a chain's step with a block over that of a plain step; None if it is not known."""
    accepted: tuple[float, ...]
    """The share of blocks that kept at least 1, 2, ... drafted tokens."""

    @property
    def gain(self) -> float | None:
        """The rate of tokens over that of plain decoding; None if it is not known."""
        return None if self.break_even is None else self.tau / self.break_even


def pace_of(temperature: float | None, num_drafted: int, gained: Sequence[int], break_even: float | None) -> Pace:
    """The pace of blocks that gained so many tokens each: the kept drafted ones, and the target's own after them."""
    tokens = np.asarray(gained)
    kept = tuple(float(np.mean(tokens > count)) for count in range(1, num_drafted + 1))
    return Pace(temperature, num_drafted, float(np.mean(tokens)), break_even, kept)


def measure(config: Config) -> list[Pace]:
    """Draws the configuration's problems plainly and with blocks of each size, as many chains at once as it has slots.

    The configuration has a decoder with a draft. Raises UserError for an answer that cannot be drawn.
    """
    model = config.model.load(config.hardware.resolve())
    drafter = config.draft.load(model)
    assert drafter is not None
    prompts = build.prompts(config, model, config.dataset.problems())
    drafters, paces = [*_shorter(config.draft, drafter.num_drafted, model), drafter], list[Pace]()
    with bars.Bar(len(TEMPERATURES) * (1 + len(drafters)) * (1 + _TURNS) * len(prompts), "answer", "drafts speed") as bar:
        for temperature in TEMPERATURES:
            timed = partial(_timed, config, model, prompts, temperature, bar.update)
            _, plain = timed(None)
            for each in drafters:
                gained, seconds = timed(each)
                paces.append(pace_of(temperature, each.num_drafted, gained, seconds / plain))
    return paces


def text(paces: Sequence[Pace]) -> str:
    """A table, and for each temperature whether to speculate."""
    rows = [["-" if each.temperature is None else f"{each.temperature:g}", each.num_drafted, f"{each.tau:.2f}",
             *("-" if value is None else f"{value:.2f}" for value in (each.break_even, each.gain)),
             " ".join(f"{100.0 * share:.0f}" for share in each.accepted)] for each in paces]
    table = tabulate(rows, ["temperature", "drafted tokens", "tau", "break-even tau", "rate / plain", "kept 1, 2, ... (%)"],
                     "github", disable_numparse=True)
    return "\n".join([table, "", *(advice(max((each for each in paces if each.temperature == temperature),
                                              key=lambda each: (each.gain or 0.0, each.tau)))
                                   for temperature in dict.fromkeys(each.temperature for each in paces))])


def advice(best: Pace) -> str:
    """Whether to speculate at the temperature of the best number of drafted tokens, as a sentence."""
    facts = f"{best.num_drafted} drafted tokens, tau {best.tau:.2f}"
    start = "" if best.temperature is None else f"temperature {best.temperature:g}: "
    if best.gain is None:
        return (f"{start}speculate where a step with a block takes less than {best.tau:.2f} times as long as a plain step "
                f"({facts}); with --plain-ms, --draft-ms and --verify-ms this says whether it does")
    facts = f"{facts}, break-even {best.break_even:.2f}"
    if best.gain > 1.0:
        return f"{start}speculate, {best.gain:.2f} times as fast as plain decoding ({facts})"
    return (f"{start}do not speculate (decoder=plain): the best block has {best.gain:.2f} times "
            f"the rate of plain decoding ({facts})")


def _shorter(draft: Draft, most: int, model: LanguageModel) -> Iterator[Drafter]:
    """The drafters of 1, 3, 7, ... tokens, below `most`, where the draft's fields allow another number."""
    names = {field.name for field in dataclasses.fields(draft)}  # type: ignore[arg-type]
    field, anchors = ("num_drafted", 0) if "num_drafted" in names else ("block_size", 1)
    for count in (2**power - 1 for power in range(1, most.bit_length() + 1) if 2**power - 1 < most and field in names):
        shorter = dataclasses.replace(draft, **{field: count + anchors}).load(model)  # type: ignore[type-var]
        assert shorter is not None
        yield shorter


def _timed(config: Config, model: LanguageModel, prompts: dict[str, np.ndarray], temperature: float,
           step: Callable[[], object], drafter: Drafter | None) -> tuple[list[int], float]:
    """The tokens that each step gave, and the seconds of a chain's step. `step` is called after each answer.

    A trace takes time and rules out CUDA graphs: one turn with it gives the tokens, and others without it the seconds.
    """
    gained, fastest = list[int](), np.inf
    for walk in walked(engine_of(config, model, drafter, prompts), config, prompts, temperature):
        gained += walk.gained
        step()
    engine = engine_of(config, model, drafter, prompts, trace=False)
    for _ in range(_TURNS):
        engine.reset_counters()
        for _ in walked(engine, config, prompts, temperature):
            step()
        fastest = min(fastest, engine.counters.step_seconds / engine.counters.row_steps)
    return gained, fastest


class Times(NamedTuple):
    """Milliseconds of another engine's steps: to draft a block, to verify it, and of a plain step. None if not known."""

    draft_ms: float | None = None
    verify_ms: float | None = None
    plain_ms: float | None = None


class _TracedStep(NamedTuple):
    """A step of another engine; without drafted tokens it is a plain one."""

    drafted: int
    accepted: int
    draft_ms: float | None = None
    verify_ms: float | None = None


def of_trace(path: Path, times: Times) -> list[Pace]:
    """The paces of another engine's blocks, by number of drafted tokens.

    Each line of the file is a JSON object: a step (`drafted`, `accepted`, and perhaps `draft_ms` and `verify_ms`), or a
    response of vLLM or SGLang. A step without drafted tokens is a plain one, whose time is `verify_ms`.

    Args:
        times: of steps whose lines have none.

    Raises UserError for a time that is none, a file that cannot be read or has no block, and a wrong line.
    """
    for name, value in times._asdict().items():
        _milliseconds(f"--{name.replace('_', '-')}", value)
    steps = defaultdict[int, list[_TracedStep]](list)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                for step in _steps_of(f"--trace: {path.name} line {number}", line) if line.strip() else ():
                    steps[step.drafted].append(step)
    except OSError as error:
        raise UserError(f"--trace: given {str(path)!r}: {error.strerror}; allowed: a JSON Lines file of steps") from error
    plain = _mean([step.verify_ms for step in steps.pop(0, [])], times.plain_ms)
    if not steps:
        raise UserError(f"--trace: given {str(path)!r}, without a block; allowed: a file with a step that drafted a token")
    paces = []
    for drafted, blocks in sorted(steps.items()):
        drafting = _mean([step.draft_ms for step in blocks], times.draft_ms)
        verifying = _mean([step.verify_ms for step in blocks], times.verify_ms)
        known = None if drafting is None or verifying is None or plain is None else (drafting + verifying) / plain
        paces.append(pace_of(None, drafted, [step.accepted + 1 for step in blocks], known))
    return paces


def _mean(values: Sequence[float | None], missing: float | None) -> float | None:
    """The mean of times, with `missing` where there is none; None if one is not known."""
    times = [missing if value is None else value for value in values] or [missing]
    known = [value for value in times if value is not None]
    return float(np.mean(known)) if len(known) == len(times) else None


def _steps_of(where: str, line: bytes) -> Iterator[_TracedStep]:
    """The steps of a line: of this package's format, of a vLLM response, or of an SGLang response. Raises UserError."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(where, line.decode(errors="replace").strip(), "a JSON object")
    metrics = values.get("metrics")
    vllm = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if isinstance(vllm, dict):
        yield from _of_vllm(f"{where}: metrics.speculative_decoding", vllm)
    elif isinstance(values.get("meta_info"), dict):
        yield from _of_sglang(f"{where}: meta_info", values["meta_info"])
    elif "drafted" in values:
        drafted = _count(f"{where}: drafted", values["drafted"])
        yield _TracedStep(drafted, _count(f"{where}: accepted", values.get("accepted"), drafted),
                    *(_milliseconds(f"{where}: {name}", values.get(name)) for name in ("draft_ms", "verify_ms")))
    else:
        raise ConfigError(where, sorted(values), "drafted and accepted; metrics.speculative_decoding; or meta_info")


def _of_vllm(where: str, values: Mapping[str, Any]) -> Iterator[_TracedStep]:
    """Steps of `--per-request-spec-decode-metrics` with detailed (arrays by step) or summary (counts by drafted tokens)."""
    if isinstance(drafted := values.get("per_step_drafted"), list):
        accepted = values.get("per_step_accepted")
        if not isinstance(accepted, list) or len(accepted) != len(drafted):
            raise ConfigError(f"{where}.per_step_accepted", accepted, f"a list of {len(drafted)} counts, as per_step_drafted")
        for offered, kept in zip(drafted, accepted, strict=True):
            count = _count(f"{where}.per_step_drafted", offered)
            yield _TracedStep(count, _count(f"{where}.per_step_accepted", kept, count))
        return
    name = "acceptance_histogram_by_draft_length"
    if not isinstance(by_length := values.get(name), dict):
        raise ConfigError(where, sorted(values), f"per_step_drafted and per_step_accepted, or {name}")
    for length, counts in by_length.items():
        drafted = int(length) if length.isascii() and length.isdigit() else length
        yield from _of_counts(f"{where}.{name}", _count(f"{where}.{name}", drafted), counts)


def _of_sglang(where: str, values: Mapping[str, Any]) -> Iterator[_TracedStep]:
    """Steps of a request that drafted equally many tokens in each step. Newer versions have the second names."""
    verified = _count(f"{where}.spec_verify_ct", values.get("spec_verify_ct"))
    drafted, histogram = (first if first in values else second for first, second in (
        ("spec_draft_token_num", "spec_num_proposed_drafts"), ("spec_accept_histogram", "spec_correct_drafts_histogram")))
    total = _count(f"{where}.{drafted}", values.get(drafted))
    if total % max(verified, 1):
        raise ConfigError(f"{where}.{drafted}", total, f"a multiple of spec_verify_ct ({verified}): if the number of drafted "
                          "tokens changes, counts do not say which step drafted how many")
    steps = list(_of_counts(f"{where}.{histogram}", total // max(verified, 1), values.get(histogram)))
    if len(steps) != verified:
        raise ConfigError(f"{where}.{histogram}", values[histogram], f"counts of {verified} steps (spec_verify_ct)")
    yield from steps


def _of_counts(where: str, drafted: int, counts: object) -> Iterator[_TracedStep]:
    """Steps from the number of steps that accepted 0, 1, ... tokens."""
    if not isinstance(counts, list) or any(counts[drafted + 1 :]):
        raise ConfigError(where, counts, f"a list of {drafted + 1} counts of steps")
    for accepted, count in enumerate(counts):
        yield from (_TracedStep(drafted, accepted) for _ in range(_count(where, count)))


def _count(where: str, given: Any, most: int = 10**9) -> int:
    if type(given) is not int or not 0 <= given <= most:
        raise ConfigError(where, given, f"a whole number from 0 to {most}")
    return given


def _milliseconds(where: str, given: Any) -> float | None:
    free = where.endswith(("draft_ms", "draft-ms"))  # drafting may cost nothing, as that of n-grams
    if given is not None and (type(given) not in (int, float) or not 0 <= given < np.inf or not (given or free)):
        raise ConfigError(where, given, f"milliseconds, a number {'from 0 on' if free else 'above 0'}")
    return given
