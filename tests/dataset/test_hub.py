"""`dataset=hub` from local folders: fields, templates, conversations, splits, and an error of one line for each mistake."""

import dataclasses
import json
import sys

import pytest

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.dataset.inputs import sources
from dflash_mcmc.process import http
from dflash_mcmc.types import Problem
from tests.refusals import refused

ROWS = [{"story": "Lena has 2 pens.", "What is asked": "How many?", "gold": {"text": ["2"]}, "n": 7},
        {"story": "Tom has 3 pens.", "What is asked": "How many pens?", "gold": {"text": ["3"]}, "n": 8}]
TEMPLATES = ("dataset.question_template={{ story }} {{ row['What is asked'] }}", "dataset.answer_template={{ gold.text[0] }}",
             "dataset.id_field=n")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of JSON Lines files: the split test with ROWS, and the split train with one other row."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    sources._loaded.cache_clear()
    made = tmp_path / "asked"
    made.mkdir()
    (made / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (made / "train.jsonl").write_text(json.dumps({**ROWS[0], "story": "Mia has 1 pen.", "gold": {"text": ["1"]}}) + "\n")
    return made


@pytest.fixture
def made(make_config, folder):
    """A function from overrides to the configuration for the folder."""
    return lambda *overrides: make_config("dataset=hub", f"dataset.path={folder}", *overrides)


def test_templates_over_the_fields_of_a_row(made):
    config = made(*TEMPLATES)
    assert config.dataset.problems() == [Problem("7", "Lena has 2 pens. How many?", "2"),
                                         Problem("8", "Tom has 3 pens. How many pens?", "3")]
    assert identity_hash(made(*TEMPLATES[:2])) != identity_hash(config) == identity_hash(made(
        TEMPLATES[0].replace("story }}", "row.story }}"), *TEMPLATES[1:]))


def test_examples_of_another_split(made):
    dataset = made(*TEMPLATES, "dataset.fewshot=1", "dataset.fewshot_split=train", "dataset.prompt=plain").dataset
    [problem, _] = dataset.problems()
    assert dataset.prompting().conversation(problem).examples == (("Mia has 1 pen. How many?", "1"),)


def test_a_folder_that_save_to_disk_wrote_with_conversations_and_tools(make_config, folder, tmp_path):
    import datasets

    called = [{"type": "function", "function": {"name": "f", "arguments": "1"}}]
    call = {"role": "assistant", "content": None, "tool_calls": called}
    turns = [{"role": "user", "content": "Call f."}, call, {"role": "tool", "content": "2"},
             {"role": "assistant", "content": "It is 2."}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    table = datasets.Dataset.from_list([{"turns": turns, "tools": json.dumps(tools)}], split="test")
    table.save_to_disk(str(tmp_path / "saved"))
    [problem] = make_config("dataset=hub", f"dataset.path={tmp_path}/saved", "dataset.messages_field=turns",
                            "dataset.tools_field=tools", "dataset.answer_field=null").dataset.problems()
    assert problem.messages == (turns[0], {name: part for name, part in call.items() if part is not None}, turns[2])
    assert (problem.question, problem.answer, problem.tools) == ("Call f.", "", tuple(tools))
    with refused("dataset.split: given 'train'; allowed: dataset.split=test"):
        make_config("dataset=hub", f"dataset.path={tmp_path}/saved", "dataset.split=train").dataset.problems()


def test_a_folder_of_one_file_says_which_split_it_is(make_config, folder, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/q.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    with refused("dataset.split: given 'test'; allowed: dataset.split=train"):
        make_config(f"dataset={tmp_path}/own").dataset.problems()
    [problem] = make_config(f"dataset={tmp_path}/own", "dataset.split=train").dataset.problems()
    assert problem.answer == "2"


MISTAKES = [
    ({"question_field": "stori"}, "lacks the field 'stori' (did you mean 'story'?); it has: story, What is asked, gold, n"),
    ({"split": "tset"}, "dataset.split: given 'tset'; allowed: dataset.split=train, dataset.split=test (did you mean 'test"),
    ({"name": "main"}, "dataset.name: given 'main'; allowed: dataset.name=default"),
    ({"question_template": "{{ stori }}"}, "lacks the field 'stori'"),
    ({"question_template": "{{ row.stori }}"}, "dataset.question_template: row 0: UndefinedError"),
    ({"question_template": "{{ row.__class__.__mro__ }}"}, "row 0: SecurityError"),
    ({"answer_field": "gold", "answer_template": None}, "has {'text': ['2']} for its answer; allowed: a text"),
    ({"path": "./nothing"}, "dataset.path: given './nothing'; allowed: a folder that exists, or a name on the hub"),
    ({"path": "nobody/nothing"}, "nobody/nothing is not in the cache, and the hub cannot be reached; allowed: a file"),
]


def test_mistakes_are_errors_of_one_line(made, monkeypatch):
    monkeypatch.setattr(http, "reachable", lambda: False)
    right = made("dataset.question_field=story", "dataset.answer_template={{ gold.text[0] }}").dataset
    assert len(right.problems()) == 2
    for fields, message in MISTAKES:
        with refused(message):
            dataclasses.replace(right, **fields).problems()


def test_a_folder_without_data_is_refused_before_the_library_is_imported(make_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it raises ImportError
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/picture.dat").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for name, message in (("nothing", "nothing'; allowed: a folder with files of data (.parquet, "),
                          ("model", "allowed: a folder of data; this one has a config.json, as a checkpoint has: model=")):
        with refused(message):
            make_config("dataset=hub", f"dataset.path={tmp_path / name}").dataset.problems()


def test_a_template_that_is_no_template_is_refused_before_anything_is_read(make_config):
    with refused("dataset.question_template: given '{{ a'; allowed: a Jinja template"):
        make_config("dataset=hub", "dataset.path=a/b", "dataset.question_template={{ a")
    with refused("dataset.path: given None; allowed: a name on the hub"):
        make_config("dataset=hub")
