"""`draft=dflash2`: the embedded checkpoint drafts candidates alone, and other networks are refused."""

from dflash_mcmc.store.records import read_records
from tests.runs import execute


def test_rejection_with_a_sparse_q(make_config):
    result = execute(make_config("sampler=temperature", "sampler.alpha=0.5", "dataset.limit=2", "dataset.max_new_tokens=24",
                                 "decoder=speculative_rejection", "draft=tiny_dflash2", "decoder.trace=true"))
    for record in read_records(result.folder):
        for block in record["walk"]:
            assert all(log_q > float("-inf") for log_q in block["log_q"])
        assert record["tokens_kept"] > 0
