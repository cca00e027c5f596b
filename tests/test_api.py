"""`import dflash_mcmc as dm`: the tokens of the command line, values of conf/, errors of one line, light to import."""

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash_mcmc
from dflash_mcmc.__main__ import main
from dflash_mcmc.api import sampling
from dflash_mcmc.components import GROUPS, registered
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.runner import loop
from dflash_mcmc.store.files import to_line
from dflash_mcmc.store.records import read_problems, read_records
from dflash_mcmc.types import Cost
from tests import processes
from tests.composing import composed
from tests.conftest import ROOT
from tests.refusals import refused
from tests.runs import execute
from tests.test_names import HEAVY

TINY = str(PACKAGE / "assets/tiny")
QUESTIONS = ["Lena has 12 red pens and 9 blue pens. How many pens does she have?", "Compute 4*(3+2).", "What is 7*6?"]


def test_no_module_hides_a_function_of_the_package():
    """The import of a module sets the package's attribute of that name. Nothing imports the command `compare`."""
    assert {module.name for module in pkgutil.iter_modules(dflash_mcmc.__path__)} & set(dflash_mcmc.__all__) == {"compare"}
    files = [path.read_text() for folder in ("dflash_mcmc", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert not [text for text in files if re.search(r"(from|import) dflash_mcmc\.compare\b|dflash_mcmc import compare", text)]


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)


def records_of(folder: Path, *overrides: str) -> list[dict]:
    """What the command line records, in the order of problems and chains."""
    found = read_records(execute(composed(folder / "outputs", *overrides)).folder)
    return sorted(found, key=lambda record: (record["problem"], record["chain"]))


@pytest.mark.slow
def test_a_model_by_name_with_blend_decoder_and_draft(tmp_path):
    asked = {problem.id: problem.question for problem in dflash_mcmc.component("dataset", "arith", limit=3).problems()}
    records = records_of(tmp_path, "dataset.limit=3", "sampler=temperature", "blend=layer", "blend.beta=0.1", "blend.layer=5",
                         "decoder=speculative_match", "draft=tiny", "num_chains=2", "seed=3")
    for model in ("tiny", Path(TINY), dflash_mcmc.component("model", "tiny")):
        samples = dflash_mcmc.sample(
            model, None, asked, sampler="temperature", blend=dflash_mcmc.LayerBlend(beta=0.1, layer=5),
            decoder=dflash_mcmc.SpeculativeMatch(), draft="tiny", num_chains=2, seed=3,
            hardware=dflash_mcmc.Local(num_slots=2), progress=False)
        assert len(samples) == len(records) == 6
        for sample, record in zip(samples, records, strict=True):
            assert (sample.id, sample.chain) == (record["problem"], record["chain"])
            for name in ("text", "tokens", "log_p", "log_q", "proposals", "accepted", "moved"):
                assert getattr(sample, name) == record[name]
            assert sample.finish_reason == record["finish_reason"] == ("stop_id" if record["ended"] else "length")
            # A record has costs only if they are not 0.
            assert sample.cost == Cost(**{name: record.get(name, 0) for name in Cost._fields})
            assert list(sample.trace) == record["trace"]
        assert all(sample.cost.blocks_drafted for sample in samples)


@pytest.mark.parametrize("text", ['a "quoted" \\ word, {question} = [1]\nand a line', "ends in \\", "null", "1", ""])
def test_texts_arrive_as_they_are(text):
    assert dflash_mcmc.component("dataset", "jsonl", path=text).path == text
    assert dflash_mcmc.component("dataset", "arith", ids=[text, "x"], limit=None).ids == [text, "x"]


@pytest.mark.parametrize(("make", "said"), [
    (lambda: dflash_mcmc.component("sampler", "power_mh", alhpa=1), "sampler.alhpa: unknown field (did you mean 'alpha'?)"),
    (lambda: dflash_mcmc.component("sampler", "powr_mh"), "sampler: unknown option 'powr_mh' (did you mean 'power_mh'?)"),
    (lambda: dflash_mcmc.component("samplers", "greedy"), "unknown group 'samplers' (did you mean 'sampler'?)"),
], ids=["field", "option", "group"])
def test_a_component_is_refused_as_on_the_command_line(make, said):
    with refused(start=said):
        make()


@pytest.mark.parametrize(("given", "said"), [
    ({"sampler": "greedy", "max_new_tokens": 0}, "max_new_tokens: given 0; allowed: a whole number >= 1"),
    ({"sampler": "ps", "blend": dflash_mcmc.LayerBlend()}, "blend: given 'layer'; allowed: 'none', the value of condition=ps"),
    ({"sampler": "greedy", "decoder": "speculative_match"}, "draft: given 'none'; allowed: a draft, such as tiny"),
    ({"sampler": "greedy", "num_chains": 0}, "num_chains: given 0; allowed: a whole number >= 1"),
    ({"sampler": 3}, "sampler: given 3; allowed: a component of the group, or one of best_of_n"),
    ({"sampler": "greedy", "prompts": "one text"}, "prompts: given 'one text'; allowed: a list of texts"),
    ({"sampler": "greedy", "prompts": []}, "prompts: given []; allowed: a list of texts"),
    ({"sampler": "greedy", "prompts": [1]}, "prompts: given [1]; allowed: a list of texts, lists of messages with role and "
                                            "content, or lists of token ids; wrap one prompt in a list, [prompt]"),
    ({"sampler": "greedy", "prompts": torch.tensor([1])}, "prompts: given array([1]); allowed: a list of texts"),
    ({"sampler": "greedy", "prompts": [{"role": "user", "content": "a"}]}, "prompts: given [{'role': 'user', "),
    ({"sampler": "greedy", "stop": "a"}, "stop: given 'a'; allowed: a list of texts"),
    ({"sampler": "greedy", "stop": [""]}, "stop: given ''; allowed: texts of at least one character"),
    ({"sampler": "greedy", "stop": ["a" * 129]}, "stop: given 'a text of 129 characters'; allowed: at most 128"),
    ({"sampler": "greedy", "stop": ["a"] * 17}, "stop: given '17 strings'; allowed: at most 16"),
    ({"sampler": "greedy", "stop": ["\ufffd"]}, "stop: given '\ufffd'; allowed: texts of whole characters"),
    ({"sampler": "greedy", "prompts": [[{"role": "user"}]]}, "prompts: given [{'role': 'user'}]; allowed: messages"),
    ({"sampler": "greedy", "prompts": [[{"role": "assistant", "content": "a"}]]}, "prompts: given [{'role': 'assistant', "),
    ({"sampler": "greedy", "prompts": [[1, -2]]}, "prompts: given -2; allowed: token ids from 0 to "),
    ({"sampler": "greedy", "prompts": [[1, 500]]}, "prompts: given 500; allowed: token ids from 0 to "),
    ({"sampler": "greedy", "prompts": [[0.5]]}, "prompts: given [0.5]; allowed: texts"),
    ({"sampler": "greedy", "prompts": [[[1], [2, 3]]]}, "prompts: given [[1], [2, 3]]; allowed: texts"),
    ({"sampler": "greedy", "prompts": [[]]}, "prompts: given []; allowed: texts"),
    ({"sampler": "greedy", "prompts": [""], "chat": False}, "prompts: given nothing in prompt 00000; allowed: at least"),
    ({"sampler": "greedy", "model": 3}, "model: given 3; allowed: a causal language model of transformers"),
    ({"sampler": "greedy", "tokenizer": None}, "tokenizer: given None; allowed: the tokenizer of a loaded model"),
    ({"sampler": "greedy", "model": TINY}, "tokenizer: given"),
    ({"sampler": "greedy", "model": "/no/folder", "tokenizer": None}, "model: given '/no/folder'; allowed: a folder"),
    ({"sampler": "greedy", "model": "nobody/nothing", "tokenizer": None}, "model: given 'nobody/nothing', which is no folder"),
    ({"sampler": "greedy", "max_new_tokens": 2000}, "max_new_tokens: given 2000; allowed: at most"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_fit_is_refused_in_one_line(loaded, given, said):
    arguments = {"model": loaded[0], "tokenizer": loaded[1], "prompts": QUESTIONS, **given}
    with refused(start=said):
        dflash_mcmc.sample(**arguments, progress=False)


def test_a_notebook_shows_samples_as_a_table(loaded):
    samples = dflash_mcmc.sample(*loaded, QUESTIONS, sampler="ps", max_new_tokens=6, progress=False)
    shown = samples._repr_html_()
    assert shown.count("<tr>") == 1 + len(QUESTIONS)
    assert "tokens" in shown
    assert "trace" not in shown
    assert "&lt;b&gt;" in samples[0]._replace(text="<b>")._repr_html_()


def test_a_prompt_that_is_too_long_has_its_result_and_the_others_are_drawn(loaded):
    """As in runs. Ids keep their randomness, and a list of long prompts alone is refused."""
    def draw(prompts) -> list[dflash_mcmc.Sample]:
        return dflash_mcmc.sample(*loaded, prompts, sampler=dflash_mcmc.Temperature(temperature=1), num_chains=2,
                                  max_new_tokens=8, progress=False)

    long = "3 + 4 + " * 300
    drawn = draw({"a": QUESTIONS[0], "long": long, "b": QUESTIONS[1]})
    assert [(found.id, found.chain) for found in drawn] == [(name, chain) for name in ("a", "long", "b") for chain in (0, 1)]
    for sample in drawn[2:4]:
        assert (sample.finish_reason, sample.tokens, sample.text, sample.cost.token_forwards) == ("too_long", [], "", 0)
        assert re.fullmatch(r"the prompt has 2,\d+ tokens, and with an answer of up to 8 tokens it exceeds the model's 1,024 "
                            "positions", sample.failure)
    others = draw({"a": QUESTIONS[0], "b": QUESTIONS[1]})
    assert [sample.tokens for sample in drawn[:2] + drawn[4:]] == [sample.tokens for sample in others]
    assert all(sample.tokens for sample in others)
    with refused(start="prompts: given 'prompt long of 2"):
        draw({"long": long})


def test_a_field_that_is_set_later_is_checked(loaded):
    sampler = dflash_mcmc.Temperature()
    sampler.temperature = -1.0
    with refused(start="sampler.temperature: given -1.0; allowed: a number >= 1e-06"):
        dflash_mcmc.sample(*loaded, QUESTIONS, sampler=sampler, progress=False)


@pytest.mark.parametrize(("given", "said"), [
    ({"temperature": 0.7}, "temperature: given 0.7; allowed: sampler=dm.Temperature(temperature=0.7)"),
    ({"temperature": 0}, "temperature: given 0; allowed: sampler='greedy'"),
    ({"top_p": 0.9}, "top_p: given 0.9; allowed: sampler=dm.PowerMH(top_p=0.9) or sampler=dm.Temperature(top_p=0.9)"),
    ({"max_tokens": 6}, "max_tokens: given 6; allowed: max_new_tokens=6"),
    ({"n": 3}, "n: given 3; allowed: num_chains=3"),
    ({"num_samples": 3}, "num_samples: given 3; allowed: num_chains=3"),
    ({"batch_size": 4}, "batch_size: given 4; allowed: hardware=dm.Local(num_slots=4)"),
    ({"num_drafted": 3}, "num_drafted: given 3; allowed: draft=dm.Eagle3Draft(path=..., num_drafted=3) or "),
    ({"dtype": "bfloat16"}, "dtype: given 'bfloat16'; allowed: model=dm.HFModel(path=..., dtype='bfloat16')"),
    ({"smapler": "greedy"}, "smapler: unknown argument (did you mean 'sampler'?); allowed: "),
], ids=lambda value: "" if isinstance(value, str) else "-".join(value))
def test_a_keyword_of_another_program_says_the_way(given, said):
    """The way is Python that can be typed, and gives the value that was meant."""
    engine = dflash_mcmc.Engine(TINY)
    for draw in (functools.partial(dflash_mcmc.sample, TINY, None), engine.sample, engine.stream):
        if not ("dtype" in given or "batch_size" in given) or draw.__module__ == "functools":
            with refused(start=said):
                draw(QUESTIONS, **given)
    with refused(start="tempo: unknown argument; allowed: model, tokenizer, engine, hardware, chat"):
        dflash_mcmc.Engine(TINY, tempo=1)


@pytest.mark.slow
def test_prompts_are_texts_messages_or_token_ids(loaded):
    model, tokenizer = loaded
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)["input_ids"]
    asked = {name: {"00000": prompt} for name, prompt in (("text", QUESTIONS[1]), ("messages", messages), ("ids", ids),
                                                         ("array", np.array(ids, np.int32)), ("tensor", torch.tensor(ids)))}
    drawn = {name: dflash_mcmc.sample(model, tokenizer, prompts, sampler="temperature", progress=False)[0].tokens
             for name, prompts in asked.items()}
    assert len(set(map(tuple, drawn.values()))) == 1
    guided = [{"role": "system", "content": "Answer."}, *messages]
    other = dflash_mcmc.sample(model, tokenizer, [guided], sampler="temperature", progress=False)
    assert other[0].tokens != drawn["text"]


@pytest.mark.slow
def test_an_engine_stays_loaded_and_streams(monkeypatch):
    def tokens(samples) -> dict:
        return {(sample.prompt, sample.chain): sample.tokens for sample in samples}

    loads, right = [], dflash_mcmc.HFModel.load
    monkeypatch.setattr(dflash_mcmc.HFModel, "load", lambda *given: loads.append(given) or right(*given))
    draw = {"prompts": QUESTIONS[:2], "sampler": dflash_mcmc.Temperature(alpha=1.0), "num_chains": 2, "max_new_tokens": 16}
    with dflash_mcmc.Engine(TINY, hardware=dflash_mcmc.Local(num_slots=2)) as engine:
        samples = engine.sample(**draw, progress=False)
        stream = engine.stream(**draw)
        first = next(stream)
        assert tokens([first]).items() <= tokens(samples).items()
        with refused(start="engine: given a second call while a stream of the same model is open"):
            engine.sample(**draw, progress=False)
        assert tokens([first, *stream]) == tokens(samples)
        engine.stream(**draw).close()
        assert tokens(engine.sample(QUESTIONS[2:], progress=False, sampler="greedy", max_new_tokens=16))
    assert len(loads) == 1
    with refused(start="engine: is closed"):
        engine.sample(QUESTIONS)


@pytest.mark.slow
def test_threads_get_what_each_gets_alone(loaded):
    """Three threads draw with one model, two of them with the same engine. A blend taps the layers of the model."""
    engine, other = dflash_mcmc.Engine(*loaded), dflash_mcmc.Engine(*loaded)
    asked = [(engine, dict(sampler="temperature", blend=dflash_mcmc.LayerBlend(beta=0.1, layer=5), seed=1)),
             (engine, dict(sampler=dflash_mcmc.PowerMH(num_blocks=2), seed=2)),
             (other, dict(sampler="temperature", blend=dflash_mcmc.LayerBlend(beta=0.3, layer=2), seed=3))]

    def draw(number: int) -> list:
        engine, options = asked[number]
        return [sample.tokens for sample in engine.sample(QUESTIONS[:1], progress=False, max_new_tokens=16, **options)]

    alone = list(map(draw, range(3)))
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(draw, [0, 1, 2])) == alone


@pytest.mark.slow
def test_a_run_waits_for_a_stream_of_its_model_in_another_thread(tmp_path, monkeypatch):
    """The model in files is loaded once for both."""
    monkeypatch.chdir(tmp_path)
    overrides = ["condition=greedy", "dataset.limit=1", "tracker=none", "dataset.max_new_tokens=16"]
    with dflash_mcmc.Engine(dflash_mcmc.component("model", "tiny")) as engine, ThreadPoolExecutor(1) as pool:
        stream = engine.stream(QUESTIONS, sampler="temperature", max_new_tokens=32)
        drawn = [next(stream)]
        done = pool.submit(dflash_mcmc.run, *overrides)
        processes.wait_until(lambda: list(tmp_path.glob("outputs/default/*")))
        drawn += stream
        assert done.result().num_new == 1
        assert sorted(drawn) == engine.sample(QUESTIONS, sampler="temperature", max_new_tokens=32, progress=False)


def test_threads_load_a_model_once(monkeypatch):
    loads, load = [], dflash_mcmc.HFModel.load

    def slow(*arguments):
        loads.append(arguments)
        time.sleep(0.05)  # the other threads ask meanwhile
        return load(*arguments)

    monkeypatch.setattr(dflash_mcmc.HFModel, "load", slow)
    with dflash_mcmc.Engine(TINY) as engine, ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(lambda _: id(engine._target), range(3)))) == 1
    assert len(loads) == 1


