"""Experiments of `conf/experiment` that stand for more than a choice of options."""

from __future__ import annotations

import json

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.run import execute
from dflash_mcmc.store import RECORDS


def tokens_of(result) -> list[list[int]]:
    records = [json.loads(line) for line in (result.folder / RECORDS).read_text().splitlines()]
    return [record["tokens"] for record in sorted(records, key=lambda record: record["problem"])]


def test_faults_run_beside_the_right_decoder(make_config):
    short = ("experiment=faults", "dataset.limit=2", "dataset.max_new_tokens=32")
    right, wrong = execute(make_config(*short)), execute(make_config(*short, "decoder.fault=greedy_bonus"))
    assert tokens_of(right) != tokens_of(wrong)
    assert right.folder != wrong.folder


@pytest.mark.parametrize("choice", [("decoder=speculative_match", "decoder.fault=greedy_bonus", "draft=ngram"),
                                    ("decoder=speculative_rejection", "decoder.fault=argmax_proposal", "draft=self")])
def test_a_fault_is_taken_in_the_experiment_alone(make_config, choice):
    assert make_config("experiment=faults", *choice).name == "faults"
    with pytest.raises(UserError, match=r"decoder.fault: given .*; allowed: null; a faulty decoder runs under name=faults"):
        make_config("experiment=demo", *choice)
