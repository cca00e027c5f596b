"""Experiments of `conf/experiment`: the settings of publications, and experiments with faults."""

from __future__ import annotations

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.registry import name_of
from dflash_mcmc.run.cost import token_forwards
from dflash_mcmc.store.records import read_records
from tests.runs import execute


def tokens_of(result) -> list[list[int]]:
    return [record["tokens"] for record in sorted(read_records(result.folder), key=lambda record: record["problem"])]


def test_a_fault_changes_the_tokens_and_the_run_folder(make_config):
    short = ("experiment=faults", "dataset.limit=2", "dataset.max_new_tokens=32")
    right, wrong = execute(make_config(*short)), execute(make_config(*short, "decoder.fault=greedy_bonus"))
    assert tokens_of(right) != tokens_of(wrong)
    assert right.folder != wrong.folder


@pytest.mark.parametrize("choice", [("decoder=speculative_match", "decoder.fault=greedy_bonus", "draft=ngram"),
                                    ("decoder=speculative_rejection", "decoder.fault=argmax_proposal", "draft=self")])
def test_a_fault_is_refused_outside_its_experiment(make_config, choice):
    assert make_config("experiment=faults", *choice).name == "faults"
    with pytest.raises(UserError, match=r"decoder.fault: given .*; allowed: null; a faulty decoder runs under name=faults"):
        make_config("experiment=demo", *choice)


CONDITIONS = {"greedy": ("greedy", "none"), "temp": ("temperature", "none"), "ps": ("power_mh", "none"),
              "blend_greedy": ("greedy", "layer"), "blend_ps": ("power_mh", "layer")}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_guided_power_sampling_has_the_setting_of_the_document(make_config, condition):
    config = make_config("experiment=guided_power_sampling", f"condition={condition}")
    assert (config.name, config.model.path, config.model.dtype) == ("guided_power_sampling", "Qwen/Qwen3-4B", "bfloat16")
    assert (config.model.chat, config.model.enable_thinking) == (True, False)
    assert (name_of(config.dataset), config.dataset.max_new_tokens) == ("math500", 1024)
    assert config.dataset.prompt == (
        "Can you solve the following math problem? {question} Please reason step by step, and put your final answer within "
        "\\boxed{}.")
    assert config.dataset.num_chosen() == 104
    assert (name_of(config.sampler), name_of(config.blend)) == CONDITIONS[condition]
    if name_of(config.sampler) == "power_mh":
        assert (config.sampler.num_blocks, config.sampler.num_steps, config.sampler.alpha) == (16, 2, 4.0)
    if name_of(config.sampler) != "greedy":
        assert config.sampler.law().temperature == 0.25
    if name_of(config.blend) == "layer":
        assert (config.blend.beta, config.blend.layer % 36) == (0.05, 33)


def test_guided_power_sampling_has_the_shards_of_the_document(make_config, shared_data):
    """The document's code uses shards 0 to 7 of 40 with `range(shard, 500, 40)`."""
    path = f"dataset.path={shared_data}/math500/test.jsonl"
    every = make_config("dataset=math500", path).dataset.problems()
    chosen = make_config("experiment=guided_power_sampling", path).dataset.problems()
    assert chosen == [every[index] for index in sorted(i for shard in range(8) for i in range(shard, 500, 40))]
    assert len(chosen) == 104


@pytest.mark.parametrize("condition", ["greedy", "temp", "ps"])
def test_power_sampling_paper_has_the_setting_of_the_paper(make_config, condition):
    config = make_config("experiment=power_sampling_paper", f"condition={condition}")
    assert (config.name, config.model.path, config.model.chat) == ("power_sampling_paper", "Qwen/Qwen2.5-Math-7B", False)
    assert (name_of(config.dataset), config.dataset.max_new_tokens, config.dataset.num_chosen()) == ("math500", 3072, 500)
    assert config.dataset.prompt.endswith("within \\boxed{{}}.")
    if condition == "ps":
        assert (config.sampler.num_blocks, config.sampler.num_steps, config.sampler.alpha) == (16, 10, 4.0)
    else:  # these samplers have no steps
        assert not hasattr(config.sampler, "num_steps")
    assert make_config("experiment=power_sampling_paper", "sampler.num_steps=3").sampler.num_steps == 3
    assert make_config("condition=ps").sampler.num_steps == 2


def test_the_cost_of_both_experiments_is_estimated(make_config):
    """The estimate uses published lengths of answers: about 600 tokens of at most 1024, and 679 of at most 3072."""
    for experiment, tokens, low, high in (("guided_power_sampling", 614, 4_000, 12_000),
                                          ("power_sampling_paper", 676, 20_000, 60_000)):
        greedy, power = (token_forwards(make_config(f"experiment={experiment}", f"condition={condition}"))
                         for condition in ("greedy", "ps"))
        assert greedy == pytest.approx(100 + tokens, rel=0.02)
        assert low < power < high