def test_threads_make_components_at_once():
    """Hydra's state belongs to the process."""
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda number: dflash_mcmc.PowerMH(alpha=number), range(1, 9)))
        named = list(pool.map(lambda number: dflash_mcmc.component("sampler", "power_mh", alpha=number), range(1, 9)))
    assert made == named


@pytest.mark.slow
def test_ctrl_c_returns_what_is_finished(loaded, monkeypatch, capsys):
    """The signal arrives at the third finished chain."""
    asked = {"prompts": QUESTIONS, "sampler": "temperature", "max_new_tokens": 32, "progress": False}
    everything = dflash_mcmc.sample(*loaded, **asked)
    finished, right = [], sampling.of_chain

    def interrupted(*given):
        if len(finished) == 2:
            signal.raise_signal(signal.SIGINT)
        finished.append(right(*given))
        return finished[-1]

    monkeypatch.setattr(sampling, "of_chain", interrupted)
    engine = dflash_mcmc.Engine(*loaded)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    try:
        samples = engine.sample(**asked)
    finally:
        signal.signal(signal.SIGINT, before)
    assert samples == sorted(finished)
    assert len(samples) == 2
    assert {tuple(sample.tokens) for sample in samples} < {tuple(sample.tokens) for sample in everything}
    assert capsys.readouterr().err == "stopped: 2 of 3 samples are finished\n"
    monkeypatch.undo()
    assert engine.sample(**asked) == everything


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
    assert (sample.text, sample.tokens, sample.finish_reason) == ("", [], "not_drawn")


