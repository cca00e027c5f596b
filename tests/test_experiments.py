"""Experiments of `conf/experiment`: the settings of publications."""

import pytest
from omegaconf import OmegaConf

from dflash_mcmc.chains.cost import token_forwards
from dflash_mcmc.components import name_of
from dflash_mcmc.config import command
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.options import option_files
from dflash_mcmc.report import figure
from tests.runs import execute

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


@pytest.mark.slow
def test_guided_power_sampling_has_the_shards_of_the_document(make_config, shared_data):
    """The document's code uses shards 0 to 7 of 40 with `range(shard, 500, 40)`."""
    path = f"dataset.path={shared_data}/math500/test.jsonl"
    every = make_config("dataset=math500", path).dataset.problems()
    chosen = make_config("experiment=guided_power_sampling", path).dataset.problems()
    assert chosen == [every[index] for index in sorted(i for shard in range(8) for i in range(shard, 500, 40))]
    assert len(chosen) == 104


@pytest.mark.parametrize("condition", ["base", "temp", "ps"])
def test_power_sampling_paper_has_the_setting_of_the_paper(make_config, condition):
    config = make_config("experiment=power_sampling_paper", f"condition={condition}")
    assert (config.name, config.model.path, config.model.chat) == ("power_sampling_paper", "Qwen/Qwen2.5-Math-7B", False)
    assert (name_of(config.dataset), config.dataset.max_new_tokens, config.dataset.num_chosen()) == ("math500", 3072, 500)
    assert config.dataset.prompt.endswith("within \\boxed{{}}.")
    if condition == "ps":
        assert (config.sampler.num_blocks, config.sampler.num_steps, config.sampler.alpha) == (16, 10, 4.0)
    else:  # these samplers have no steps
        assert not hasattr(config.sampler, "num_steps")
        assert config.sampler.law().temperature == {"base": 1.0, "temp": 0.25}[condition]
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


EMBEDDED = ("model=tiny", "draft=tiny", "dataset=arith")
EXPERIMENTS = tuple(option_files()["experiment"])


PROBLEMS = {"math500": (104, 1024), "gsm8k": (1319, 512), "aime24": (30, 4096), "aime25": (30, 4096), "humaneval": (164, 768)}


@pytest.fixture(scope="class")
def composing():
    """One composer for the tests of a class. It keeps Hydra initialised while they run."""
    with command.composer("config") as composer:
        yield composer


class TestComposed:
    """Compositions that need no sweep."""

    @pytest.mark.parametrize("experiment", EXPERIMENTS)
    def test_every_experiment_composes_on_the_embedded_pair(self, composing, experiment):
        """No further field is needed, also on a machine without a GPU."""
        study = experiment.startswith("study_")
        graded = ("grader=math",) if experiment == "study_code" else ()  # these problems have no programs
        config = command.job_of(composing, [f"experiment={experiment}", *EMBEDDED, *graded]).config
        assert (config.name, config.hardware.device) == (experiment, "auto")
        if name_of(config.probe) != "rejection_sampling":  # it uses no model
            assert config.model.path.endswith("assets/tiny")
            assert (name_of(config.dataset), config.dataset.max_new_tokens) == ("arith", 512 if study else 128)
            assert study or config.dataset.num_chosen() <= 100

    @pytest.mark.parametrize(("experiment", "fields"), [
        ("speculative_mcmc_probe", {
            "model.path": "Qwen/Qwen3-4B", "model.dtype": "bfloat16", "draft.path": "z-lab/Qwen3-4B-DFlash-b16",
            "probe.alpha": 4.0, "probe.num_samples": 100, "probe.position_edges": [10, 30],
            "dataset.limit": 50, "dataset.max_new_tokens": 3072, "hardware.device": "cuda"}),
        ("deep_readout_diagnostic", {
            "model.path": "Qwen/Qwen3-4B", "draft.path": "z-lab/Qwen3-4B-DFlash-b16", "probe.answers": "gold",
            "dataset.limit": 5}),
        ("phase0", {"model.path": "Qwen/Qwen3-4B", "draft.path": "z-lab/Qwen3-4B-DFlash-b16", "dataset.limit": 5}),
    ])
    def test_an_experiment_has_the_setting_of_its_document(self, composing, experiment, fields):
        values, choices, _ = composing.compose([f"experiment={experiment}"])
        assert {name: OmegaConf.select(values, name) for name in fields} == fields
        assert choices["dataset"] == ("math500" if experiment == "speculative_mcmc_probe" else "gsm8k")

    @pytest.mark.parametrize("dataset", PROBLEMS)
    def test_what_a_preset_sets_of_a_dataset_is_bound_to_it(self, composing, dataset):
        code = ("grader=code", "grader.allow_execution=true") if dataset == "humaneval" else ()
        of = ("experiment=guided_power_sampling", "condition=ps", f"dataset={dataset}", *code)
        config = command.job_of(composing, of).config
        assert (config.dataset.num_chosen(), config.dataset.max_new_tokens) == PROBLEMS[dataset]
        assert config.dataset.max_new_tokens % config.sampler.num_blocks == 0
        assert (config.dataset.shards is None) == (dataset != "math500")

    def test_values_of_the_paper_are_bound_to_its_dataset(self, composing):
        for dataset, prompt, tokens in (("math500", "paper", 3072), ("gsm8k", "document", 512)):
            values = composing.compose(["experiment=power_sampling_paper", f"dataset={dataset}"]).values
            assert (values.dataset.prompt, values.dataset.max_new_tokens, values.sampler.num_steps) == (prompt, tokens, 10)


