"""Does the draft's disagreement with the target predict that an answer is wrong?

This tests the closing idea of the document "Speculative MCMC Probe" (section 6.3, "a free difficulty detector").

p is the target's distribution of a token at temperature 1. q is the draft's distribution in one forward per block, given the
anchor and the target's features of all positions before it. All signals are larger for harder tokens.

AUROC is the probability that a wrong answer has a larger signal than a right one, where ties count half. It equals
Mann-Whitney's U divided by the number of pairs (Hanley & McNeil 1982). Signals are never reversed. An AUROC below 0.5 means
that the signal is smaller for wrong answers. The best signal and the best baseline are those with the largest AUROC on the
same answers. The selection favours both, and the intervals, which resample problems, do not include its effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple, NotRequired, cast, final

import numpy as np
from typing_extensions import TypedDict

from dflash_mcmc.chains import build, cost
from dflash_mcmc.draft import check_features, load_feature_drafter
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading import settled
from dflash_mcmc.grading.extraction import continued
from dflash_mcmc.grading.verdicts import NO_ANSWER, NOT_DRAWN, VERDICTS
from dflash_mcmc.probe import ProblemProbe, Summary, Unit, Work
from dflash_mcmc.probe.columns import PROBLEMS, SKIPPED, Table
from dflash_mcmc.registry import name_of, options_with, register
from dflash_mcmc.report.figure import INK, RIGHT, WRONG
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate, divided
from dflash_mcmc.store.schema import Count, Instead, OneOf, Whole
from dflash_mcmc.types import UnitCost

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from dflash_mcmc.engine.batching.interface import ChainRunner
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter
    from dflash_mcmc.ops import Chain
    from dflash_mcmc.settings import Settings
    from dflash_mcmc.types import Problem, Trajectory

DRAFT, TARGET, OTHER = "draft", "target", "other"
"""Kinds of signals: those that need the draft, those of the target alone, and those that need neither."""
SIGNALS = {
    DRAFT: ("kl_target_draft", "kl_draft_target", "total_variation", "minus_log_acceptance", "draft_entropy",
            "draft_surprisal", "top1_disagreement"),
    TARGET: ("target_entropy", "target_surprisal", "least_confidence"),
}
"""Signals of a token by kind.

Those of the draft: KL(p || q), KL(q || p), 1 - expected acceptance, -log expected acceptance, H(q), -log q(token), argmax p is
not argmax q. Expected acceptance is the probability that rejection sampling accepts a token drawn from q. It is the sum of
min(p, q), which is one minus the total variation. The sum of the logarithms over tokens is the logarithm of the product of the
tokens' expected acceptances.

