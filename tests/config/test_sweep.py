"""Sweeps: the documented points, the same by `-m` and by `sweep=`, and what becomes of their jobs."""

import itertools
import re
from collections import Counter

import pytest
from omegaconf import OmegaConf

from dflash_mcmc.__main__ import main
from dflash_mcmc.blend.layer import LayerBlend
from dflash_mcmc.chains import cost
from dflash_mcmc.components import name_of
from dflash_mcmc.config import command as cli
from dflash_mcmc.config.command import differing
from dflash_mcmc.config.help import options
from dflash_mcmc.config.identity import (
    changes,
    identity_hash,
    identity_of,
    label_of,
    labels_of,
    name_of_path,
    plain,
    point_labels,
    run_folder,
    with_fields,
)
from dflash_mcmc.config.schema import Job
from dflash_mcmc.errors import UserError
from dflash_mcmc.types import RunResult
from tests.refusals import command_is_refused


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.prepare()


def jobs_of(*arguments: str):
    return cli.check_command(list(arguments)).jobs


def configs_of(*arguments: str):
    return [job.config for job in jobs_of(*arguments)]


@pytest.mark.slow
def test_alpha_beta_is_the_documents_grid():
    configs = configs_of("sweep=alpha_beta")
    assert [(c.sampler.alpha, c.blend.beta) for c in configs] == list(
        itertools.product((2.0, 4.0, 8.0), (0.01, 0.05, 0.1, 0.2)))
    assert {(c.condition.name, name_of(c.sampler), name_of(c.blend)) for c in configs} == {("blend_ps", "power_mh", "layer")}


@pytest.mark.slow
def test_other_grids_are_those_of_the_documents():
    assert [c.sampler.num_steps for c in configs_of("sweep=steps")] == [0, 2, 10]
    assert [c.sampler.proposal_temperature for c in configs_of("sweep=proposal_temperature")] == [1 / 4, 1 / 2, 1.0]
    assert [(c.condition.name, c.num_chains) for c in configs_of("sweep=majority")] == [
        ("temp", 8), ("ps", 8), ("blend_ps", 8)]
    assert {c.num_chains for c in configs_of("sweep=majority", "num_chains=4")} == {4}
    assert [c.condition.name for c in configs_of("sweep=conditions")] == ["greedy", "temp", "ps", "blend_greedy", "blend_ps"]
    signs = configs_of("sweep=signflip")
    assert {(name_of(c.sampler), c.blend.direction == "random") for c in signs} == set(
        itertools.product(("greedy", "temperature", "power_mh"), (False, True)))
    assert len({c.blend.beta for c in signs}) == 7


def test_points_that_a_sweep_writes_out_are_chosen_by_option_and_combined_with_lists():
    configs = configs_of("sweep=equal_cost", "condition=smc,greedy", "seed=1,2")
    assert [(c.condition.name, getattr(c.sampler, "num_particles", None), c.seed) for c in configs] == [
        ("greedy", None, 1), ("greedy", None, 2), ("smc", 8, 1), ("smc", 8, 2), ("smc", 32, 1), ("smc", 32, 2)]


@pytest.mark.slow
def test_settings_of_equal_cost_cost_the_same_by_their_plan():
    """With the lengths that the file names a point costs 8 or 32 answers with one prompt, within a quarter."""
    planned = {(config.condition.name, index): cost.estimate(config).token_forwards for index, config in enumerate(
        configs_of("sweep=equal_cost", "assumed.prompt_length=114", "assumed.answer_length=0.6", "dataset.max_new_tokens=512",
                   "dataset.limit=1")) if config.condition.name != "greedy"}
    off = {name for (name, _), spent in planned.items()
           if min(abs(spent / (113 + draws * 307) - 1.0) for draws in (8, 32)) > 0.25}
    assert off == {"isir"}  # its smallest setting costs 13 draws


