"""`draft=ngram`: prompt lookup."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from dflash_mcmc.engine.speculative.drafter import Anchors, NgramDrafter
from dflash_mcmc.engine.speculative.speculation import TokenTree
from dflash_mcmc.errors import UserError
from dflash_mcmc.store.reading import read_records
from tests.runs import execute


def records(folder) -> dict:
    return {(record["problem"], record["chain"]): record for record in read_records(folder)}


def test_a_run_has_the_tokens_of_plain_decoding(make_config):
    # With top_k, a drafted token may have log-probability minus infinity, which JSON cannot represent.
    common = ("sampler=temperature", "sampler.alpha=2", "sampler.top_k=5", "dataset.limit=4", "dataset.max_new_tokens=48")
    plain = records(execute(make_config(*common)).folder)
    result = execute(make_config(*common, "decoder=speculative_match", "draft=ngram", "decoder.trace=true"))
    assert result.folder.name.startswith("ngram-temperature-speculative_match-arith-")
    for name, record in records(result.folder).items():
        assert record["tokens"] == plain[name]["tokens"]
        assert record["blocks_drafted"] == len(record["walk"]) > 0
        assert record["target_forwards"] - plain[name]["target_forwards"] == -record["tokens_kept"] + len(
            [b for b in record["walk"] if b["gained"] <= b["accepted"]])


def candidates(tokens: list[int], counts: tuple[int, ...], longest: int = 2) -> list[int]:
    anchors = Anchors(slice(0, 1), cast("object", None), torch.tensor([tokens]), torch.tensor([len(tokens) - 1]), len(tokens))
    return NgramDrafter(9, longest).propose_tree(anchors, cast("object", None), TokenTree(counts))[0].tolist()


def test_a_tree_has_the_continuations_of_all_occurrences():
    """The latest of the longest occurrences first; a node goes on with those that begin with its path."""
    tokens = [1, 2, 5, 7, 1, 2, 6, 8, 9, 2, 4, 1, 2, 5, 9, 1, 2]
    #         a        b           c     d
    assert candidates(tokens, (3, 2, 1, 1)) == [5, 6, 4, 9, 7, 8, 1]
    assert candidates(tokens, (4,)) == [5, 6, 4, 5]  # there are three
    assert candidates(tokens, (1, 2, 1, 1)) == [5, 9, 7, 1, 1]
    assert candidates([3, 4], (2, 1)) == [4, 4, 4]  # none: the anchor again


def test_a_blend_or_a_proposal_needs_a_draft_with_densities(make_config):
    for overrides in (["blend=draft"], ["sampler=draft_mh"]):
        with pytest.raises(UserError, match=r"draft: given 'ngram'; allowed: tiny, smollm2( or|,) dflash"):
            make_config("draft=ngram", *overrides)


@pytest.mark.parametrize("field", ["num_drafted", "longest"])
def test_bounds(make_config, field):
    with pytest.raises(UserError, match=rf"draft.{field}: given 0; allowed: a whole number >= 1"):
        make_config("decoder=speculative_match", "draft=ngram", f"draft.{field}=0")
