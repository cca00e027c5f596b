"""`dflash_mcmc.sample` from Python: the tokens of the command line, values of conf/, errors of one line, light to import."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash_mcmc
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.inference.language_model import LanguageModel
from dflash_mcmc.registry import components
from dflash_mcmc.types import Cost
from tests import processes
from tests.conftest import ROOT
from tests.refusals import refused
from tests.test_names import HEAVY

TINY = str(PACKAGE / "assets/tiny")
QUESTIONS = ["Lena has 12 red pens and 9 blue pens. How many pens does she have?", "Compute 4*(3+2).", "What is 7*6?"]


def test_no_module_hides_a_function_of_the_package():
    """The import of a module sets the package's attribute of that name."""
    assert not {module.name for module in pkgutil.iter_modules(dflash_mcmc.__path__)} & set(dflash_mcmc.__all__)


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)


def records_of(folder: Path, *overrides: str) -> list[dict]:
    """What the command line records, in the order of problems and chains."""
    done = processes.run(["-m", "dflash_mcmc", "tracker=none", *overrides], folder)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("outputs/*/*/records.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda record: (record["problem"], record["chain"]))


def assert_same(samples: list[dflash_mcmc.Sample], records: list[dict]) -> None:
    assert len(samples) == len(records) > 0
    for sample, record in zip(samples, records, strict=True):
        assert (sample.id, sample.chain) == (record["problem"], record["chain"])
        for name in ("text", "tokens", "log_p", "log_q", "proposals", "accepted", "moved", "ended"):
            assert getattr(sample, name) == record[name]
        recorded = {"tokens_shared": 0, **record}  # a record has this count only if it is not 0
        assert sample.cost == Cost(**{name: recorded[name] for name in Cost._fields})
        assert list(sample.trace) == record["trace"]


def test_a_list_gives_what_a_file_of_rows_gives(loaded, tmp_path):
    rows = "".join(json.dumps({"problem": question, "answer": "1"}) + "\n" for question in QUESTIONS)
    (tmp_path / "rows.jsonl").write_text(rows)
    records = records_of(tmp_path, "dataset=jsonl", "dataset.path=rows.jsonl", "dataset.question_field=problem",
                         "dataset.prompt=plain", "dataset.max_new_tokens=32", "sampler.alpha=2", "num_chains=2", "seed=3")
    sampler = dflash_mcmc.component("sampler", "power_mh", alpha=2)
    samples = dflash_mcmc.sample(*loaded, QUESTIONS, sampler=sampler, num_chains=2, max_new_tokens=32, seed=3, progress=False)
    assert_same(samples, records)
    assert [sample.prompt for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert {sample.proposals for sample in samples} == {32}


def test_a_model_by_name_with_blend_decoder_and_draft(tmp_path):
    asked = {problem.id: problem.question for problem in dflash_mcmc.component("dataset", "arith", limit=3).problems()}
    records = records_of(tmp_path, "dataset.limit=3", "sampler=temperature", "blend=layer", "blend.beta=0.1", "blend.layer=5",
                         "decoder=speculative_match", "draft=tiny")
    for model in (Path(TINY), dflash_mcmc.component("model", "tiny")):
        samples = dflash_mcmc.sample(
            model, None, asked, sampler="temperature", blend=dflash_mcmc.component("blend", "layer", beta=0.1, layer=5),
            decoder="speculative_match", draft="tiny", num_slots=2, progress=False)
        assert_same(samples, records)
        assert all(sample.cost.blocks_drafted for sample in samples)


def test_without_the_chat_template_the_prompt_is_the_bare_text(loaded):
    def draw(**options) -> list[int]:
        (sample,) = dflash_mcmc.sample(*loaded, QUESTIONS[:1], sampler="greedy", progress=False, **options)
        return sample.tokens

    folder = dflash_mcmc.component("model", "tiny", chat=False)
    (expected,) = dflash_mcmc.sample(folder, None, QUESTIONS[:1], sampler="greedy", progress=False)
    assert draw(chat=False) == expected.tokens != draw()


def test_fields_have_the_values_of_conf_and_what_is_given():
    made = dflash_mcmc.component("sampler", "power_mh", alpha=2, proposal_temperature=0.5)
    assert type(made) is components("sampler")["power_mh"].cls
    assert (made.alpha, made.proposal_temperature, made.num_blocks, made.early_reject) == (2.0, 0.5, 16, "auto")


@pytest.mark.parametrize("text", ['a "quoted" \\ word, {question} = [1]\nand a line', "ends in \\", "null", "1", ""])
def test_texts_arrive_as_they_are(text):
    assert dflash_mcmc.component("dataset", "jsonl", path=text).path == text
    assert dflash_mcmc.component("dataset", "arith", ids=[text, "x"], limit=None).ids == [text, "x"]


@pytest.mark.parametrize(("make", "said"), [
    (lambda: dflash_mcmc.component("sampler", "power_mh", alpha=-1), "sampler.alpha: given -1.0; allowed: a number >= 1e-06"),
    (lambda: dflash_mcmc.component("sampler", "power_mh", alhpa=1), "sampler.alhpa: unknown field (did you mean 'alpha'?)"),
    (lambda: dflash_mcmc.component("sampler", "powr_mh"), "sampler: unknown option 'powr_mh' (did you mean 'power_mh'?)"),
    (lambda: dflash_mcmc.component("samplers", "greedy"), "unknown group 'samplers' (did you mean 'sampler'?)"),
], ids=["bounds", "field", "option", "group"])
def test_a_component_is_refused_as_on_the_command_line(make, said):
    with refused(start=said):
        make()


@pytest.mark.parametrize(("given", "said"), [
    ({"sampler": "power_mh", "max_new_tokens": 100}, "sampler.num_blocks: given 16; allowed: a divisor of"),
    ({"sampler": "greedy", "decoder": "speculative_match"}, "draft: given 'none'; allowed: a draft, such as tiny"),
    ({"sampler": "greedy", "num_chains": 0}, "num_chains: given 0; allowed: a whole number >= 1"),
    ({"sampler": 3}, "sampler: given 3; allowed: a component of the group, or one of best_of_n"),
    ({"sampler": "greedy", "prompts": "one text"}, "prompts: given 'one text'; allowed: a list of texts"),
    ({"sampler": "greedy", "prompts": []}, "prompts: given []; allowed: a list of texts"),
    ({"sampler": "greedy", "prompts": [1]}, "prompts: given 1; allowed: texts"),
    ({"sampler": "greedy", "tokenizer": None}, "tokenizer: given None; allowed: the tokenizer of a loaded model"),
    ({"sampler": "greedy", "model": TINY}, "tokenizer: given"),
    ({"sampler": "greedy", "model": "/no/folder", "tokenizer": None}, "model.path: given '/no/folder'; allowed: a folder"),
    ({"sampler": "greedy", "max_new_tokens": 2000}, "dataset.max_new_tokens: given 2000; allowed: at most"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_fit_is_refused_in_one_line(loaded, given, said):
    arguments = {"model": loaded[0], "tokenizer": loaded[1], "prompts": QUESTIONS, **given}
    with refused(start=said):
        dflash_mcmc.sample(**arguments, progress=False)


def test_bounds_of_a_component_made_by_hand_are_checked(loaded):
    temperature = components("sampler")["temperature"].cls
    sampler = temperature(temperature=-1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                          frequency_penalty=0.0, presence_penalty=0.0)
    with refused(start="sampler.temperature: given -1.0; allowed: a number >= 1e-06"):
        dflash_mcmc.sample(*loaded, QUESTIONS, sampler=sampler, progress=False)


def test_the_model_is_left_as_it_was(loaded, capfd):
    model, tokenizer = loaded
    model.train()
    attention = model.config._attn_implementation
    dflash_mcmc.sample(model, tokenizer, QUESTIONS[:1], sampler="greedy", progress=False)
    assert model.training
    assert model.config._attn_implementation == attention
    assert capfd.readouterr() == ("", "")
    model.eval()


def test_logits_that_are_not_numbers_are_a_failure_of_the_sample(loaded, monkeypatch):
    right = LanguageModel.logits
    monkeypatch.setattr(LanguageModel, "logits", lambda *arguments: torch.nan * right(*arguments))
    (sample,) = dflash_mcmc.sample(*loaded, QUESTIONS[:1], sampler="greedy", progress=False)
    assert "not numbers" in sample.failure
    assert (sample.text, sample.tokens, sample.ended) == ("", [], False)


def test_nothing_heavy_is_imported_before_it_is_used():
    code = ("import sys, dflash_mcmc; first = set(sys.modules); sampler = dflash_mcmc.component('sampler', 'power_mh'); "
            "print(*first); print(*sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    first, then = (set(line.split()) for line in done.stdout.splitlines())
    assert not first & {*HEAVY, "numpy", "hydra", "dflash_mcmc.api"}
    assert not then & HEAVY


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dflash_mcmc' has no attribute 'sampel'"):
        dflash_mcmc.sampel  # noqa: B018