@pytest.mark.slow
def test_sources_are_swept_with_the_same_betas_and_the_model_alone_once():
    configs = configs_of("sweep=sources", "blend.model=tiny")
    counts = Counter((name_of(c.blend), not c.blend.is_null and c.blend == LayerBlend(beta=c.blend.beta, direction="random"))
                     for c in configs)
    assert counts == {("none", False): 1, ("layer", False): 4, ("layer", True): 4, ("prompt", False): 4, ("model", False): 4}
    assert {c.blend.beta for c in configs if not c.blend.is_null} == {-0.5, -0.2, 0.2, 0.5}


@pytest.mark.slow
def test_evidence_compares_draws_with_chains_that_see_one_test_of_a_question():
    configs = configs_of("sweep=evidence", "experiment=demo", "grader.allow_execution=true", "dataset.path=tasks.jsonl")
    assert [(name_of(c.sampler), c.num_chains, name_of(c.potential)) for c in configs] == [
        ("greedy", 1, "none"), ("temperature", 4, "none"), ("power_mh", 1, "none"), ("power_mh", 1, "examples"),
        ("power_smc", 1, "none")]
    assert {(name_of(c.dataset), c.dataset.shown, c.grader.examples) for c in configs} == {("mbpp", "first", True)}


def test_every_sweep_is_tested():
    assert set(options()["sweep"]) == {"alpha_beta", "steps", "proposal_temperature", "majority", "full", "votes",
                                        "benchmarks", "code", "equal_cost", "conditions", "signflip", "sources", "mixing",
                                        "evidence"}


@pytest.mark.parametrize(("arguments", "parts"), [
    (["sweep=alphabeta"], ("sweep: unknown option 'alphabeta'", "did you mean 'alpha_beta'")),
    (["-m", "sweep=steps,alpha_beta"], ("sweep: given several values", "allowed: one")),
    (["sweep=alpha_beta", "condition=greedy"], ("blend.beta",)),
    (["condition=greedy", "blend.beta=0.1"],
     ("blend.beta: unknown field (did you mean blend=layer blend.beta=0.1 without condition=greedy or ",)),
    (["-m", "condition=greedy,ps", "blend.beta=0.1"], ("blend.beta: unknown field (did you mean blend=layer or blend=",)),
    (["-m", "condition=ps,temp", "sampler.temprature=1"], ("sampler.temprature", "did you mean 'temperature'", "num_steps")),
    (["-m", "condition=ps,blend_ps", "blend.beta=0.1,2"], ("blend.beta: given 2.0; allowed: a number >= -10 and <= 1",)),
    (["-m", "probe=layer_rank,logit_blend", "sampler.alpha=2"], ("sampler.alpha: given '2'; allowed: no override of",)),
    (["sweep=equal_cost", "condition=greedy,blend_ps"], ("condition: given 'blend_ps'; allowed: options of",)),
    (["sweep=equal_cost", "sampler.num_steps=3"], ("sampler.num_steps: given '3'; allowed: no value",)),
    (["--cfg", "job", "-m", "seed=1,2"], ("--cfg", "one run")),
    (["-m", "sampler.alpha=interval(1,2)"], ("cannot sweep 'sampler.alpha=interval(1,2)': ", "; allowed: values, or a range")),
    (["seed=1,2"], ("seed: given several values", "-m before")),
    (["-m", "hydra/sweeper=nope"], ("hydra/sweeper: 'nope' is not installed", "basic")),
    (["-m", "condition=ps", "sampler.alpha=2,-1"],
     ("sampler.alpha: given -1.0; allowed: ", "; at the point sampler.alpha=-1")),
    (["-m", "hydra/sweeper=basic", "seed=1,2"], ("hydra/sweeper: given basic, which has no effect here",)),
])
def test_mistakes_are_one_line_before_anything_runs(arguments, parts):
    command_is_refused(arguments, *parts)


def shown(*arguments: str) -> list[tuple[str, str]]:
    """What differs between the jobs of a command, and what does not apply to each."""
    jobs = jobs_of(*arguments)
    return [(re.sub(r"\w+\.(\w+=)", r"\1", label), " ".join(job.left_out))
            for label, job in zip(differing([job.overrides for job in jobs]), jobs, strict=True)]