def test_nothing_heavy_is_imported_before_it_is_used():
    code = ("import sys, dflash_mcmc as dm; first = set(sys.modules); sampler = dm.PowerMH(alpha=4); dir(dm); dm.run; "
            "dm.read; dm.Engine; print(*first); print(*sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    first, then = (set(line.split()) for line in done.stdout.splitlines())
    assert not first & {*HEAVY, "numpy", "hydra", "dflash_mcmc.api", "dflash_mcmc.errors", "dflash_mcmc.components"}
    assert not then & HEAVY


def test_every_component_is_a_name_of_the_package():
    classes = {found.cls for group in GROUPS for found in registered(group).values()}
    assert {getattr(dflash_mcmc, cls.__name__) for cls in classes} == classes
    assert {*dflash_mcmc.__all__, *(cls.__name__ for cls in classes)} <= set(dir(dflash_mcmc))


def test_the_stub_has_the_names_of_the_package():
    """What `dir` lists, of which the components are those of this package, is what type checkers see."""
    tree = ast.parse((ROOT / "dflash_mcmc/__init__.pyi").read_text())
    told = {alias.asname: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
            if alias.asname}
    public = [name for name in dir(dflash_mcmc) if not name.startswith("_")]
    assert told.keys() | {"Engine"} == set(public)
    for name, module in told.items():
        assert getattr(importlib.import_module(module), name) is getattr(dflash_mcmc, name) or name == "run"


@pytest.mark.parametrize(("name", "said"), [
    ("sampel", "module 'dflash_mcmc' has no attribute 'sampel'"),
    ("repor", "module 'dflash_mcmc' has no attribute 'repor'"),
    ("PowrMH", "module 'dflash_mcmc' has no attribute 'PowrMH' (did you mean 'PowerMH'?)")])
def test_an_unknown_name_of_the_package_is_an_attribute_error(name, said):
    with pytest.raises(AttributeError) as caught:
        getattr(dflash_mcmc, name)
    assert str(caught.value) == said


def test_run_read_and_compare(tmp_path, monkeypatch, capsys):
    """The command line takes the run for its own, and the table and the paired test follow from the records."""
    monkeypatch.chdir(tmp_path)
    overrides = ["condition=greedy", "dataset.limit=4", "tracker=none"]
    done = dflash_mcmc.run(*overrides)
    assert (done.num_new, done.summary["num_samples"]) == (4, 4)
    assert dflash_mcmc.run(*overrides)._replace(num_new=4) == done
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="0"):
        main(overrides)
    assert f"{done.folder}: already complete, nothing drawn" in capsys.readouterr().out
    records = read_records(done.folder)
    table = dflash_mcmc.read(done.folder)
    assert list(table.columns) == ["run", *records[0], "question"]
    questions = {problem["id"]: problem["question"] for problem in read_problems(done.folder).values()}
    assert table["question"].tolist() == [questions[record["problem"]] for record in records]
    for name in ("problem", "verdict", "text", "tokens", "log_p"):
        assert table[name].tolist() == [record[name] for record in records]
    capsys.readouterr()
    assert dflash_mcmc.run("condition=greedy", "dataset.limit=3", "tracker=none").num_beyond == 1
    assert capsys.readouterr().err == f"{done.folder}: 1 recorded samples that were not requested are counted as well\n"
    other = dflash_mcmc.run("dataset.limit=4", condition="temp", tracker="none")
    both = dflash_mcmc.read(other, done)
    assert both["run"].value_counts().to_dict() == {"greedy": 4, "temp": 4}
    assert {name: set(part["sampler.temperature"].fillna(0)) for name, part in both.groupby("run")} == {
        "greedy": {0.0}, "temp": {0.25}}
    assert set(both.groupby("run")["sampler"].first()) == {"greedy", "temperature"}
    assert "dataset" not in both.columns
    correct = {name: (part.sort_values("problem")["verdict"] == "correct").to_numpy() for name, part in both.groupby("run")}
    assert 0 < correct["greedy"].sum() < 4
    found = dflash_mcmc.compare(done, f"warm={other.folder}")
    assert found["run"].tolist() == ["greedy", "warm"]
    assert found["won"][1] == (correct["temp"] & ~correct["greedy"]).sum()
    assert found["lost"][1] == (correct["greedy"] & ~correct["temp"]).sum()
    assert found["difference"][1] == pytest.approx(correct["temp"].mean() - correct["greedy"].mean())
    assert "<pre>| condition" in done._repr_html_()
    with refused(start=f"{done.folder.parent}: has 2 runs; allowed: the folder of one run"):
        dflash_mcmc.compare(done.folder.parent, done)


