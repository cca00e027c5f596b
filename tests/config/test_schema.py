"""Configuration: every option composes, every mistake is one line, every field is classified."""

import copy
import dataclasses
import pickle
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dflash_mcmc import components
from dflash_mcmc.api import component
from dflash_mcmc.components import (
    GROUPS,
    MISSING,
    ROLES,
    default_of,
    has_spec,
    identity,
    register,
    registered,
    restored,
    spec_of,
)
from dflash_mcmc.config.command import check_command, compose_once
from dflash_mcmc.config.help import options
from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.config.schema import PACKAGE, Condition, Config, Paths, Slurm
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.serve.options import ServeOptions
from dflash_mcmc.statistics.summaries import NAMES
from dflash_mcmc.statistics.votes import PROGRAM_RULES, PowerVote
from dflash_mcmc.train.recipe import DraftPlan, Shape
from tests.refusals import command_is_refused, refused

MISTAKES = {
    "unknown key": (["sampler.alpah=2"], "sampler.alpah", "did you mean 'alpha'"),
    "added unknown key": (["+sampler.alpah=2"], "sampler.alpah", "did you mean 'alpha'"),
    "unknown root key": (["sede=3"], "sede", "did you mean 'seed'"),
    "unknown group": (["smapler=greedy"], "smapler", "did you mean 'sampler'"),
    "unknown parent": (["foo.bar=1"], "foo", "allowed: aggregate, assumed"),
    "field without its group": (["limit=3"], "limit", "did you mean dataset.limit"),
    "field of another option": (["blend.beta=0.1"], "blend.beta", "did you mean blend=layer blend.beta=0.1 or "),
    "unknown flag": (["--limit", "3"], "--limit", "allowed: group=option"),
    "flag without its value": (["--cfg", "x"], "--cfg", "allowed: group=option"),
    "unknown option": (["sampler=power_hm"], "sampler", "did you mean 'power_mh'"),
    "text for a number": (["sampler.alpha=hot"], "sampler.alpha", "'hot'; allowed: a number >= 1e-06"),
    "one for true": (["dry_run=1"], "dry_run", "'1'; allowed: true or false"),
    "layer outside the model": (["blend=layer", "blend.layer=8"], "blend.layer", "8; allowed: -8 to 7"),
    "prompt without question": (["dataset.prompt=hello"], "dataset.prompt", "{question}"),
    "condition against sampler": (["condition=ps", "sampler=greedy"], "sampler", "'power_mh', the value of condition=ps"),
    "condition against blend": (["condition=greedy", "blend=layer"], "blend", "'none', the value of condition=greedy"),
    "no path": (["model=hf"], "model.path", "not given; allowed: a text (folder of a checkpoint, or a hub name"),
    "path that is not": (["model.path=/no/such/folder"], "model.path", "a folder that exists"),
    "dtype": (["model.dtype=int8"], "model.dtype", "one of 'auto', 'float32'"),
    "device": (["hardware.device=tpu"], "hardware.device", "auto, cpu, cuda"),
    "chunk": (["hardware.prefill_chunk=65"], "hardware.prefill_chunk", "a power of two"),
    "not an override": (["sampler.alpha 2"], "sampler.alpha 2", "field=value"),
    "a word for help": (["help"], "help", "or --help"),
    "an option alone": (["greedy"], "greedy", "(did you mean condition=greedy or sampler=greedy?); allowed: field=value"),
    "a flag for a field": (["--temperature=0.7", "dataset.limit=4"], "--temperature=0.7", "has no dashes: temperature=0.7"),
    "field left out": (["~seed"], "seed", "not given"),
    "name that leaves the folder": (["name=../evil"], "name", "letters, digits"),
    "another root configuration": (["--config-name", "train"], "--config-name", "--config-dir"),
    "null for a group": (["sampler=null"], "sampler", "sampler"),
    "a sweep of choices that do not fit": (["-m", "sampler.alpha=choice(1,2),x"], "sampler.alpha", "cannot sweep"),
    "hub name that is none": (["model.path=foo bar", "blend=layer"], "model.path", "a hub name such as"),
    "group left out": (["~sampler"], "sampler", "not given"),
    "text for a group of fields": (["vote=weighted"], "vote", "'weighted'; allowed: values of its fields: vote.power, vote"),
    "more chains than memory holds": (["num_chains=999999999999"], "num_chains", "a whole number >= 1 and <= 1000000"),
    "endless range": (["-m", "seed=range(1,1000000000)"], "seed", "given more than 100,000 values in a sweep; allowed: at"),
    "product of ranges": (["-m", "seed=range(1,1000)", "num_chains=range(1,1000)"], "", "given 999 values in a sweep"),
    "folder of Hydra's run": (["hydra.run.dir=/x"], "hydra.run.dir", "/x, which has no effect here; allowed of Hydra's set"),
    "logging of Hydra": (["hydra/job_logging=none"], "hydra/job_logging", "which has no effect here"),
    "folder of a search that is none": (["-m", "seed=1,2", "hydra.sweep.dir=x"], "hydra.sweep.dir", "which has no effect"),
    "sweeper without a sweep": (["hydra.sweeper.params={seed: '1,2'}"], "hydra.sweeper.params", "which has no effect here"),
    "search path that is not": (["hydra.searchpath=[file:///no/such]"], "hydra.searchpath", "'file:///no/such'; allowed: a"),
    "package that is not": (["hydra.searchpath=[pkg://no.such]"], "hydra.searchpath", "'pkg://no.such'; allowed: a folder"),
    "another class of the launcher": (["hydra.launcher._target_=a.b"], "hydra.launcher._target_", "'a.b'; allowed: hydra"),
    "folder without a name": (["paths.outputs="], "paths.outputs", "allowed: a folder; . is this one"),
    "doubled id": (["dataset.ids=[arith-001,arith-001]"], "dataset.ids", "'arith-001 twice'; allowed: each once"),
    "mistake of what is shown": (["--cfg", "job", "sampler.alhpa=2"], "sampler.alhpa", "did you mean 'alpha'"),
    "brace for a number": (["sampler.alpha={2"], "sampler.alpha: given ", "allowed: a number >= 1e-06"),
    "help with a field": (["--hydra-help", "x=1"], "--hydra-help", "given with x=1; allowed: --hydra-help alone"),
    "long field": ([f"sampler.{'x' * 10_000}=1"], "sampler." + "x" * 100, "...: unknown field; allowed in sampler"),
}