def test_a_value_is_left_out_where_it_does_not_apply_and_equal_points_are_one_job():
    alpha, temperature, beta = "sampler.alpha", "sampler.temperature", "blend.beta"
    arguments = ("-m", "condition=greedy,temp,ps,blend_ps", f"{alpha}=2,4", f"{temperature}=0.25,1", f"{beta}=0.05,0.1")
    assert shown(*arguments) == [
        ("condition=greedy", f"{alpha} {temperature} {beta}"),
        ("condition=temp temperature=0.25", f"{alpha} {beta}"), ("condition=temp temperature=1", f"{alpha} {beta}"),
        ("condition=ps alpha=2", f"{temperature} {beta}"), ("condition=ps alpha=4", f"{temperature} {beta}"),
        *((f"condition=blend_ps alpha={power} beta={share}", temperature) for power in (2, 4) for share in (0.05, 0.1))]
    configs = configs_of(*arguments)
    assert [config.sampler.temperature for config in configs[1:3]] == [0.25, 1.0]
    assert [(config.sampler.alpha, config.blend.beta) for config in configs[5:]] == list(
        itertools.product((2.0, 4.0), (0.05, 0.1)))
    assert len({identity_hash(config) for config in configs}) == 9
    assert cli.check_command(arguments).num_points == 32


@pytest.mark.slow
def test_only_points_that_do_the_same_are_one_job():
    assert shown("-m", "sampler=greedy", "num_chains=1,2", "sampler.alpha=2,4") == [
        ("num_chains=1", "sampler.alpha"), ("num_chains=2", "sampler.alpha")]
    assert shown("-m", "sampler=greedy", "seed=1,2", "hardware.num_slots=1,2") == [
        (f"seed={seed} num_slots={slots}", "") for seed in (1, 2) for slots in (1, 2)]
    # The temperature is 1/alpha where it is null, so that alpha has an effect there.
    assert shown("-m", "sampler=temperature", "sampler.alpha=2,4", "sampler.temperature=null,0.1") == [
        ("alpha=2 temperature=null", ""), ("temperature=0.1", "sampler.alpha"), ("alpha=4 temperature=null", "")]
    assert shown("-m", "condition=ps", "sampler.proposal=base,matched") == [("condition=ps", "sampler.proposal")]
    assert shown("-m", "seed=1,1") == [("seed=1", "")]


@pytest.mark.slow
def test_labels_have_a_component_s_fields_beside_runs_that_have_it_alone():
    jobs = cli.check_command(["-m", "condition=temp", "decoder=plain,speculative_match,speculative_rejection", "draft=tiny",
                              "tracker=none"]).jobs
    assert point_labels(jobs) == [f"temp decoder={name}" for name in ("plain", "speculative_match", "speculative_rejection")]
    configs = [job.config for job in jobs]
    assert labels_of(["temp"] * 3, list(map(identity_of, configs)), list(map(plain, configs))) == [
        "temp decoder=plain draft=none", "temp decoder=speculative_match draft=dflash",
        "temp decoder=speculative_rejection draft=dflash"]


def test_a_sweep_of_seeds_says_what_pools_draws(capsys):
    cli.check_command(["-m", "condition=temp", "seed=0,1,2", "tracker=none"])
    assert "num_chains=3 draws as many samples of each problem in one run" in capsys.readouterr().err
    cli.check_command(["-m", "condition=temp,ps", "seed=1", "tracker=none"])
    assert "num_chains" not in capsys.readouterr().err


def test_a_probe_leaves_out_the_groups_that_it_does_not_use():
    assert shown("-m", "probe=none,layer_rank", "condition=ps,temp", "sampler.alpha=2") == [
        ("probe=none condition=ps alpha=2", ""), ("probe=none condition=temp alpha=2", ""),
        ("probe=layer_rank", "condition sampler.alpha")]