@pytest.mark.slow
def test_a_sweep_is_that_of_the_command_line_and_has_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ["dataset.limit=2", "tracker=none", "sampler.num_steps=1", "sampler.num_blocks=2"]
    drawn = dflash_mcmc.sweep("sampler.alpha=2,4,2.0", *common, condition=["ps", "blend_ps"], num_chains=1)
    table = dflash_mcmc.read(*drawn)
    assert [run.num_new for run in drawn] == [2] * 4
    assert table.groupby(["run", "sampler.alpha"]).ngroups == 4
    assert "4 jobs: 4 done now, 0 already complete, 0 failed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["-m", "condition=ps,blend_ps", "sampler.alpha=2,4", *common])
    assert "4 jobs: 0 done now, 4 already complete" in capsys.readouterr().out
    page = dflash_mcmc.write_report(*drawn, baseline="ps alpha=2", out="shown")
    assert page == Path("shown/report.html")
    assert "compared with ps alpha=2" in page.read_text()


def test_each_point_of_a_sweep_has_its_own_result(tmp_path, monkeypatch):
    """These are one run, whose summaries differ."""
    monkeypatch.chdir(tmp_path)
    drawn = dflash_mcmc.sweep("num_chains=1,2", "sampler=temperature", "dataset.limit=1", "dataset.max_new_tokens=2",
                              "tracker=none")
    assert [run.summary["num_samples"] for run in drawn] == [1, 2]
    assert len({run.folder for run in drawn}) == 1


