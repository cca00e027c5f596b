"""`draft=dspark`: runs with the embedded checkpoint, and refused settings."""

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.records import read_records
from tests.runs import execute

COMMON = ("sampler=temperature", "sampler.alpha=1", "dataset.limit=3", "dataset.max_new_tokens=32")


def records(folder) -> dict:
    return {(record["problem"], record["chain"]): record for record in read_records(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["tiny_dspark", "tiny_dflash2"])
def test_records_do_not_depend_on_the_rounding_of_a_block(make_config, draft):
    """A batched verification rounds differently than single steps. Tokens are the same; log p differs in its last digits."""
    plain = records(execute(make_config(*COMMON)).folder)
    drafted = records(execute(make_config(*COMMON, "decoder=speculative_match", f"draft={draft}")).folder)
    for name, record in drafted.items():
        assert record["tokens"] == plain[name]["tokens"]
        assert abs(record["log_p"] - plain[name]["log_p"]) < 1e-4
        assert record["tokens_drafted"] == 7 * record["blocks_drafted"]
    assert sum(record["tokens_kept"] for record in drafted.values()) > sum(r["blocks_drafted"] for r in drafted.values())


@pytest.mark.parametrize("draft", ["tiny_dspark", "tiny_dflash2"])
@pytest.mark.parametrize("user", ["blend=draft", "sampler=draft_mh"])
def test_uses_that_need_logits_of_a_whole_block_are_refused(make_config, user, draft):
    with pytest.raises(UserError, match=r"draft: given '(dspark|dflash2)'; allowed: tiny, smollm2,? .* with") as error:
        make_config(user, f"draft={draft}")
    assert "\n" not in str(error.value)