def test_the_plan_is_printed_before_the_first_point(executed, capsys):
    assert ended("-m", "condition=greedy,ps", "sampler.alpha=2,4", "tracker=none", "dataset.limit=3", "num_chains=2") == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0][:3] == ["run", "does not apply", "samples"]
    assert [row[:3] for row in cells[2:]] == [
        ["greedy", "sampler.alpha", "6"], ["ps alpha=2", "", "6"],
        ["ps alpha=4", "", "6"], ["total", "", "18"]]
    assert "points left out because they are the same run as another point: 1" in lines
    assert lines[-1] == "3 jobs: 3 done now, 0 already complete, 0 failed"
    assert len(executed.configs) == 3


class Executed:
    """Replaces the run: remembers the configurations and does what a test asks for. Jobs of one identity are one run."""

    def __init__(self):
        self.configs, self.titles, self.fails, self.complete = [], [], {}, set()

    def __call__(self, job):
        config = job.config
        self.configs.append(config)
        self.titles.append(job.title)
        folder = run_folder(config, identity_hash(config))
        error = self.fails.get((name_of(config.sampler), getattr(config.sampler, "alpha", None)))
        if error:
            raise error
        new = 0 if folder in self.complete else 5
        self.complete.add(folder)
        return RunResult(folder, {}, new, 0, 0)


@pytest.fixture
def executed(monkeypatch):
    monkeypatch.setattr("dflash_mcmc.runner.loop.execute", executed := Executed())
    monkeypatch.setattr("dflash_mcmc.__main__._print_tables", lambda tables: None)
    return executed


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return stopped.value.code


SWEEP = ("-m", "sampler=power_mh", "sampler.alpha=2,4", "tracker=none")


def test_the_bar_of_a_job_has_its_place_and_what_the_sweep_sets(executed):
    assert ended("-m", "condition=ps,blend_ps", "sampler.alpha=2,4", "blend.beta=0.2", "seed=7", "tracker=none") == 0
    # 4 is the default of alpha, and is named all the same; the seed is the same everywhere.
    assert executed.titles == ["[1/4] ps alpha=2", "[2/4] ps alpha=4", "[3/4] blend_ps beta=0.2 alpha=2",
                               "[4/4] blend_ps beta=0.2 alpha=4"]


def test_points_of_one_run_are_told_apart_from_finished_ones(executed, capsys):
    """They differ in their names: the run is recorded under one of them."""
    assert ended("-m", "condition=greedy", "condition.name=one,two", "tracker=none") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "2 jobs: 1 done now, 0 already complete, 1 equal to the run of an earlier job, 0 failed")


def test_a_job_that_fails_stops_no_other_and_is_run_again(executed, capsys):
    executed.fails = {("power_mh", 2.0): UserError("hardware.num_slots: given 9; allowed: at most 3")}
    assert ended(*SWEEP) == 2
    output = capsys.readouterr()
    assert [config.sampler.alpha for config in executed.configs] == [2.0, 4.0]
    assert output.out.splitlines()[-1] == "2 jobs: 1 done now, 0 already complete, 1 failed"
    reason = "hardware.num_slots: given 9; allowed: at most 3"
    assert [line for line in output.err.splitlines() if reason in line] == [
        f"failed: sampler.alpha=2: {reason}"]
    assert output.err.splitlines()[-1] == "failed, with the reasons above: sampler.alpha=2"
    executed.fails = {}
    assert ended(*SWEEP) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 jobs: 1 done now, 1 already complete, 0 failed"


def test_a_bug_in_one_job_shows_its_traceback_and_the_others_run(executed, capsys):
    executed.fails = {("power_mh", 2.0): RuntimeError("CUDA out\nof memory"), ("power_mh", 8.0): UserError("known")}
    assert ended(*SWEEP, "sampler.alpha=2,4,8") == 1
    output = capsys.readouterr()
    assert output.err.count("Traceback") == 1
    assert "failed: sampler.alpha=2: RuntimeError: CUDA out of memory" in output.err.splitlines()
    assert "failed: sampler.alpha=8: known" in output.err.splitlines()
    assert len(executed.configs) == 3
    assert output.out.splitlines()[-1] == "3 jobs: 1 done now, 0 already complete, 2 failed"


