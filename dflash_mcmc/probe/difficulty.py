"""Does the draft's disagreement with the target predict that an answer is wrong?

This tests the closing idea of the document "Speculative MCMC Probe" (section 6.3, "a free difficulty detector"). p is the
target's distribution of a token at temperature 1, q the draft's in one forward per block. All signals are larger for harder
tokens.

AUROC is the probability that a wrong answer has a larger signal than a right one, where ties count half: Mann-Whitney's U
divided by the number of pairs (Hanley & McNeil 1982). Signals are never reversed, so an AUROC below 0.5 means that the signal
is smaller for wrong answers. The best signal and the best baseline are chosen on the same answers. That favours both, and the
intervals, which resample problems, do not include it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dflash_mcmc.chains import build, cost
from dflash_mcmc.components import Settings, name_of, options_with, register
from dflash_mcmc.draft import check_features, load_feature_drafter
from dflash_mcmc.engine.batching.interface import NOT_NUMBERS, ChainRunner
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading import settled
from dflash_mcmc.grading.extraction import continued
from dflash_mcmc.grading.verdicts import NO_ANSWER, NOT_DRAWN
from dflash_mcmc.ops import Chain
from dflash_mcmc.probe import PROBLEMS, SKIPPED, Observations, ProblemProbe, Summary, Table, Unit, Work, check_block, measured
from dflash_mcmc.statistics.estimates import IntervalEstimate, divided
from dflash_mcmc.types import Problem, Trajectory, UnitCost

if TYPE_CHECKING:
    import torch

    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.speculative.drafter import DFlashDrafter

DRAFT, TARGET, OTHER = "draft", "target", "other"
"""Kinds of signals: those that need the draft, those of the target alone, and those that need neither."""
SIGNALS = {
    DRAFT: ("kl_target_draft", "kl_draft_target", "total_variation", "minus_log_acceptance", "draft_entropy",
            "draft_surprisal", "top1_disagreement"),
    TARGET: ("target_entropy", "target_surprisal", "least_confidence"),
}
"""Signals of a token by kind.

