"""`draft=ngram`: prompt lookup."""

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.records import read_records
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


def test_a_blend_or_a_proposal_needs_a_draft_with_densities(make_config):
    for overrides in (["blend=draft"], ["sampler=draft_mh"]):
        with pytest.raises(UserError, match=r"draft: given 'ngram'; allowed: tiny, smollm2( or|,) dflash"):
            make_config("draft=ngram", *overrides)