def test_ctrl_c_stops_all(executed, capsys):
    executed.fails = {("power_mh", 2.0): KeyboardInterrupt()}
    assert ended(*SWEEP) == 130
    assert len(executed.configs) == 1
    assert "run the same command again" in capsys.readouterr().err


def test_in_a_launch_of_several_processes_each_goes_on_after_a_failed_job(executed, capsys, monkeypatch):
    """Nobody waits for another: what is pending is claimed in the run's folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    executed.fails = {("power_mh", 2.0): UserError("busy")}
    ended(*SWEEP)
    assert len(executed.configs) > 1
    assert "error (process 1): busy" in capsys.readouterr().err


def test_a_field_of_a_swept_group_need_not_be_there_without_it(executed):
    """Hydra composes a sweep once without its swept groups, where blend=none has no beta."""
    assert ended("-m", "condition=blend_greedy,blend_ps", "blend.beta=0.3", "dataset.ids=[arith-001,'arith-002']",
                 "dataset.prompt='{question} = \"?\", please'", "sampler.alpha=2", "tracker=none", "name=other") == 0
    assert [(c.condition.name, c.blend.beta, c.sampler.alpha) for c in executed.configs] == [
        ("blend_greedy", 0.3, 2.0), ("blend_ps", 0.3, 2.0)]
    assert {c.dataset.prompt for c in executed.configs} == {'{question} = "?", please'}
    assert [problem.id for problem in executed.configs[0].dataset.problems()] == ["arith-001", "arith-002"]


# Labels name the fields that differ from the condition's own values.

@pytest.mark.parametrize(("overrides", "label"), [
    (["condition=temp"], "temp"),
    (["condition=temp", "sampler.temperature=1.5"], "temp temperature=1.5"),
    (["condition=temp", "sampler.temperature=0.25"], "temp"),  # 1/alpha, given directly
    (["condition=ps", "sampler.alpha=2", "sampler.num_steps=10"], "ps alpha=2 num_steps=10"),
    (["condition=ps", "sampler.proposal_temperature=0.5"], "ps proposal_temperature=0.5"),
    (["condition=ps", "sampler.num_steps=10", "sampler.cut=entropy"], "ps cut=entropy num_steps=10"),
    (["condition=smc", "sampler.alpha=2"], "smc alpha=2"),  # its temperature only follows alpha
    (["condition=replica_exchange", "sampler.alphas=[1,2,3]"], "replica_exchange alphas=[1, 2, 3]"),
    (["condition=replica_exchange", "sampler.temperatures=[1,1,1]"], "replica_exchange temperatures=[1, 1, 1]"),
    (["condition=ps", "sampler.entropy_power=2", "sampler.early_reject=off"], "ps"),  # neither changes an output
    (["condition=blend_ps", "blend.beta=-0.5", "blend.norm=final"], "blend_ps beta=-0.5 norm=final"),
    (["condition=temp", "sampler.presence_penalty=1"], "temp presence_penalty=1"),
    (["experiment=power_sampling_paper", "condition=ps", "model=tiny", "hardware=local"], "ps"),  # its own number of steps
    (["experiment=power_sampling_paper", "condition=ps", "model=tiny", "hardware=local", "sampler.num_steps=2"],
     "ps num_steps=2"),
    (["sampler=temperature", "decoder=speculative_match", "draft=tiny", "decoder.draft_temperature=0.5"],
     "dflash_temperature_speculative_match draft_temperature=0.5"),
    (["probe=rejection_sampling"], "rejection_sampling"),
], ids=" ".join)
def test_a_label_names_what_differs(make_config, overrides, label):
    config = make_config(*overrides)
    assert label_of(config).replace(".0", "") == label
    on_disk = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(plain(config)))))
    identity = {"sampler": "any"}
    assert labels_of([config.label()], [identity], [on_disk])[0].replace(".0", "") == label


def test_a_run_that_is_older_than_a_field_has_its_value_off(make_config):
    values = plain(make_config("condition=temp", "sampler.top_k=2"))
    del values["sampler"]["presence_penalty"], values["sampler"]["frequency_penalty"]
    assert changes(values) == {"sampler.top_k": 2}
    assert changes({**values, "sampler": {"name": "elsewhere", "k": 2}}) == {}, "a plugin that is not here"


def test_fields_that_vary_are_in_every_label_of_a_condition():
    labels = labels_of(["ps", "ps", "greedy"], [{"sampler.alpha": alpha} for alpha in (4.0, 2.0, 4.0)], [{}, {}, {}])
    assert labels == ["ps alpha=4", "ps alpha=2", "greedy"]


def test_a_run_has_one_name_before_and_after_it_and_names_what_differs_between_the_runs(make_config):
    """The tiny model has 8 layers, so that -3 is 5. An alpha that all runs share is named where one run is shown alone."""
    made = [make_config("condition=blend_ps", f"blend.layer={layer}", "sampler.alpha=2") for layer in (-3, 3)]
    assert [label_of(config) for config in made] == ["blend_ps alpha=2", "blend_ps layer=3 alpha=2"]
    jobs = [Job(config, ("condition=blend_ps", f"blend.layer={layer}", "sampler.alpha=2"))
            for config, layer in zip(made, (-3, 3), strict=True)]
    told = ["blend_ps layer=5", "blend_ps layer=3"]
    assert point_labels(jobs) == told
    assert labels_of(["blend_ps"] * 2, list(map(identity_of, made)), list(map(plain, made))) == told


def test_fields_are_in_the_same_order_in_all_labels():
    """One field is a condition's own value in one run, and differs from it in the other."""
    def config(beta: float) -> dict:
        return {"blend": {"name": "layer", "layer": -3, "norm": "none", "beta": beta}}

    identities = [{"sampler.alpha": alpha, "blend.beta": beta} for alpha, beta in ((2.0, 0.1), (4.0, 0.05))]
    labels = labels_of(["blend_ps", "blend_ps"], identities, [config(0.1), config(0.05)])
    assert labels == ["blend_ps beta=0.1 alpha=2", "blend_ps beta=0.05 alpha=4"]


