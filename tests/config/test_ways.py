"""Where something known from elsewhere is typed, the run is what was meant, or the line has the override to type."""

import pytest

import dflash_mcmc as dm
from dflash_mcmc.config.identity import identity_of
from tests.composing import composed
from tests.refusals import command_is_refused, refused

ROOT = "temperature: unknown field (did you mean sampler=temperature sampler.temperature=0.7 or "


@pytest.mark.parametrize(("given", "said"), [
    (["temperature=0.7"], ROOT),
    (["condition=temp", "temperature=0.7"], "temperature: unknown field (did you mean sampler.temperature=0.7?); allowed: "),
    (["max_new_tokens=20"], "max_new_tokens: unknown field (did you mean dataset.max_new_tokens=20?); allowed: "),
    (["sampler.temperature=0.7"], "sampler." + ROOT),
    (["condition=ps", "sampler.temperature=0.7"],
     "sampler.temperature: unknown field (did you mean sampler.proposal_temperature=0.7?); allowed in sampler: "),
    (["condition=ps", "dataset.path=my.jsonl"], "dataset.path: unknown field (did you mean dataset="),
    (["condition.name=mine", "blend.beta=0.1"], "(did you mean blend=layer blend.beta=0.1 or blend="),
    (["condition=ps", "sampler.beta=0.1"],
     "sampler.beta: unknown field (did you mean blend=layer blend.beta=0.1 without condition=ps or "),
    (["condition=greedy", "sampler.temperature=0.7"],
     "(did you mean sampler=temperature sampler.temperature=0.7 without condition=greedy or "),
    *((given, "temperature: unknown field (did you mean sampler=greedy?); allowed") for given in (
        ["temperature=0"], ["temperature=0.0"], ["condition=temp", "temperature=0"], ["sampler.temperature=0"],
        ["sampler=greedy", "sampler.temperature=0"], ["-m", "condition=greedy,ps", "temperature=0"])),
    (["sampler.n=4"], "sampler.n: unknown field (did you mean num_chains=4?); allowed in sampler: "),
    (["sampler.max_new_tokens=20"], "sampler.max_new_tokens: unknown field (did you mean dataset.max_new_tokens=20?); "),
    (["probe=layer_rank", "probe.num_samples=9"], "(did you mean probe=speculative_mcmc probe.num_samples=9"),
    (["model.seed=3"], "model.seed: unknown field (did you mean seed=3?); allowed in model: "),
    (["condition=blend_ps", "sampler.beta=0.2"], "sampler.beta: unknown field (did you mean blend.beta=0.2?); allowed in "),
    (["sampler.name=greedy"], "sampler.name: unknown field (did you mean sampler=greedy?); allowed in sampler: "),
    (["sampler.do_sample=false"], "sampler.do_sample: unknown field (did you mean sampler=greedy?); allowed in sampler: "),
    (["wandb=false"], "wandb: unknown field (did you mean tracker=none?); allowed: "),
    (["condition=ps", "sampler.steps=4"], "sampler.steps: unknown field (did you mean sampler.num_steps=4?); allowed in "),
    (["assistant_model=x"], "assistant_model: unknown field (did you mean draft=model draft.model=x?); allowed: "),
    (["draft=ngram", "decoder=speculative_match", "draft.num_speculative_tokens=4"],
     "draft.num_speculative_tokens: unknown field (did you mean draft.num_drafted=4?); allowed in draft: "),
    (["model=gpt2"], "or a hub name such as Qwen/Qwen3-4B; a hub name of one part is model=hf model.path=gpt2"),
    (["sampler=temperature", "sampler.temperature=0"],
     "sampler.temperature: given 0.0; allowed: a number >= 1e-06 and <= 1e+06 or null; in place of 0: sampler=greedy"),
    (["sampler=ps"], "temperature; or the condition of this name: condition=ps"),
    (["condition=power_mh"], "temp; or the sampler of this name: sampler=power_mh"),
    (["dataset.prompt={question} ${cost}"], "dataset.prompt: has ${...}, which stands for another field (Interpolation key "
                                            "'cost' not found); allowed: the name of a field in it, or \\${...} for the text"),
    (["dataset.prompt={question} ${cost"], "allowed: a text, with \\${ in place of ${"),
])
def test_a_line_has_what_to_type(given, said):
    command_is_refused(["tracker=none", *given], said)


def test_a_constructor_says_what_stands_for_temperature_0():
    with refused("in place of 0: sampler=greedy", start="sampler.temperature: given 0.0; allowed: a number >= 1e-06"):
        dm.Temperature(temperature=0)


def test_braces_of_a_text_can_be_escaped(tmp_path):
    config = composed(tmp_path, "dataset.prompt={question} costs \\${cost}, ${seed} times", "seed=3")
    assert config.dataset.prompt == "{question} costs ${cost}, 3 times"


@pytest.mark.parametrize("sampler", [["sampler=power_mh"], ["sampler=power_mh", "sampler.early_reject=off"],
                                     ["sampler=multiple_try"], ["sampler=draft_refine", "draft=tiny"],
                                     ["sampler=draft_mh", "draft=tiny"]], ids=" ".join)
def test_a_short_answer_has_a_stage_for_each_token(tmp_path, capsys, sampler):
    short = composed(tmp_path, *sampler, "dataset.max_new_tokens=6")
    assert short.sampler.num_blocks == 6
    assert identity_of(short) == identity_of(composed(tmp_path, *sampler, "dataset.max_new_tokens=6", "sampler.num_blocks=6"))
    assert composed(tmp_path, *sampler, "dataset.max_new_tokens=99").sampler.num_blocks == 16


@pytest.mark.parametrize(("given", "tokens", "said"), [
    (13, 11, "sampler.num_blocks=13 makes 11 stages, one for each of max_new_tokens=11\n"),
    (14, 1, "sampler.num_blocks=14 makes 1 stage, one for each of max_new_tokens=1\n"),
    (None, 10, "")], ids=["given", "one stage", "not given"])
def test_a_line_says_how_many_stages_there_are(tmp_path, capsys, given, tokens, said):
    composed(tmp_path, f"dataset.max_new_tokens={tokens}", *([f"sampler.num_blocks={given}"] if given else []))
    assert capsys.readouterr().err == said


def test_none_as_agents_write_it_is_null(tmp_path):
    given = composed(tmp_path, "dataset.system=None", "dataset.limit=None", "model.rope_scaling=None")
    assert identity_of(given) == identity_of(composed(tmp_path, "dataset.system=null"))
    assert (given.dataset.system, given.dataset.limit) == (None, None)
    assert composed(tmp_path, "dataset.system='None'").dataset.system == "None"
    assert composed(tmp_path, "dataset.system=None of these").dataset.system == "None of these"
    assert composed(tmp_path, "dataset.stop=[None of it,'None']").dataset.stop == ["None of it", "None"]
    for field in ("num_chains=None", "dataset.prompt=None", "dataset.stop=[None]"):
        with refused(f"{field.partition('=')[0]}: given "):
            composed(tmp_path, field)