def test_the_draft_is_tested_at_the_temperatures_of_the_document(make_config):
    assert make_config("experiment=speculative_mcmc_probe").probe.temperatures() == [1.0, 0.5, 0.25]


def points(*arguments: str) -> list:
    return [job.config for job in command.check_command(arguments).jobs]


@pytest.mark.slow
def test_the_full_sweep_has_all_problems_and_ten_steps():
    found = points("sweep=full", "experiment=guided_power_sampling")
    assert [config.condition.name for config in found] == [*CONDITIONS, "draft_blend_ps"]
    assert {config.dataset.num_chosen() for config in found} == {500}
    assert [config.sampler.num_steps for config in found if name_of(config.sampler) == "power_mh"] == [10, 10, 10]
    assert found[-1].draft.path == "z-lab/Qwen3-4B-DFlash-b16"  # the draft of the model


@pytest.mark.slow
def test_votes_are_compared_with_the_best_of_as_many_draws():
    *voting, best = points("sweep=votes", "experiment=guided_power_sampling")
    assert {(config.num_chains, config.aggregate) for config in voting} == {(8, "majority")}
    assert (best.num_chains, best.aggregate, best.sampler.num_candidates) == (1, None, 8)


@pytest.mark.slow
def test_the_benchmarks_are_whole_datasets():
    found = points("sweep=benchmarks", "experiment=guided_power_sampling", "condition=ps")
    assert {(name_of(config.dataset), config.dataset.num_chosen()) for config in found} == {
        ("gsm8k", 1319), ("aime24", 30), ("aime25", 30)}
    (code,) = points("sweep=code", "experiment=guided_power_sampling", "condition=ps", "grader.allow_execution=true")
    assert (code.dataset.num_chosen(), name_of(code.grader)) == (164, "code")


@pytest.mark.slow
def test_phase_0_is_three_runs_and_takes_another_probe():
    assert [name_of(config.probe) for config in points("experiment=phase0", *EMBEDDED)] == [
        "layer_rank", "logit_blend", "deep_readout"]
    (other,) = points("experiment=phase0", "probe=deep_readout", *EMBEDDED)
    assert name_of(other.probe) == "deep_readout"


@pytest.mark.slow
def test_phase_0_draws_the_six_figures_of_its_document_by_name(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figure, "save", lambda made, folder, name: drawn.append(name))
    for config in points("experiment=phase0", *EMBEDDED, "dataset.limit=1", "tracker=none", f"paths.outputs={tmp_path}"):
        execute(config)
    assert set(drawn) >= {"fig_architecture", "fig_block_rank_decay", "fig_bucket_rank_comparison", "fig_extended_context",
                          "fig_layer_probe_ranks", "fig_signal_decomposition"}


def test_an_unused_model_of_an_experiment_is_left_out_with_a_note(capsys):
    note.cache_clear()
    points("experiment=rejection_sampling", "model=tiny")
    assert capsys.readouterr().err == "model=tiny is left out where nothing uses it: probe=rejection_sampling\n"
    with pytest.raises(UserError, match=r"dataset.limit: given '3'; allowed: no override"):
        points("experiment=rejection_sampling", "dataset.limit=3")


def test_the_draft_of_an_unnamed_model_must_be_given():
    with pytest.raises(UserError, match=r"draft.path: not given"):
        points("model=hf", "model.path=Qwen/Qwen3-4B", "condition=draft_blend_ps")
