"""`draft=self`: the target as its own draft."""

import pytest

from dflash_mcmc.store.records import read_records
from tests.runs import execute


@pytest.mark.slow
def test_all_drafted_tokens_are_kept(make_config):
    result = execute(make_config("sampler=temperature", "sampler.alpha=1", "dataset.limit=3", "dataset.max_new_tokens=40",
                                 "decoder=speculative_rejection", "draft=self"))
    for record in read_records(result.folder):
        assert record["blocks_drafted"] == -(-record["num_tokens"] // 5)  # four accepted tokens, and the bonus token
        assert record["target_forwards"] > 5 * record["blocks_drafted"]