@pytest.mark.filterwarnings("error")  # a warning is another line
@pytest.mark.parametrize(("arguments", "field", "allowed"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_line_that_names_field_and_what_is_allowed(arguments, field, allowed):
    command_is_refused(arguments, field, allowed)


@pytest.mark.parametrize(("arguments", "line"), [
    (["sampler=greedy", "sampler.alpha=2"], "sampler.alpha has no effect with sampler=greedy"),
    (["draft=dflash", "draft.path=/no/such"], "draft.path has no effect: nothing uses draft=dflash"),
    (["-m", "sampler=greedy", "sampler.alpha=2,4"], ""),
    (["draft=tiny", "decoder=speculative_match", "sampler.alpha=2"], "")])
def test_field_without_effect_is_one_line(arguments, line, capsys):
    check_command(arguments)
    assert [text for text in capsys.readouterr().err.splitlines() if "no effect" in text] == ([line] if line else [])


SMOLLM2 = "model.path=HuggingFaceTB/SmolLM2-135M-Instruct"
EXECUTION, MATCH = "grader.allow_execution=true", "decoder=speculative_match"
COMPANIONS = {
    "decoder=speculative_match decoder=speculative_rejection": ["draft=ngram"],
    "blend=draft sampler=draft_mh sampler=draft_refine": ["draft=tiny"],
    "probe=speculative_mcmc probe=deep_readout probe=difficulty": ["draft=tiny"],
    "blend=model blend=contrastive": ["blend.model=tiny", "sampler.proposal=matched"],
    "draft=model draft=qwen2_5_coder_0_5b": ["draft.model=tiny", MATCH],
    "draft=eagle3": ["draft.path=RedHatAI/Qwen3-8B-speculator.eagle3", MATCH],
    "draft=hf draft=qwen2_5_math_7b draft=dflash2": ["draft.path=z-lab/Qwen3-4B-DFlash-b16"],
    "model=smollm2 model=qwen2_5_coder_0_5b model=qwen2_5_coder_1_5b": [SMOLLM2],  # after fetch
    "experiment=smollm2 experiment=real experiment=study_math": [SMOLLM2],
    "experiment=study_code": [SMOLLM2, EXECUTION],
    "experiment=deep_readout_diagnostic": ["dataset=arith"],  # checks the dataset's solutions, which are on the hub
    "sweep=code sweep=evidence grader=code": [EXECUTION],
    # has no answers to grade or to go along
    "dataset=clbench": ["probe=deep_readout", "probe.answers=greedy", "draft=tiny", "dataset.path=tasks.jsonl"],
    "dataset=jsonl dataset=hub": ["dataset.path=tasks.jsonl"],
    "dataset=humaneval dataset=mbpp": ["grader=code", EXECUTION, "dataset.path=tasks.jsonl"],
    "grader=judge": ["grader.url=http://localhost:1/v1", "grader.model=judge"],
    "engine=api": ["engine.url=http://localhost:1/v1"],
    "probe=sampled_verify": ["draft=tiny", "sampler=temperature"],
    "potential=regex": ["potential.pattern=x"],
    "potential=reward": [f"potential.path={PACKAGE / 'assets/tiny'}", "potential.label=LABEL_0"],
    "potential=python": [f"potential.path={__file__}:companions"],
    "potential=examples": ["grader=code", EXECUTION],
}
"""Options that do not compose alone, and what they come with."""


def companions(choice: str) -> list[str]:
    found = [given for choices, given in COMPANIONS.items() if choice in choices.split()]
    return found[0] if found else [MATCH] if choice.startswith("draft=") and choice != "draft=none" else []


@pytest.mark.parametrize("choice", [
    pytest.param(f"{group}={name}", marks=[pytest.mark.slow] * (group not in GROUPS or name in registered(group)))
    for group, names in options().items() for name in names if (group, name) != ("model", "hf")])
def test_every_option_composes(make_config, choice):
    """By default those with a file of their own: the tests of a component compose it."""
    assert isinstance(make_config(choice, *companions(choice)), Config)


@pytest.mark.parametrize("cls", [*(c.cls for group in GROUPS for c in registered(group).values()), Config, Condition, Paths,
                                 Slurm], ids=lambda cls: cls.__name__)
def test_every_field_is_classified_and_explained(cls):
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in GROUPS or dataclasses.is_dataclass(types[field.name]):
            continue
        assert has_spec(field), f"{cls.__name__}.{field.name} is neither identity nor runtime"
        spec = spec_of(field)
        assert spec.role in ROLES
        assert spec.help
        assert spec.describe(types[field.name])


WITHOUT_UPPER_BOUND = {
    "names of things": {
        "seed", "fewshot_seed", "options_seed", "layer", "layers", "target_layers", "mask_token_id", "loss_ids",
        "output", "position_edges", "shards", "num_shards"},
    "at most what is there, and more is refused or changes nothing": {
        "limit", "num", "held_out", "fewshot", "top_k", "num_blocks", "rollout_length", "block_size",
        "num_features", "intermediate_size", "num_heads", "num_key_heads", "head_dim", "rank", "kernel_size", "group_size",
        "long_tokens", "agent_tokens", "agent_answer", "reinject_every", "max_model_len"},
    "one after another, so that more take time alone": {
        "num_steps", "steps", "warmup_steps", "num_draws", "agent_runs", "retries"},
    "a distance, or a limit": {
        "fault_window", "snapshot_every", "evaluate_every", "minutes", "array_parallelism", "max_requeues", "max_tokens",
        "max_restarts", "prompt_length", "max_prompt_tokens", "max_width", "max_waiting", "max_body_bytes"},
}


@pytest.mark.parametrize("cls", [*(c.cls for group in GROUPS for c in registered(group).values()), Config, Slurm, ServeOptions,
                                 DraftPlan, Shape], ids=lambda cls: cls.__name__)
def test_a_number_of_things_that_are_held_at_once_has_an_upper_bound(cls):
    types, unbounded = typing.get_type_hints(cls), set().union(*WITHOUT_UPPER_BOUND.values())
    for field in dataclasses.fields(cls):
        if has_spec(field) and types[field.name] in (int, int | None, list[int], list[int] | None):
            bounded = spec_of(field).le is not None or spec_of(field).lt is not None
            assert bounded or field.name in unbounded, f"{cls.__name__}.{field.name} has neither a bound nor a reason"


def test_identity_changes_with_what_can_change_an_output(make_config):
    base = identity_hash(make_config())
    for override in ("seed=1", "sampler.alpha=3", "sampler.num_steps=3", "blend=layer", "dataset.max_new_tokens=64",
                     "model.enable_thinking=true", "model.dtype=bfloat16", "sampler=greedy"):
        assert identity_hash(make_config(override)) != base, override
    assert identity_hash(make_config("blend=layer", "blend.beta=0.1")) != identity_hash(make_config("blend=layer"))


def test_identity_does_not_change_with_the_rest(make_config):
    base = identity_hash(make_config())
    for override in ("dataset.limit=3", "num_chains=4", "hardware.num_slots=2", "tracker=trackio", "experiment=demo",
                     "hardware.device=cpu", "condition=ps", "grader.num_workers=2", "name=other", "sampler.proposal=matched",
                     "sampler.proposal_temperature=0.25", "model.revision=main", "dry_run=true",
                     "assumed.acceptance=0.1", "hardware.tokens_per_second=9", "dataset.ids=[arith-007]"):
        assert identity_hash(make_config(override)) == base, override
    assert identity_hash(make_config("dataset.shards=[1]", "dataset.num_shards=3")) == base
    voted = make_config(*CHAINS, "aggregate=[power,adaptive]", "vote.power.alpha=2", "vote.adaptive.confidence=0.9")
    assert identity_hash(voted) == identity_hash(make_config(*CHAINS))
    greedy = identity_hash(make_config("sampler=greedy"))
    assert identity_hash(make_config("sampler=greedy", "sampler.alpha=2")) == greedy
    warm = identity_hash(make_config("sampler=temperature", "sampler.temperature=0.5"))
    assert identity_hash(make_config("sampler=temperature", "sampler.alpha=2")) == warm
    assert identity_hash(make_config("sampler=temperature", "sampler.temperature=0.5", "sampler.alpha=9")) == warm
    blended = identity_hash(make_config("blend=layer", "blend.layer=-3"))
    assert identity_hash(make_config("blend=layer", "blend.layer=5")) == blended
    assert identity_hash(make_config("blend=layer", "sampler.proposal=matched")) != blended


def test_what_cannot_be_registered_is_refused():
    @dataclasses.dataclass
    class Open:
        """Takes anything."""

    @dataclasses.dataclass(slots=True, kw_only=True)
    class Other(Sampler):
        """Another one."""

    for group, name, cls, said in (("sampler", "open", Open, "slots"), ("smapler", "open", Open, "groups are"),
                                   ("sampler", "greedy", Other, "already registered")):
        with pytest.raises(TypeError, match=said):
            register(group, name)(cls)


# The constructors of components: the defaults of the classes, which are those of the command line, and its checks.

EVERY = [found for group in GROUPS for found in registered(group).values()]
PowerMH, LayerBlend, HFModel = (registered(group)[name].cls for group, name in (
    ("sampler", "power_mh"), ("blend", "layer"), ("model", "hf")))


@pytest.mark.slow
def test_a_constructor_gives_the_option_of_the_command_line(monkeypatch):
    """It reads no file: this machine's own values (conf/local) are the command line's alone."""
    required = {found: {field.name: "given" for field in dataclasses.fields(found.cls) if default_of(field) == MISSING}
                for found in EVERY}
    required[registered("draft")["dflash"]] = {"path": "z-lab/Qwen3-4B-DFlash-b16"}  # conf/ names a checkpoint
    composed = {}
    for number in range(max(len(registered(group)) for group in GROUPS)):  # an option of each group at once
        chosen = [list(registered(group).values())[number % len(registered(group))] for group in GROUPS]
        given = [f"{found.group}.{name}={value}" for found in chosen for name, value in required[found].items()]
        config, _ = compose_once("config", [*(f"{found.group}={found.name}" for found in chosen), *given], Config)
        composed |= {found: getattr(config, found.group) for found in chosen}
    assert component("sampler", "power_mh") == composed[registered("sampler")["power_mh"]]
    monkeypatch.setattr("dflash_mcmc.config.compose.compose", None)
    for found, given in required.items():
        assert found.cls(**given) == composed[found]
        for name in given:
            with refused(start=f"{found.group}.{name}: given nothing; allowed: "):
                found.cls(**{other: "given" for other in given if other != name})


def test_every_default_is_allowed():
    wrong = [f"{found.group}={found.name}: {field.name}" for found in EVERY for field in dataclasses.fields(found.cls)
             if (default := default_of(field)) != MISSING and not spec_of(field).admits(default)]
    assert not wrong


def test_a_field_keeps_what_is_given_in_its_type():
    made = PowerMH(alpha=2, num_blocks=np.int64(4), top_p=np.float32(0.5), proposal_temperature=None)
    assert (made.alpha, made.num_blocks, made.top_p, made.num_steps) == (2.0, 4, 0.5, 2)
    assert [type(value) for value in (made.alpha, made.num_blocks, made.top_p)] == [float, int, float]
    assert registered("sampler")["replica_exchange"].cls(alphas=(1, 2)).alphas == [1.0, 2.0]
    assert HFModel(path=Path("a/b")).path == "a/b"
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == dataclasses.replace(made) == made


def test_defaults_are_not_shared():
    sampler = registered("sampler")["replica_exchange"].cls
    sampler().alphas.append(9.0)
    assert 9.0 not in sampler().alphas


@pytest.mark.parametrize(("given", "said"), [
    ({"rule": "publised"}, "sampler.rule: given 'publised'; allowed: one of 'exact', 'published'"),
    ({"top_p": 2}, "sampler.top_p: given 2.0; allowed: a number > 0 and <= 1"),
    ({"alpha": -1}, "sampler.alpha: given -1.0; allowed: a number >= 1e-06"),
    ({"alpha": float("nan")}, "sampler.alpha: given nan; allowed: a number >= 1e-06"),
    ({"alpha": "4"}, "sampler.alpha: given '4'; allowed: a number >= 1e-06"),
    ({"alpha": True}, "sampler.alpha: given True; allowed: a number >= 1e-06"),
    ({"alpha": None}, "sampler.alpha: given None; allowed: a number >= 1e-06"),
    ({"num_blocks": 2.0}, "sampler.num_blocks: given 2.0; allowed: a whole number >= 1"),
    ({"alpah": 4}, "sampler.alpah: given 4; allowed: a field of PowerMH (did you mean 'alpha'?): alpha, proposal_temperature"),
], ids=str)
def test_a_constructor_refuses_in_one_line(given, said):
    with refused(start=said):
        PowerMH(**given)
    with pytest.raises(ValueError, match="allowed"):
        PowerMH(**given)


def test_entries_of_lists_are_checked():
    with refused(start="sampler.alphas: given [1.0, -1.0]; allowed: a list of numbers ([0.5,1]), each >= 1e-06"):
        registered("sampler")["replica_exchange"].cls(alphas=[1.0, -1])


def test_a_required_field_of_another_package(monkeypatch):
    monkeypatch.setattr(components, "_components", {**components._components})

    @register("sampler", "of_a_plugin")
    @dataclass(slots=True, kw_only=True)
    class OfAPlugin(Sampler):
        """Of a plugin."""

        size: int = identity(MISSING, "a size", ge=1)

        def chain(self, prompt, horizon, key):
            raise NotImplementedError

    assert OfAPlugin(size=3).size == 3
    with refused(start="sampler.size: given nothing; allowed: a whole number >= 1"):
        OfAPlugin()


def test_recorded_values_are_not_checked():
    """A version before this one may have allowed others."""
    assert restored(PowerMH, {"alpha": -1.0}).alpha == -1.0


# `aggregate` and `vote`: which ways of combining chains a configuration allows, and what depends on them.

CHAINS = ["condition=temp", "num_chains=4"]
AGGREGATE_MISTAKES = {
    "unknown": (["aggregate=median"], "aggregate: given 'median'", "'power', 'adaptive', 'log_p'"),
    "one unknown": (["aggregate=[majority,median]"], "aggregate: given ['majority', 'median']", "a list of several"),
    "number": (["aggregate=3"], "aggregate: given 3", "or null"),
    "nested": (["aggregate=[[power]]"], "aggregate: given [['power']]", "or null"),
    "mapping": (["aggregate={power: 2}"], "aggregate: given {'power': 2}", "or null"),
    "empty": (["aggregate=[]"], "aggregate: given []", "or null"),
    "twice": (["aggregate=[power,power]"], "aggregate: given ['power', 'power']", "a list of several"),
    "one chain": (["num_chains=1", "aggregate=power"], "aggregate: given 'power'", "num_chains of 2 and more (given 1)"),
    "programs": (["grader=code", "aggregate=[log_p,power]"], "aggregate: given ['log_p', 'power']",
                 "null or log_p with grader=code: programs have no answers that can be compared as texts"),
    "programs that are not run": (["grader=code", "grader.allow_execution=true", "aggregate=examples"],
                                  "aggregate: given 'examples'", "grader.examples=true, which runs programs on the examples"),
    "chains of Metropolis-Hastings": (["condition=ps", "aggregate=power"], "aggregate: given 'power'",
                                      "examples_vote with sampler=power_mh: power needs independent draws"),
    "best of N": (["condition=best_of_n", "aggregate=power"], "aggregate: given 'power'", "sampler=best_of_n"),
    "greedy": (["condition=greedy", "aggregate=power"], "aggregate: given 'power'", "sampler=greedy"),
    "top_k": (["sampler.top_k=5", "aggregate=[adaptive,power]"], "aggregate: given 'power'", "sampler.top_k=5"),
    "top_p": (["sampler.top_p=0.9", "aggregate=power"], "aggregate: given 'power'", "without truncation"),
    "min_p": (["sampler.min_p=0.1", "aggregate=power"], "aggregate: given 'power'", "min_p=0.1"),
    "alpha": (["vote.power.alpha=0"], "vote.power.alpha: given 0.0", "a number > 0"),
    "confidence": (["vote.adaptive.confidence=1"], "vote.adaptive.confidence: given 1.0", "> 0.5 and < 1"),
    "unknown parameter": (["vote.power.alpah=2"], "vote.power.alpah", "did you mean 'alpha'"),
    "parameter left out": (["~vote.power.alpha"], "vote.power.alpha", "allowed: a number > 0"),
}


@pytest.mark.parametrize(("arguments", "start", "allowed"), AGGREGATE_MISTAKES.values(), ids=AGGREGATE_MISTAKES.keys())
def test_mistake_is_one_line(arguments, start, allowed):
    command_is_refused([*CHAINS, *arguments], allowed, start=start)


def test_a_word_or_a_list_in_its_order(make_config):
    assert make_config(*CHAINS).aggregates() == []
    assert make_config(*CHAINS, "aggregate=adaptive").aggregates() == ["adaptive"]
    config = make_config(*CHAINS, "aggregate=[power,log_p,majority,adaptive]", "vote.power.alpha=2.5")
    assert config.aggregates() == ["power", "log_p", "majority", "adaptive"]
    assert {*config.aggregates(), *PROGRAM_RULES} == {*NAMES}
    assert config.vote.rules["power"] == PowerVote(alpha=2.5)


def test_penalties_and_any_sampler_s_adaptive_vote_are_allowed(make_config):
    """A penalty changes probabilities, and log q counts it. An adaptive vote has no weights."""
    assert make_config(*CHAINS, "sampler.presence_penalty=0.5", "aggregate=power").aggregates() == ["power"]
    assert make_config("condition=ps", "num_chains=4", "aggregate=[log_p,adaptive]").aggregates() == ["log_p", "adaptive"]
    assert [name for name, found in registered("sampler").items() if found.cls.draws_once] == ["temperature"]
