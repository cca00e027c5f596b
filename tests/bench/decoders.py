"""The parts of the benchmark about decoders, and about `draft_mh`, whose proposals are from a draft.

All cases run the same chains. They take turns, so a slow minute of the machine affects all of them. Ratios are relative to
plain decoding in the same run. Part h compares tokens per second, because decoders that only preserve the law draw answers of
other lengths. Part i compares problems per hour. In part i the engine skips tokens that repeat the current sequence, except
with the decoder `speculative_rejection`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection
from dflash_mcmc.draft import Draft
from dflash_mcmc.draft.ngram import NgramDraft
from dflash_mcmc.draft.self import SelfDraft
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.sampler.draft_mh import DraftMH
from dflash_mcmc.sampler.greedy import Greedy
from tests.bench.measure import PLAIN, TURNS, Decoding, Measurement, Sizes, joined, power_mh, run, temperature
from tests.bench.subject import Subject

_PLAIN_TEMPERATURE = 0.25
"""The only temperature for a subject without a draft."""
_SHORT_BLOCK = 4
"""Blocks of a quarter of the draft's are measured if they are not shorter."""
_NGRAM = NgramDraft(num_drafted=7)


class Case(NamedTuple):
    """The setting that one row of a table measures."""

    name: str
    sampler: Sampler
    decoding: Decoding
    batches: Sequence[int]


def drawing(subject: Subject, sizes: Sizes) -> list[dict]:
    """(h) Decoders compared with plain decoding, by law. The number of slots is in brackets."""
    rows = []
    for value in (0.0, 0.25, 1.0) if subject.draft else (_PLAIN_TEMPERATURE,):
        law, sampler = (f"temperature {value:g}", temperature(value)) if value else ("greedy", Greedy(alpha=1.0))
        cases = [Case(decoding.name, sampler, decoding, sizes.decoder_slots) for decoding in _decodings(subject, value)]
        if subject.draft and 1 in sizes.decoder_slots:
            cases.append(Case("match, the target itself", sampler, match("self", SelfDraft(num_drafted=4), value), (1,)))
        found = _in_turn(subject, cases, sizes)
        plain = found[PLAIN.name]
        for name, by_batch in found.items():
            together = joined(list(by_batch.values()))
            rows.append({"decoder": name, "law": law, "tau": together.accepted_length,
                         "forwards/token": together.mean_cost("target_forwards") / together.mean_drawn,
                         **_by_batch("tokens/s", sizes, {batch: got.tokens_per_second for batch, got in by_batch.items()}),
                         **_by_batch("ratio", sizes, {batch: got.tokens_per_second / plain[batch].tokens_per_second
                                                  for batch, got in by_batch.items()})})
    return rows


def chains(subject: Subject, sizes: Sizes) -> list[dict]:
    """(i) power_mh with 4 blocks of 2 steps by each decoder, and draft_mh. The number of slots is in brackets."""
    if not subject.draft:
        return []
    law = 1.0 / power_mh().alpha
    cases = [Case(decoding.name, power_mh(num_blocks=4), decoding, sizes.decoder_slots)
             for decoding in _decodings(subject, law)]
    proposing = Decoding("draft", draft=subject.draft)
    cases += [Case(f"draft_mh, {name}", sampler, proposing, sizes.decoder_slots) for name, sampler in _draft_mh(law).items()]
    half = sizes._replace(waves=max(1, sizes.waves // 2), decoder_chains=max(1, sizes.decoder_chains // 2))
    found = _in_turn(subject, cases, half)  # a chain takes as long as several answers
    plain, rows = found[PLAIN.name], []
    for name, by_batch in found.items():
        together = joined(list(by_batch.values()))
        rows.append({"by": name, "tau": None if name.startswith("draft_mh") else together.accepted_length,
                     "forwards/token": together.mean_cost("target_forwards") / together.mean_drawn,
                     "accepts": together.acceptance, "moved": together.moved,
                     "token-forwards": together.mean_cost("token_forwards"),
                     "target forwards": together.mean_cost("target_forwards"),
                     **_by_batch("tokens/s", sizes, {batch: got.tokens_per_second for batch, got in by_batch.items()}),
                     **_by_batch("problems/h", sizes, {batch: got.per_hour for batch, got in by_batch.items()}),
                     **_by_batch("ratio", sizes, {batch: got.per_hour / plain[batch].per_hour
                                                  for batch, got in by_batch.items()})})
    return rows


def _decodings(subject: Subject, value: float) -> list[Decoding]:
    """The decoders to compare for samples at this temperature."""
    found = [PLAIN, match("ngram", _NGRAM, 0.0)]
    if not subject.draft:
        return found
    longer = subject.draft.load(subject.model).num_drafted + 2
    shorter = [longer // 2, *([longer // 4] if longer // 4 >= _SHORT_BLOCK else [])]
    best = [match("draft's best", subject.draft, 0.0),
            *(match(f"blocks of {size}", dataclasses.replace(subject.draft, block_size=size), 0.0) for size in shorter)]
    if value:  # at temperature 0 this case equals "match, draft's best"
        best.append(match("draft sampled", subject.draft, value))
    found[1:1] = best
    for name, verification in (("rejection", "token"), ("rejection by block", "block")):
        decoder = SpeculativeRejection(draft_temperature=None, verification=verification, trace=False, fault=None)
        found.append(Decoding(name, decoder, subject.draft))
    return found


def match(name: str, draft: Draft, value: float) -> Decoding:
    """The decoder `speculative_match` with a draft at this temperature."""
    decoder = SpeculativeMatch(draft_temperature=value, trace=False, fault=None, fault_window=None)
    return Decoding(f"match, {name}", decoder, draft)


def _draft_mh(law: float) -> dict[str, DraftMH]:
    """Samplers with the target and the schedule of power_mh; `law` is the temperature of their draft."""
    draft = DraftMH(alpha=power_mh().alpha, draft_temperature=law, num_blocks=4, num_steps=2, proposal="draft",
                    draft_weight=0.5, proposal_temperature=None)
    return {"draft": draft, "mixture": dataclasses.replace(draft, proposal="mixture")}


def _in_turn(subject: Subject, cases: Sequence[Case], sizes: Sizes) -> dict[str, dict[int, Measurement]]:
    """Measurements by case and number of slots. Each case runs in several turns over the same problems."""
    found: dict[str, dict[int, Measurement]] = {case.name: {} for case in cases}
    for batch in sizes.decoder_slots:
        mine = [case for case in cases if batch in case.batches]
        count = _chains_a_turn(subject, sizes, batch)
        turns = [[run(subject, case.sampler, batch, count, label=f"{case.name}, {batch} slots", decoding=case.decoding,
                      first=turn * count) for case in mine] for turn in range(TURNS)]
        for case, runs in zip(mine, zip(*turns, strict=True), strict=True):
            found[case.name][batch] = joined(runs)
    return found


def _chains_a_turn(subject: Subject, sizes: Sizes, batch: int) -> int:
    """Chains per turn. The mid-size model, which has no draft, runs fewer, because each of its chains takes seconds."""
    if not subject.draft:
        return -(-batch // TURNS)
    return max(-(-sizes.decoder_chains // TURNS), sizes.waves * batch if batch > 1 else 1)


def _by_batch(name: str, sizes: Sizes, values: dict[int, float]) -> dict[str, float | None]:
    return {f"{name} ({batch})": values.get(batch) for batch in sizes.decoder_slots}
