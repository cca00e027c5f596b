"""`decoder.candidates`: exact laws of both rules on trees, with candidates drawn with and without replacement."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.decoder.speculative_match import SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection
from dflash_mcmc.engine.batching.logits_processor import weigh
from dflash_mcmc.engine.oracle.tabular import TabularDraft, TabularEngine
from dflash_mcmc.engine.speculative import rules
from dflash_mcmc.engine.speculative.drafter import Anchors, NgramDrafter
from dflash_mcmc.engine.speculative.speculation import TokenTree, is_shape
from dflash_mcmc.errors import UserError
from dflash_mcmc.ops import Draw
from dflash_mcmc.testing import PROMPT, EnumeratedKey, Enumerator, law_of, product_target, total_variation
from dflash_mcmc.types import Trajectory
from tests.speculation import DRAFTS, LAWS, MODEL, SMALL, differing, speculative_error


def match(draft, candidates, temperature=0.0):
    return SpeculativeMatch(draft_temperature=temperature, candidates=candidates).speculation(DRAFTS[draft])


def reject(draft, candidates, temperature=None, **changes):
    decoder = SpeculativeRejection(draft_temperature=temperature, candidates=candidates, **changes)
    return decoder.speculation(DRAFTS[draft] if isinstance(draft, str) else draft)


def block_error(speculation, law, horizon=2, model=SMALL):
    """Total variation between the law of a block that plain decoding continues, and that of plain decoding alone."""
    engine, plain = TabularEngine(model, None, speculation), TabularEngine(model)

    def drawn(key):
        path = Trajectory.start(PROMPT)
        operation = Draw(path, horizon, law, key)
        for token, interval in engine._next(operation, path):
            path = engine._append(path, token, operation, interval)
            if path.complete(horizon):
                return path
        return plain.answer(operation._replace(trajectory=path))

    return total_variation(law_of(drawn), product_target(plain, horizon, law))


@pytest.mark.parametrize(("draft", "replacement", "law"), [
    pytest.param(draft, replacement, law, marks=[pytest.mark.slow] * (law in ("counts", "penalty") and draft == "small"))
    for draft in ("small", "small_sequential") for replacement in (False, True) for law in LAWS])
def test_rejection_is_exact(draft, replacement, law):
    for candidates in ([3], [2, 1]):
        assert block_error(reject(draft, candidates, replacement=replacement), LAWS[law]) <= 1e-12


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_rejection_is_exact_at_another_temperature_of_the_draft(temperature):
    for draft, candidates in (("small", [2, 0, 1]), ("small_sequential", [2, 1])):
        assert block_error(reject(draft, candidates, temperature), LAWS["temperature"]) <= 1e-12


def test_rejection_is_exact_over_several_blocks():
    for replacement in (False, True):
        assert speculative_error(reject("small", [2], replacement=replacement), LAWS["temperature"], 2, SMALL) <= 1e-12


class Choosy(TabularDraft):
    """Ends a branch after some tokens; a wrong one does so by the token that it offers."""

    def __init__(self, right: bool):
        super().__init__(3, 2, seed=2)
        self._right = right

    def offers(self, prefix, drafted, token):
        return (drafted[-1:] != (1,)) if self._right else token != 1


def test_a_branch_may_end_early_but_not_by_its_own_token():
    law = LAWS["temperature"]
    assert block_error(reject(Choosy(True), [2, 1, 1]), law) <= 1e-12
    assert block_error(reject(Choosy(False), [2]), law) > 0.01


@pytest.mark.parametrize("draft", ["small", "small_sequential"])
def test_published_and_plausible_mistakes_are_caught(draft):
    law = LAWS["temperature"]
    assert block_error(reject(draft, [2], fault="tree_rejection"), law, 1) > 0.01
    mixed = reject(draft, [2])._replace(rule=rules.reject_tree_replaced)  # drawn without replacement, judged as drawn with it
    assert block_error(mixed, law, 1) > 0.01
    assert block_error(reject(draft, [2], replacement=True)._replace(rule=rules.reject_tree), law, 1) > 1e-3
    assert list(rules.TREE) == ["tree_rejection"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("draft", "candidates"), [
    ("parallel", [4, 1, 2]), ("sequential", [2, 2]), ("long", [3, 2, 0, 1, 1, 1, 1, 0, 1]), ("point", [3, 1])])
def test_tokens_equal_those_of_plain_decoding(draft, candidates, temperature):
    assert differing(match(draft, candidates, temperature), LAWS["temperature"], num_seeds=100) == 0


class Lookups(TabularEngine):
    """Its trees are those of prompt lookup. Where too few continuations are known, a candidate occurs twice."""

    repeated = 0

    def _tree(self, tree, operation, trajectory, chance):
        block, sequence = super()._tree(tree, operation, trajectory, chance), torch.from_numpy(trajectory.sequence)
        anchors = Anchors(slice(0, 1), None, sequence[None], torch.tensor([len(sequence) - 1]), len(sequence))
        tokens = NgramDrafter(tree.depth, 2).propose_tree(anchors, None, tree)
        paths = [()]
        for parent, token in zip(tree.parents, tokens[0].tolist(), strict=True):
            paths.append((*paths[parent], token))
        self.repeated += len(set(paths)) < len(paths)
        laws = [self._slot(operation, tuple(sequence.tolist()), trajectory.length, path) for path in paths]
        return block._replace(drafted=tokens, target=weigh(torch.from_numpy(np.stack(laws))))


@pytest.mark.parametrize("fault", [None, "tree_rejection"])
def test_rejection_of_lookups_is_exact(fault):
    law, point = LAWS["penalty"], TabularDraft(3, 3, has_density=False)
    engine = Lookups(SMALL, None, reject(point, [2, 2, 1, 1], fault=fault))
    drawn = law_of(lambda key: engine.answer(Draw(Trajectory.start(PROMPT), 4, law, key)))
    error = total_variation(drawn, product_target(TabularEngine(SMALL), 4, law))
    assert error <= 1e-12 if fault is None else error > 0.01
    assert engine.repeated > 0


def test_match_is_exact():
    assert block_error(match("small", [2, 1, 1]), LAWS["penalty"]) <= 1e-12


def test_a_tree_of_one_branch_is_a_chain():
    assert kept(reject("parallel", [1, 1])) == pytest.approx(kept(reject("parallel", None)), abs=1e-12)


def kept(speculation) -> float:
    """Expected number of accepted tokens in the first block."""
    engine, enumerator, expected = TabularEngine(MODEL, None, speculation), Enumerator(), 0.0
    path = Trajectory.start(PROMPT)
    while True:
        key = EnumeratedKey(enumerator)
        chance = engine._chance(key, 0)
        verdict = engine.speculation.rule(engine._block(Draw(path, 3, LAWS["temperature"], key), path, chance), chance)
        expected += enumerator.probability * int(verdict.accepted)
        if not enumerator.next_branch():
            return expected


def test_more_candidates_keep_more_tokens():
    one, two, independent = (kept(reject("parallel", counts, replacement=again))
                             for counts, again in (([1], False), ([2], False), ([2], True)))
    assert one + 0.01 < independent < two
    assert kept(reject("parallel", [4])) == pytest.approx(1.0, abs=1e-12)  # every token is a candidate


def test_the_shape_of_a_tree():
    shape = TokenTree((3, 2, 1, 0, 1, 2))
    assert (len(shape), shape.depth) == (9, 3)
    assert shape.parents == (0, 0, 0, 1, 1, 2, 4, 5, 5)
    assert shape.depths == (0, 1, 1, 1, 2, 2, 2, 3, 3, 3)
    assert (shape.level(1), shape.level(2), shape.nodes(2)) == ((1, 2), (4, 5), slice(4, 7))
    causal, at, keys = shape.sight(torch.tensor([[2]]), torch.arange(13))
    assert causal[0, 7].long().tolist() == [1, 1, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert (int(at[0, 7]), keys[0, 9:].tolist()) == (5, [5, 5, 5, 12])
    some = [each[:, [4, 5]] for each in shape.sight(torch.tensor([[2]]), torch.arange(13))[:2]]
    read = shape.reading((4, 5)).sight(torch.tensor([[6]]), torch.arange(13))[:2]
    assert all(map(torch.equal, some, read))
    assert all(map(is_shape, ([2], [1, 1], [2, 0, 1])))
    assert not any(map(is_shape, ([], [0], [1, 0, 1], [2, 0])))


REFUSED = {
    ("decoder.candidates=[2,0]",): r"decoder.candidates: given \[2, 0\]; allowed: counts of candidates: after the l",
    ("decoder.candidates=[1,1,1,1,1,1,1,1,1]",): r"decoder.candidates: given .*; allowed: a tree of at most 7 tokens in",
    ("decoder.candidates=[2]", "draft.adapt=online"): r"allowed: null with a draft that learns \(draft.adapt\), which does",
    ("decoder.candidates=[2]", "sampler=draft_mh", "sampler.proposal=mixture"): r"allowed: null with sampler=draft_mh",
    ("decoder.candidates=[2]", "hardware.attention=flash_attention_2"): r"allowed: null with hardware.attention=flash_attent",
    ("decoder.candidates=[2]", "decoder.verification=block"): r"decoder.verification: given 'block'; allowed: token with",
    ("decoder.replacement=true",): r"decoder.replacement: given True; allowed: false without decoder.candidates",
    ("decoder.fault=tree_rejection", "name=faults"): r"decoder.candidates: given None; allowed: two or more after a token, s",
    ("decoder.candidates=[2]", "decoder.fault=reject_then_p", "name=faults"): r"allowed: null with decoder.fault=reject_th",
}


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_what_a_tree_does_not_go_with_is_one_line(make_config, given):
    with pytest.raises(UserError, match=REFUSED[given]):
        make_config("sampler=temperature", "decoder=speculative_rejection", "draft=tiny", *given)


def test_the_identity_has_candidates(make_config):
    common = ("sampler=temperature", "decoder=speculative_rejection", "draft=tiny")
    hashes = [identity_hash(make_config(*common, *more)) for more in (
        (), ("decoder.candidates=[2]",), ("decoder.candidates=[2]", "decoder.replacement=true"))]
    assert len(set(hashes)) == 3