@pytest.mark.slow
def test_points_of_a_sweep_that_fail_are_an_error_after_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def failing(job):
        if job.config.sampler.alpha == 2:
            raise dflash_mcmc.UserError("a failure of the test")
        return loop.execute(job)

    monkeypatch.setattr("dflash_mcmc.api.runs.execute", failing)
    with refused("sweep: points have failed, for the reasons above; the others are recorded"):
        dflash_mcmc.sweep("sampler.alpha=2,4", "dataset.limit=1", "tracker=none", "sampler.num_steps=1",
                          "sampler.num_blocks=1")
    assert len(dflash_mcmc.read("outputs")) == 1
    assert "failed: sampler.alpha=2: a failure of the test" in capsys.readouterr().err
    with refused(start="sweep: given 'dry_run=true'; allowed: points that are run here"):
        dflash_mcmc.sweep("dry_run=true")


@pytest.mark.slow
def test_samples_and_texts_are_graded_as_a_run_grades_them(loaded, tmp_path):
    problems = dflash_mcmc.Arith(limit=4).problems()
    drawn = dflash_mcmc.sample(*loaded, {problem.id: problem.question for problem in problems}, sampler="greedy",
                               max_new_tokens=128, progress=False)
    records = records_of(tmp_path, "condition=greedy", "dataset.limit=4", "dataset.max_new_tokens=128")
    golds = {problem.id: problem.answer for problem in problems}
    grades = dflash_mcmc.grade(drawn, golds)
    assert [grade.verdict for grade in grades] == [record["verdict"] for record in records]
    assert {"correct", "wrong"} == {grade.verdict for grade in grades}
    assert dflash_mcmc.grade(drawn, list(golds.values()))[0].verdict == grades[0].verdict
    texts, auto = ["The answer is 12.", "no number"], dflash_mcmc.MathGrader(extract="auto")
    assert [grade.verdict for grade in dflash_mcmc.grade(texts, ["12", "3"], auto)] == ["correct", "no_answer"]
    assert [grade.verdict for grade in dflash_mcmc.grade(texts, ["12", "3"])] == ["no_answer", "no_answer"]
    failed = drawn[0]._replace(text="", failure="a failure of the test", finish_reason="not_drawn")
    assert dflash_mcmc.grade([failed], golds)[0][:4] == ("not_drawn", None, "", "a failure of the test")
    with refused(start="golds: given \"none for 'arith-000'\"; allowed: a gold answer for each prompt"):
        dflash_mcmc.grade(drawn, {})
    table = drawn.to_pandas()
    assert table["text"].tolist() == [sample.text for sample in drawn]
    assert table["token_forwards"].tolist() == [sample.cost.token_forwards for sample in drawn]
    dataset = drawn.to_hf_dataset()
    assert dataset["tokens"][:] == [sample.tokens for sample in drawn]