Those of the target: H(p), -log p(token), 1 - max p (Settles 2009, "Active learning literature survey"). All signals are in
nats except total variation, top-1 disagreement and least confidence.
"""
SignalValues = TypedDict("SignalValues", {name: float for names in SIGNALS.values() for name in names})  # type: ignore[misc]
"""A statistic of each signal over some tokens."""


@final
class DifficultyRecord(TypedDict):
    """An answer, its grade and its signals."""

    level: Whole | str | None
    """Level of difficulty of the problem, if the dataset has one."""
    verdict: Annotated[str, OneOf(VERDICTS)]
    """One of `grading.verdicts.VERDICTS`."""
    num_tokens: Count
    """Tokens of the answer."""
    num_compared: Count
    """Tokens that the draft predicts."""
    mean: SignalValues
    max: SignalValues
    skipped: NotRequired[Annotated[str, Instead(("num_compared", "mean", "max"))]]
    """Why the answer has no signals."""


@register("probe", "difficulty")
@dataclass(slots=True, kw_only=True)
class Difficulty(ProblemProbe):
    """Whether draft-target disagreement distinguishes wrong answers from right ones.

    The sampler draws answers, which are graded and teacher-forced through target and draft in whole blocks. Every answer that
    is not graded correct is wrong, including one without a box. An answer that could not be drawn has no signals and is left
    out. Signals of draft and target are compared on the same tokens. A draft disagrees more in slots that are further from the
    anchor, whatever the token. `draft.block_size=2` measures the first slot alone.
    """

    uses = ("model", "draft", "blend", "sampler", "decoder", "dataset", "grader")
    unit = "answer"
    record_type = DifficultyRecord
    tables_in = __name__
    measures_chains = True
    needs_draft = True

    def check(self, config: Settings) -> None:
        """Checks that the configuration suits the probe. Raises ConfigError."""
        check_features(config, "probe=difficulty")
        if not config.blend.is_null:
            none = options_with("blend", "is_null")
            raise ConfigError("blend", name_of(config.blend), f"{none} with probe=difficulty: its signals are the plain "
                              "target's")

    def expected_cost(self, config: Settings) -> UnitCost | None:
        """The cost of drawing a sample, reading it once, and drafting each of its blocks."""
        forwards, drafted = cost.token_forwards(config), cost.draft_blocks(config)
        if forwards is None:
            return None
        answer = cost.forced(config)
        return UnitCost(forwards + answer.prompt + answer.length, drafted + answer.blocks)

    def measure(self, config: Settings, work: Work) -> Iterator[tuple[Unit, dict]]:
        """Draws answers in a batch. Each one is teacher-forced separately while it is graded. Raises UserError."""
        problems = {problem.id: problem for problem in config.dataset.problems()}
        model = config.model.load(work.device)
        drafter = load_feature_drafter(config, model)
        block_size = drafter.num_drafted + 1
        if config.dataset.max_new_tokens < block_size:
            raise ConfigError("dataset.max_new_tokens", config.dataset.max_new_tokens, f"at least {block_size}, a block")
        prompts = build.prompts(config, model, [problems[unit.problem] for unit in work.units])
        engine = config.engine.start(config, model, max(map(len, prompts.values())), len(work.units))
        chains = ((unit, build.chain(config, config.sampler, unit.problem, unit.chain, prompts[unit.problem], model))
                  for unit in work)
        return _graded(config, engine, problems, chains, lambda answer: _signals(model, drafter, answer))

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """AUROC of each signal, and its difference from the best one without a draft. All right or all wrong: None."""
        found = Detected(records)
        return Summary(VALUES.row(records, found), {"outcomes": OUTCOMES.rows([found]),
                                                    "answers": [ANSWERS.row(found, each) for each in found.detectors]}, {})

    def figures(self, config: Settings, records: list[dict], summary: Summary) -> dict[str, Figure]:
        """AUROC of all signals: the mean over tokens is filled, the maximum hollow. Without AUROCs a text says why."""
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        (outcome,), rows = summary.tables["outcomes"], summary.tables["answers"]
        made = Figure(figsize=(7.4, 4.8), layout="constrained")
        axes, names = made.subplots(), list(dict.fromkeys(row["signal"] for row in rows))
        axes.set_title(f"{outcome['wrong']} wrong answers of {outcome['n']}")
        if not 0 < outcome["wrong"] < outcome["n"]:
            missing = "no answer" if not outcome["n"] else "all are right" if not outcome["wrong"] else "all are wrong"
            axes.text(0.5, 0.5, f"{missing}, so there is no AUROC", transform=axes.transAxes, ha="center", va="center")
            return {"fig_difficulty_auroc": made}
        for row in rows:
            colour, marker, _ = _LOOKS[row["kind"]]
            height = names.index(row["signal"]) + {"mean": -0.17, "max": 0.17}.get(row["statistic"], 0.0)
            if row["auroc_low"] is not None:
                axes.plot([row["auroc_low"], row["auroc_high"]], [height, height], color=colour, linewidth=1.2)
            axes.plot(row["auroc"], height, color=colour, marker=marker, markersize=5,
                      markerfacecolor="white" if row["statistic"] == "max" else colour)
        axes.axvline(0.5, color=INK, linewidth=0.8)
        axes.set(xlabel="AUROC (0.5: no information)", ylim=(len(names) - 0.5, -0.5))
        axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        handles = [Line2D([], [], color=colour, marker=marker, linestyle="", label=text)
                   for colour, marker, text in _LOOKS.values()]
        handles += [Line2D([], [], color=INK, marker="o", linestyle="", markerfacecolor=face, label=text)
                    for text, face in (("mean over tokens", INK), ("maximum over tokens", "white"))]
        made.legend(handles=handles, loc="outside upper left", ncols=3)
        return {"fig_difficulty_auroc": made}


def _graded(config: Settings, engine: ChainRunner, problems: dict[str, Problem], chains: Iterator[tuple[Unit, Chain]],
            along: Callable[[Trajectory], dict]) -> Iterator[tuple[Unit, dict]]:
    """Yields the record of each chain, `along(answer)` and the grade, as soon as the grading processes have decided."""
    pool = config.grader.start()
    measured: dict[Unit, dict] = {}

    def decided(wait: bool = False) -> Iterator[tuple[Unit, dict]]:
        for unit, grade in settled(pool, wait):
            yield unit, {"level": problems[unit.problem].level, "verdict": grade.verdict, **measured.pop(unit)}

    try:
        for done in engine.steps(chains):
            if done is not None:
                unit = cast("Unit", done.tag)
                problem = problems[unit.problem]
                if done.result is None:
                    yield unit, {"level": problem.level, "verdict": NOT_DRAWN, "num_tokens": 0, "skipped": done.failure}
                else:
                    answer = done.result.trajectory
                    measured[unit] = along(answer)
                    text = engine.model.decode(answer.tokens)
                    pool.submit(unit, continued(build.ending(engine.model, answer.prompt), text, config.model.thinking),
                                problem.answer, problem.question)
            yield from decided()
        yield from decided(wait=True)
    finally:
        pool.close()


def _signals(model: LanguageModel, drafter: DFlashDrafter, answer: Trajectory) -> dict:
    """The record of an answer, without its grade."""
    from dflash_mcmc.engine.batching.interface import NOT_NUMBERS

    if answer.length < drafter.num_drafted + 1:
        return {"num_tokens": answer.length, "skipped": f"shorter than {drafter.num_drafted + 1} tokens"}
    found = along(model, drafter, answer.prompt, answer.tokens)
    if not all(np.isfinite(values).all() for values in found.values()):
        return {"num_tokens": answer.length, "skipped": NOT_NUMBERS}
    return {"num_tokens": answer.length, "num_compared": len(found["total_variation"]),
            **{statistic: {name: float(f"{of(values):.6g}") for name, values in found.items()}
               for statistic, of in (("mean", np.mean), ("max", np.max))}}


def along(model: LanguageModel, drafter: DFlashDrafter, prompt: np.ndarray, answer: np.ndarray) -> dict[str, np.ndarray]:
    """Signals by name, float64 (n,), of the drafted slots in an answer's whole blocks.

    The draft does not predict anchors or the tail.

    Args:
        prompt, answer: token ids, int64; the answer is at least a block long.
    """
    import torch

    from dflash_mcmc.forcing import sequences

    with torch.no_grad():
        tokens = torch.from_numpy(np.concatenate([prompt, answer])).to(model.device)
        block_size = drafter.num_drafted + 1
        anchors = torch.tensor(sequences.whole_blocks(len(prompt), len(answer), block_size), device=model.device)
        reading = sequences.read(model, tokens[None], drafter.tapped_layers)
        drafted = sequences.drafted_along(drafter, reading, tokens, anchors).flatten(0, 1)
        positions = (anchors[:, None] + torch.arange(1, block_size, device=model.device)).flatten()
        before, step = reading.hidden[0, positions - 1], sequences.positions_at_once(model.vocab_size)
        pieces = [of_tokens(model.logits(before[start : start + step]), drafter.logits(drafted[start : start + step]),
                            tokens[positions[start : start + step]]) for start in range(0, len(positions), step)]
    return {name: torch.cat([piece[name] for piece in pieces]).double().cpu().numpy() for name in pieces[0]}


def of_tokens(target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Signals of tokens int64 (n,), each float32 (n,), from logits of target and draft, float32 (n, vocabulary).

    Ids without a token have logits -inf in both.
    """
    import torch

    def mean(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        # A weight of 0 adds nothing, even if the value is infinite.
        return torch.where(weights > 0, weights * values, 0.0).sum(dim=-1)

    log_p, log_q = target.log_softmax(dim=-1), draft.log_softmax(dim=-1)
    p, q = log_p.exp(), log_q.exp()
    chosen = tokens[:, None]
    values = (mean(p, log_p - log_q).clamp(min=0.0), mean(q, log_q - log_p).clamp(min=0.0), 0.5 * (p - q).abs().sum(dim=-1),
              -torch.minimum(p, q).sum(dim=-1).log().clamp(max=0.0), -mean(q, log_q), -log_q.gather(1, chosen)[:, 0],
              (target.argmax(dim=-1) != draft.argmax(dim=-1)).float(),
              -mean(p, log_p), -log_p.gather(1, chosen)[:, 0], 1.0 - p.amax(dim=-1))
    return dict(zip((*SIGNALS[DRAFT], *SIGNALS[TARGET]), values, strict=True))


_NO_ESTIMATE = IntervalEstimate(None, None, None, 0)


class Answers:
    """Answers, right or wrong, grouped by problem.

    Args:
        problems: the problem of each answer.
        wrong: whether each answer is wrong.
    """

    def __init__(self, problems: Sequence[str], wrong: Sequence[bool] | np.ndarray):
        self.wrong, names = np.asarray(wrong, bool), list(dict.fromkeys(problems))
        index_of = {name: index for index, name in enumerate(names)}
        self._place, self._count = np.array([index_of[name] for name in problems], np.int64), len(names)
        # All statistics need only sums over a problem's answers, so that each problem is one observation.
        self._clusters = Clusters(names)

    def pairs(self, scores: np.ndarray) -> np.ndarray:
        """The number of pairs in which the wrong answer has the larger score, float64 (problems, problems).

        The wrong answer is from the first problem, the right one from the second. Ties count half. The sum over all problems
        is Mann-Whitney's U.
        """
        wrong, right = np.flatnonzero(self.wrong), np.flatnonzero(~self.wrong)
        order = right[np.argsort(scores[right], kind="stable")]
        upto = np.zeros((len(right) + 1, self._count))  # number of right answers of each problem among the first n
        upto[np.arange(1, len(right) + 1), self._place[order]] = 1.0
        upto = upto.cumsum(axis=0)
        below, not_above = (np.searchsorted(scores[order], scores[wrong], side=side) for side in ("left", "right"))
        pairs = np.zeros((self._count, self._count))
        np.add.at(pairs, self._place[wrong], 0.5 * (upto[below] + upto[not_above]))
        return pairs

    def auroc(self, pairs: np.ndarray) -> IntervalEstimate:
        """The AUROC of pairs. The difference of two signals' pairs gives the paired difference of their AUROCs."""
        wrong, right = (self._sums(kind) for kind in (self.wrong, ~self.wrong))

        def of(counts: np.ndarray) -> np.ndarray:
            return divided(((counts @ pairs) * counts).sum(axis=1), (counts @ wrong) * (counts @ right))

        return self._clusters.statistic(of)._replace(n=len(self.wrong))

    def mean(self, values: np.ndarray, among: np.ndarray) -> IntervalEstimate:
        """Mean over the answers that `among`, bool (answers,), selects."""
        return self._clusters.ratio(self._sums(values * among), self._sums(among))

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each problem's answers, float64 (problems,)."""
        return np.bincount(self._place, values, self._count)


class Detector(NamedTuple):
    """A value of each answer that may predict whether it is wrong."""

    name: str
    kind: str
    statistic: str | None
    """`mean` or `max` over the answer's tokens; None for what is not computed from tokens."""
    values: np.ndarray
    """float64 (answers,)."""
    pairs: np.ndarray
    auroc: IntervalEstimate

    @property
    def label(self) -> str:
        """Name and statistic."""
        return self.name if self.statistic is None else f"{self.name} {self.statistic}"


class Detected:
    """The measured answers and the AUROC of every signal. Without both right and wrong answers no signal has one."""

    def __init__(self, records: Sequence[dict]):
        self.measured = measured = [record for record in records if "skipped" not in record]
        self.answers = Answers([record["problem"] for record in measured], [one["verdict"] != "correct" for one in measured])
        self.wrong = self.answers.wrong
        self.decided = bool(self.wrong.any() and not self.wrong.all())
        self.detectors = [self._detector(name, kind, statistic, [record[statistic][name] for record in measured])
                          for kind, names in SIGNALS.items() for name in names for statistic in ("mean", "max")]
        for name in ("num_tokens", "level"):
            values = [record[name] for record in measured]
            if all(isinstance(value, int) for value in values):  # a level may be a word, or unknown
                self.detectors.append(self._detector(name, OTHER, None, values))
        self.by_label = {each.label: each for each in self.detectors}
        self.best_draft, self.best_baseline = self._best(DRAFT), self._best(TARGET, OTHER)

    def _detector(self, name: str, kind: str, statistic: str | None, values: Sequence[float]) -> Detector:
        scores = np.array(values, np.float64)
        pairs = self.answers.pairs(scores) if self.decided else np.empty((0, 0))
        return Detector(name, kind, statistic, scores, pairs, self.answers.auroc(pairs) if self.decided else _NO_ESTIMATE)

    def _best(self, *kinds: str) -> Detector | None:
        """The detector of these kinds with the largest AUROC, the first one in a tie."""
        return max((each for each in self.detectors if each.kind in kinds),
                   key=lambda each: each.auroc.value or 0.0) if self.decided else None

    def difference(self, one: Detector | None, other: Detector | None) -> IntervalEstimate:
        """The paired difference of two AUROCs; none unless there are two signals."""
        if not self.decided or one is None or other is None or one is other:
            return _NO_ESTIMATE
        return self.answers.auroc(one.pairs - other.pairs)

    def mean(self, label: str, among: np.ndarray, minus: bool = False) -> IntervalEstimate:
        """The mean of a detector, or of 1 minus it, over some answers."""
        if not len(among):
            return _NO_ESTIMATE
        values = self.by_label[label].values
        return self.answers.mean(1.0 - values if minus else values, among)


OUTCOMES = Table("outcomes", (
    ("share_wrong", "share of wrong answers",
     lambda found: found.answers.mean(found.wrong, np.ones(len(found.wrong))) if len(found.wrong) else _NO_ESTIMATE),
    ("acceptance_right", "mean expected acceptance of the draft, 1 - total variation, over right answers",
     lambda found: found.mean("total_variation mean", ~found.wrong, minus=True)),
    ("entropy_right", "mean entropy of the target over right answers, nats",
     lambda found: found.mean("target_entropy mean", ~found.wrong)),
    ("acceptance_wrong", "the same acceptance over wrong answers",
     lambda found: found.mean("total_variation mean", found.wrong, minus=True)),
    ("entropy_wrong", "the same entropy over wrong answers, nats",
     lambda found: found.mean("target_entropy mean", found.wrong)),
    ("wrong", "wrong answers", lambda found: int(found.wrong.sum())),
    ("n", "measured answers", lambda found: len(found.wrong)),
))
ANSWERS = Table("answers", (
    ("signal", "name of the signal; larger values should mean wrong", lambda found, row: row.name),
    ("kind", "what the signal needs: `draft`, `target`, or `other` for neither", lambda found, row: row.kind),
    ("statistic", "mean or maximum over the tokens of an answer; empty for a signal of the whole answer",
     lambda found, row: row.statistic),
    ("auroc", "share of pairs of a wrong and a right answer that the signal orders correctly; 0.5 is chance",
     lambda found, row: row.auroc),
    ("minus_best", "`auroc` minus that of the best signal that needs no draft, on the same answers",
     lambda found, row: found.difference(row, found.best_baseline)),
    ("minus_entropy", "`auroc` minus that of the target's entropy with the same statistic",
     lambda found, row: found.difference(row, found.by_label[f"target_entropy {row.statistic or 'mean'}"])),
))
VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("num_skipped_not_correct", "answers among them that are not correct",
     lambda records, found: sum("skipped" in record and record["verdict"] != "correct" for record in records)),
    ("num_no_answer", "measured answers without a final answer",
     lambda records, found: sum(record["verdict"] == NO_ANSWER for record in found.measured)),
    ("num_wrong", "measured answers that are wrong", lambda records, found: int(found.wrong.sum())),
    ("best_draft", "signal of the draft with the largest AUROC, chosen on these answers",
     lambda records, found: found.best_draft and found.best_draft.label),
    ("best_draft_auroc", "its AUROC", lambda records, found: found.best_draft.auroc if found.best_draft else _NO_ESTIMATE),
    ("best_baseline", "signal without a draft with the largest AUROC, chosen on these answers",
     lambda records, found: found.best_baseline and found.best_baseline.label),
    ("best_baseline_auroc", "its AUROC",
     lambda records, found: found.best_baseline.auroc if found.best_baseline else _NO_ESTIMATE),
    ("difference", "difference of the two AUROCs",
     lambda records, found: found.difference(found.best_draft, found.best_baseline)),
))
ALL = (VALUES, OUTCOMES, ANSWERS)


_LOOKS = {DRAFT: (RIGHT, "o", "needs the draft"), TARGET: (WRONG, "s", "the target alone"), OTHER: ("#666666", "D", "neither")}
"""Colour, marker and meaning of each kind of signal, distinct in greyscale too."""