Those of the draft: KL(p || q), KL(q || p), 1 - expected acceptance, -log expected acceptance, H(q), -log q(token), argmax p is
not argmax q. Expected acceptance, the sum of min(p, q), is the probability that rejection sampling accepts a token drawn from
q. Those of the target: H(p), -log p(token), 1 - max p (Settles 2009, "Active learning literature survey"). All signals are in
nats except total variation, top-1 disagreement and least confidence.
"""


@register("probe", "difficulty")
@dataclass(slots=True, kw_only=True)
class Difficulty(ProblemProbe):
    """Whether draft-target disagreement distinguishes wrong answers from right ones.

    The sampler draws answers, which are graded and teacher-forced through target and draft in whole blocks. Every answer that
    is not graded correct is wrong; one that could not be drawn is left out. Signals of draft and target are compared on the
    same tokens. A draft disagrees more in later slots, whatever the token: `draft.block_size=2` measures the first slot alone.
    """

    uses = ("model", "draft", "blend", "sampler", "decoder", "dataset", "grader")
    unit = "answer"
    measures_chains = True
    needs_draft = True

    def check(self, config: Settings) -> None:
        check_features(config, "probe=difficulty")
        if not config.blend.is_null:
            raise ConfigError("blend", name_of(config.blend), f"{options_with('blend', 'is_null')} with probe=difficulty: its "
                              "signals are the plain target's")

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
        check_block(config, drafter.num_drafted + 1)
        prompts = build.prompts(config, model, [problems[unit.problem] for unit in work.units])
        engine = config.engine.start(config, model, max(map(len, prompts.values())), len(work.units))
        chains = ((unit, build.chain(config, config.sampler, unit.problem, unit.chain, prompts[unit.problem], model))
                  for unit in work)
        return _graded(config, engine, problems, chains, lambda answer: _signals(model, drafter, answer))

    def summarise(self, config: Settings, records: list[dict]) -> Summary:
        """AUROC of each signal, and its difference from the best one without a draft. All right or all wrong: None."""
        found = detected(records)
        return Summary(VALUES.row(found), {"outcomes": OUTCOMES.rows([found["answers"]]),
                                           "answers": ANSWERS.rows({**found, **each} for each in found["detectors"])}, {})


def _graded(config: Settings, engine: ChainRunner, problems: dict[str, Problem], chains: Iterator[tuple[Unit, Chain]],
            along: Callable[[Trajectory], dict]) -> Iterator[tuple[Unit, dict]]:
    """Yields the record of each chain, `along(answer)` and the grade, as soon as the grading processes have decided."""
    pool = config.grader.start()
    waiting: dict[Unit, dict] = {}

    def decided(wait: bool = False) -> Iterator[tuple[Unit, dict]]:
        for unit, grade in settled(pool, wait):
            yield unit, {"level": problems[unit.problem].level, "verdict": grade.verdict, **waiting.pop(unit)}

    try:
        for done in engine.steps(chains):
            if done is not None:
                unit = cast("Unit", done.tag)
                problem = problems[unit.problem]
                if done.result is None:
                    yield unit, {"level": problem.level, "verdict": NOT_DRAWN, "num_tokens": 0, "skipped": done.failure}
                else:
                    answer = done.result.trajectory
                    waiting[unit] = along(answer)
                    text = engine.model.decode(answer.tokens)
                    pool.submit(unit, continued(build.ending(engine.model, answer.prompt), text, config.model.thinking),
                                problem.answer, problem.question)
            yield from decided()
        yield from decided(wait=True)
    finally:
        pool.close()


def _signals(model: "LanguageModel", drafter: "DFlashDrafter", answer: Trajectory) -> dict:
    """The record of an answer, without its grade: mean and maximum of each signal over the tokens that the draft predicts."""
    if answer.length < drafter.num_drafted + 1:
        return {"num_tokens": answer.length, "skipped": f"shorter than {drafter.num_drafted + 1} tokens"}
    found = along(model, drafter, answer.prompt, answer.tokens)
    if not all(np.isfinite(values).all() for values in found.values()):
        return {"num_tokens": answer.length, "skipped": NOT_NUMBERS}
    return {"num_tokens": answer.length, "num_compared": len(found["total_variation"]),
            **{statistic: {name: float(f"{of(values):.6g}") for name, values in found.items()}
               for statistic, of in (("mean", np.mean), ("max", np.max))}}


def along(model: "LanguageModel", drafter: "DFlashDrafter", prompt: np.ndarray, answer: np.ndarray) -> dict[str, np.ndarray]:
    """Signals by name, float64 (n,), of the drafted slots in an answer's whole blocks.

    The draft does not predict anchors or the tail.

    Args:
        prompt, answer: token ids, int64; the answer is at least a block long.
    """
    import torch

    from dflash_mcmc.forcing import sequences

    with torch.no_grad():
        target, draft, labels = (part.flatten(0, 1) for part in sequences.forced_blocks(drafter, prompt, answer)[2:])
        pieces = [of_tokens(model.logits(target[piece]), drafter.logits(draft[piece]), labels[piece])
                  for piece in sequences.pieces(model, len(labels))]
    return {name: torch.cat([piece[name] for piece in pieces]).double().cpu().numpy() for name in pieces[0]}


def of_tokens(target: "torch.Tensor", draft: "torch.Tensor", tokens: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """Signals of tokens int64 (n,), each float32 (n,), from logits of target and draft, float32 (n, vocabulary).

    Ids without a token have logits -inf in both.
    """
    def mean(weights: "torch.Tensor", values: "torch.Tensor") -> "torch.Tensor":
        # A weight of 0 adds nothing, even if the value is infinite.
        return (weights * values).where(weights > 0, 0.0).sum(dim=-1)

    log_p, log_q = target.log_softmax(dim=-1), draft.log_softmax(dim=-1)
    p, q = log_p.exp(), log_q.exp()
    chosen = tokens[:, None]
    values = (mean(p, log_p - log_q).clamp(min=0.0), mean(q, log_q - log_p).clamp(min=0.0), 0.5 * (p - q).abs().sum(dim=-1),
              -p.minimum(q).sum(dim=-1).log().clamp(max=0.0), -mean(q, log_q), -log_q.gather(1, chosen)[:, 0],
              (target.argmax(dim=-1) != draft.argmax(dim=-1)).float(),
              -mean(p, log_p), -log_p.gather(1, chosen)[:, 0], 1.0 - p.amax(dim=-1))
    return dict(zip((*SIGNALS[DRAFT], *SIGNALS[TARGET]), values, strict=True))


class Answers(Observations):
    """Answers, whether they are `wrong`, and their values of each detector of wrong answers, which are other columns.

    Without both right and wrong answers nothing has an AUROC.
    """

    def __init__(self, columns: dict[str, Any]):
        super().__init__(columns)
        self.wrong = self.values["wrong"].astype(bool)
        self.decided = bool(self.wrong.any() and not self.wrong.all())

    def auroc(self, label: str | None, *minus: str | None) -> IntervalEstimate:
        """The AUROC of a detector, or its paired difference from that of another one."""
        if not self.decided or label is None or not {None, label}.isdisjoint(minus):
            return IntervalEstimate()
        scores = [self.values[name].astype(np.float64) for name in (label, *filter(None, minus))]

        def of(weights: np.ndarray) -> np.ndarray:
            wrong, right = np.where(self.wrong, weights, 0.0), np.where(self.wrong, 0.0, weights)
            won = []  # by detector the weight of the pairs in which the wrong answer has the larger value; ties count half
            for own in scores:
                order = np.argsort(own, kind="stable")
                upto = np.concatenate([np.zeros((len(weights), 1)), right[:, order].cumsum(axis=1)], axis=1)
                below, not_above = (np.searchsorted(own[order], own, side=side) for side in ("left", "right"))
                won.append((wrong * 0.5 * (upto[:, below] + upto[:, not_above])).sum(axis=1))
            return divided(won[0] - sum(won[1:]), wrong.sum(axis=1) * right.sum(axis=1))

        return self.clusters.statistic(of)


def detected(records: list[dict]) -> dict[str, Any]:
    """The measured `answers`, the `detectors` (names of the rows of `ANSWERS`), and the best ones with and without a draft."""
    kept = measured(records)
    values = {"problem": [record["problem"] for record in kept], "wrong": [record["verdict"] != "correct" for record in kept]}
    rows = [(name, kind, statistic) for kind, names in SIGNALS.items() for name in names for statistic in ("mean", "max")]
    values |= {f"{name} {statistic}": [record[statistic][name] for record in kept] for name, _, statistic in rows}
    for name in ("num_tokens", "level"):
        values[name] = [record[name] for record in kept]
        if all(isinstance(value, int) for value in values[name]):  # a level may be a word, or unknown
            rows.append((name, OTHER, None))  # type: ignore[arg-type]
    answers = Answers(values)
    detectors = []
    for name, kind, statistic in rows:
        label = name if statistic is None else f"{name} {statistic}"
        detectors.append({"signal": name, "kind": kind, "statistic": statistic, "label": label, "auroc": answers.auroc(label)})

    def best(among: bool) -> dict[str, Any] | None:
        """The detector with the largest AUROC, the first one in a tie."""
        mine: list[Any] = [each for each in detectors if (each["kind"] == DRAFT) == among]
        return max(mine, key=lambda each: each["auroc"].value or 0.0) if answers.decided else None

    return {"records": records, "kept": kept, "answers": answers, "detectors": detectors, "draft": best(True),
            "baseline": best(False)}


def _mean(label: str, wrong: bool, minus: bool = False) -> Callable[[Answers], IntervalEstimate]:
    """The mean of a detector, or of 1 minus it, over the wrong or the right answers."""
    return lambda of: of.row(of.wrong == wrong).mean(1.0 - of.values[label] if minus else label)


def _of_best(best: str, field: str) -> Callable[[dict], Any]:
    return lambda of: of[best] and of[best][field]


OUTCOMES = Table("outcomes", (
    ("share_wrong", "share of wrong answers", lambda of: of.mean("wrong")),
    ("acceptance_right", "mean expected acceptance of the draft, 1 - total variation, over right answers",
     _mean("total_variation mean", False, minus=True)),
    ("entropy_right", "mean entropy of the target over right answers, nats", _mean("target_entropy mean", False)),
    ("acceptance_wrong", "the same acceptance over wrong answers", _mean("total_variation mean", True, minus=True)),
    ("entropy_wrong", "the same entropy over wrong answers, nats", _mean("target_entropy mean", True)),
    ("wrong", "wrong answers", lambda of: int(of.wrong.sum())),
    ("n", "measured answers", lambda of: of.n),
))
ANSWERS = Table("answers", (
    ("signal", "name of the signal; larger values should mean wrong"),
    ("kind", "what the signal needs: `draft`, `target`, or `other` for neither"),
    ("statistic", "mean or maximum over the tokens of an answer; empty for a signal of the whole answer"),
    ("auroc", "share of pairs of a wrong and a right answer that the signal orders correctly; 0.5 is chance"),
    ("minus_best", "`auroc` minus that of the best signal that needs no draft, on the same answers",
     lambda of: of["answers"].auroc(of["label"], of["baseline"] and of["baseline"]["label"])),
    ("minus_entropy", "`auroc` minus that of the target's entropy with the same statistic",
     lambda of: of["answers"].auroc(of["label"], f"target_entropy {of['statistic'] or 'mean'}")),
))
VALUES = Table("values", (
    PROBLEMS, SKIPPED,
    ("num_skipped_not_correct", "answers among them that are not correct",
     lambda of: sum("skipped" in record and record["verdict"] != "correct" for record in of["records"])),
    ("num_no_answer", "measured answers without a final answer",
     lambda of: sum(record["verdict"] == NO_ANSWER for record in of["kept"])),
    ("num_wrong", "measured answers that are wrong", lambda of: int(of["answers"].wrong.sum())),
    ("best_draft", "signal of the draft with the largest AUROC, chosen on these answers", _of_best("draft", "label")),
    ("best_draft_auroc", "its AUROC", lambda of: (of["draft"] or {"auroc": IntervalEstimate()})["auroc"]),
    ("best_baseline", "signal without a draft with the largest AUROC, chosen on these answers", _of_best("baseline", "label")),
    ("best_baseline_auroc", "its AUROC", lambda of: (of["baseline"] or {"auroc": IntervalEstimate()})["auroc"]),
    ("difference", "difference of the two AUROCs",
     lambda of: of["answers"].auroc(*(best and best["label"] for best in (of["draft"], of["baseline"])))),
))
ALL = (VALUES, OUTCOMES, ANSWERS)