def test_a_table_has_the_units_of_a_probe(tmp_path):
    record = {"problem": "draws", "chain": 0, "draws": 2, "accepted": {"match": 1.0}, "counts": {"match": [2, 0]}}
    (tmp_path / "run.json").write_text(json.dumps({"identity": {"probe": "rejection_sampling"}, "sessions": [{}]}))
    (tmp_path / "records.jsonl").write_bytes(to_line(record))
    assert dflash_mcmc.read(tmp_path).to_dict("records") == [{"run": tmp_path.name, **record}]


@pytest.mark.parametrize("overrides", [["-m", "condition=greedy,ps"], ["sweep=alpha_beta"], ["dry_run=true"], ["--cfg", "job"],
                                       ["hardware=slurm_cpu"]], ids=" ".join)
def test_what_is_not_one_run_is_refused(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(start=f"run: given {' '.join(overrides)!r}; allowed: the overrides of one run"):
        dflash_mcmc.run(*overrides)
    assert not list(tmp_path.iterdir())


def test_a_wrong_override_is_refused_as_on_the_command_line():
    for override in ("sampler=pwer_mh", "sampler.alpa=3", "smpler=greedy", "sampler.alpha=-1"):
        with pytest.raises(dflash_mcmc.ConfigError, match=override.partition("=")[0]):
            dflash_mcmc.run(override)
    with refused(start="run: given (['condition=ps'],); allowed: texts, such as run('condition=ps', 'dataset.limit=8')"):
        dflash_mcmc.run(["condition=ps"])


def test_a_table_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused(start="pandas: is not installed, and a table of records needs it; allowed: pip install pandas"):
        dflash_mcmc.read("outputs")


def test_signatures_show_the_defaults():
    shown = inspect.signature(dflash_mcmc.PowerMH).parameters
    assert {name: field.default for name, field in shown.items()}["alpha"] == dflash_mcmc.PowerMH().alpha
    assert not [name for name, field in shown.items() if field.default in ("???", inspect.Parameter.empty)]
    assert inspect.signature(dflash_mcmc.HFModel).parameters["path"].default is inspect.Parameter.empty
