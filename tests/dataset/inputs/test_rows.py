"""Rows of files and of the hub: values are unchanged, commits are pinned, and bad files are errors of one line."""

import gzip
import json
import re

import pytest

from dflash_mcmc.dataset.inputs import sources
from tests.refusals import refused

PINNED = "0123456789abcdef0123456789abcdef01234567"


def test_values_are_read_unchanged(tmp_path):
    """The datasets library would give each column one type: it would read dates as time stamps, and 2 as 2.0 next to null.

    A line separator of Unicode inside a text ends no line.
    """
    file = tmp_path / "rows.jsonl"
    written = [{"a": "2024-01-02", "b": 2, "c": ["x", 1]}, {"a": "x\u2028y\x85z", "b": None, "c": {"d": 0.5}}]
    first, second = (json.dumps(row, ensure_ascii=False) for row in written)
    file.write_text(f"\ufeff{first}\r\n\n  \n{second}", encoding="utf-8")
    assert sources.of_file(str(file), ("a", "b")) == written


def test_gzipped_files_are_read(tmp_path):
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"a": "x"}\n'))
    assert sources.of_file(str(file), ("a",)) == [{"a": "x"}]
    (tmp_path / "no.jsonl.gz").write_bytes(b'{"a": "x"}\n')
    with refused("dataset.path: cannot read", "no.jsonl.gz"):
        sources.of_file(str(tmp_path / "no.jsonl.gz"), ("a",))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": "x"}\n' * 99)[:-9])
    with refused("dataset.path: cannot read", "cut.jsonl.gz"):
        sources.of_file(str(tmp_path / "cut.jsonl.gz"), ("a",))


def test_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"a": 1}')
    assert sources.of_file("~/rows.jsonl", ("a",)) == [{"a": 1}]


@pytest.mark.parametrize(("content", "message"), [
    (None, "a JSON Lines or CSV file that exists"),
    (b"", "has no rows"),
    (b"\n\n", "has no rows"),
    (b'{"a": 1}\nnot json\n', "line 2 is not JSON: Expecting value"),
    (b'{"a": 1}\n{"a": \n', "line 2 is not JSON"),
    (b"[1, 2]\n", "line 1 is no JSON object: [1, 2]"),
    (b'{"a": 1}\n\n{"b": 1, "c": 2}\n', "line 3 lacks the field 'a'; it has: b, c"),
    (b'{"a": "\xff"}\n', "UnicodeDecodeError"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1 is not JSON"),
    (b"[" * 700 + b"]" * 700, "line 1 is not JSON: it has more than 64 levels of nesting"),
    (b'{"a": ' + b"9" * 10_000 + b"}", "line 1 is not JSON"),
], ids=["missing", "empty", "blank", "text", "cut off", "list", "field", "encoding", "nested", "deep list", "digits"])
def test_bad_files_are_errors_of_one_line(tmp_path, content, message):
    file = tmp_path / "bad.jsonl"
    if content is not None:
        file.write_bytes(content)
    with refused("dataset.path: ", str(file), message):
        sources.of_file(str(file), ("a",))


def test_a_folder_instead_of_a_file_is_an_error(tmp_path):
    with refused("a JSON Lines or CSV file that exists"):
        sources.of_file(str(tmp_path), ())
    with refused("dataset.path: given None"):
        sources.of_file(None, ())


class Table(list):
    """Rows as `datasets` has them."""

    @property
    def column_names(self):
        return list(self[0])


@pytest.fixture
def hub_of(monkeypatch):
    """A function that replaces the hub by rows or by an error. It returns the list of calls."""
    sources._loaded.cache_clear()
    calls = []

    def put(answer):
        def load(*arguments, **named):
            calls.append((arguments, named))
            if isinstance(answer, Exception):
                raise answer
            return Table(answer)

        monkeypatch.setattr("datasets.load_dataset", load)
        return calls

    yield put
    sources._loaded.cache_clear()


def test_rows_of_a_commit_are_loaded_once(hub_of):
    calls = hub_of([{"a": "x"}, {"a": "y"}])
    place = sources.Hub("some/rows", "main", "train", PINNED)
    first = sources.rows_of(place, ("a",), whole=True)
    first[0]["a"] = "changed"
    assert sources.rows_of(place, ("a",), whole=True) == [{"a": "x"}, {"a": "y"}]
    assert calls == [(("some/rows", "main"), {"revision": PINNED, "split": "train"})]


def test_errors_of_the_hub_have_one_line(hub_of, monkeypatch):
    hub_of(ValueError("no such\n  commit"))
    monkeypatch.setattr("dflash_mcmc.process.http.reachable", lambda: True)
    with refused(f"dataset.path: cannot load some/rows@{PINNED}: ValueError: no such commit"):
        sources.rows_of(sources.Hub("some/rows", revision=PINNED), ("a",), whole=True)
    monkeypatch.setattr("dflash_mcmc.process.http.reachable", lambda: False)
    with refused("some/rows is not in the cache", "hub cannot be reached; allowed: a file of its rows, dataset"):
        sources.rows_of(sources.Hub("some/rows", revision=PINNED), ("a",), whole=True)


BENCHMARKS = {"math500": ("HuggingFaceH4/MATH-500", None, "test", 500), "gsm8k": ("openai/gsm8k", "main", "test", 1319),
              "aime24": ("HuggingFaceH4/aime_2024", None, "train", 30), "aime25": ("math-ai/aime25", None, "test", 30),
              "humaneval": ("openai/openai_humaneval", None, "test", 164),
              "gpqa_diamond": ("Idavidrein/gpqa", "gpqa_diamond", "train", 198)}
UNGRADED = ("probe=deep_readout", "probe.answers=greedy", "draft=tiny")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_read_from_a_pinned_commit(make_config, hub_of, name):
    calls = hub_of([])
    config = make_config(*UNGRADED, f"dataset={name}")
    assert re.fullmatch("[0-9a-f]{40}", config.dataset.revision)
    place, subset, split, rows = BENCHMARKS[name]
    assert config.dataset.num_known() == rows
    for read in (config.dataset.problems, config.dataset.fingerprint):
        with refused(f"dataset.path: the split '{split}' of {place} has no rows"):
            read()
    assert calls == [((place, subset), {"revision": config.dataset.revision, "split": split})]


@pytest.mark.parametrize("revision", ["main", "null", PINNED[:12], PINNED.upper()])
def test_a_revision_that_is_not_a_commit_is_refused(make_config, revision):
    with refused("dataset.revision: given", "a commit of openai/gsm8k on the hub, all 40 hexadecimal digits", "dataset.path="):
        make_config("dataset=gsm8k", f"dataset.revision={revision}")


def test_with_a_file_no_revision_is_recorded(make_config, tmp_path):
    for revision in ("main", PINNED, "null"):
        config = make_config("dataset=gsm8k", f"dataset.revision={revision}", f"dataset.path={tmp_path}/rows.jsonl")
        assert config.dataset.revision is None
    assert make_config("dataset=gsm8k", f"dataset.revision='{PINNED}'").dataset.revision == PINNED