ONE, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


@pytest.mark.parametrize(("paths", "shown"), [
    (("/data/smollm2", "/data/a/qwen3"), ["smollm2", "qwen3"]),
    (("Qwen/Qwen2.5-Math-7B-Instruct", "models/a/base/"), ["Qwen/Qwen2.5-Math-7B-Instruct", "base"]),
    (("/a/base", "/b/base"), ["base@01234567", "base@fedcba98"]),
    ((None, None), ["01234567", "fedcba98"])])
def test_models_are_named_by_their_folder_or_hub_name(paths, shown):
    identities = [{"model.content": content} for content in (ONE, OTHER)]
    labels = labels_of(["ps", "ps"], identities, [{"model": {"path": path}} for path in paths])
    assert labels == [f"ps model={name}" for name in shown]


def test_one_model_in_two_places_is_not_told_apart():
    configs = [{"model": {"path": path}} for path in ("/a/one", "/b/two")]
    assert labels_of(["ps", "ps"], [{"model.content": ONE}] * 2, configs) == ["ps", "ps"]


def test_a_folder_of_two_parts_is_no_hub_name(tmp_path, monkeypatch):
    (tmp_path / "models/base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert name_of_path("models/base") == "base"
    assert name_of_path("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(("path", "shown"), [("/data/gsm8k.jsonl", "ps dataset=gsm8k"),
                                             ("/data/hard.jsonl", "ps dataset=gsm8k path=hard.jsonl")])
def test_an_option_and_its_file_are_named_once(path, shown):
    assert with_fields("ps", {"dataset": "gsm8k", "dataset.path": path}) == shown
    assert with_fields("ps", {"dataset.path": path}) == f"ps dataset={path.rpartition('/')[2]}"
