"""Ways to damage the files of a run folder. Each is a function of the folder; the list is the same for a seed."""

import json
import os
import random  # noqa: TID251  (the places of damage do not belong to an experiment)
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.store.files import CHECKSUM, to_line

OTHERS = (None, "x", -1, 1.5, True, [], {}, 10**40)
"""Values to put into every field."""
ALLOWED = {  # of OTHERS, for each field; the fields that are not here take none of them
    **dict.fromkeys(("problem", "rule", "reason", "gold", "text", "grader"), ("x",)),
    **dict.fromkeys(("answer", "subject"), (None, "x")), "level": (None, "x", -1), "same_string": (None, True),
    "ended": (True,), "log_p": (-1, 1.5, 10**40), "log_q": (None, -1, 1.5, 10**40), "law_error": (1.5,), "seconds": (1.5,),
    "share_seconds": (1.5,), "walls": ([],), "tokens": ([],), "trace": ([],)}
_FILES = ("records.jsonl", "records.1.jsonl", "lock", "run.json", "config.yaml", "summary.json", "attempts.jsonl")
_SHAPES = ("{}", "[]", "null", '"x"', "5", "[" * 100_000, '{"a":' * 300 + "1" + "}" * 300,
           '{"identity": {}, "sessions": [{}]}',
           '{"identity": 5, "sessions": [{}]}', '{"identity": {"seed": 0}, "sessions": 5}',
           '{"identity": {"seed": 0}, "sessions": [5]}', '{"identity": {"sampler": []}, "sessions": [{"started": 5}]}',
           '{"jsonl": 5}', '{"jsonl": {"lines": {"x": "y"}}}', '{"condition": [], "num_samples": "x"}')
"""Readable JSON of wrong shapes."""
_BROKEN_LINES = {
    "a list": b"[]", "a text": b'"x"', "null": b"null", "nothing": b"", "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "half of deep lists": b"[" * 100_000,
    "many digits": b'{"problem": "p0", "chain": ' + b"9" * 5000 + b"}", "no JSON": b"{problem}", "no text": b"\xff\xfe\x00{",
    "a repeated key": b'{"problem": "p0", "problem": "p1", "chain": 0}', "NaN": b'{"problem": "p0", "chain": NaN}',
    "an infinite chain": b'{"problem": "p0", "chain": 1e999}', "zeros in the middle": b"\0" * 4096}


class Damage(NamedTuple):
    """A way to damage a folder."""

    name: str
    apply: Callable[[Path], None]
    noticed: bool | None = None
    """Whether the records must be refused; None where what is left may be whole."""


def all_ways(seed: int, flips: int) -> list[Damage]:
    """Every kind of damage, with `flips` bits at random places and as many cut lines."""
    chosen = random.Random(seed)
    return [*_flips(chosen, flips), *_cuts(chosen, flips // 2), *_fields(), *_lines(), *_not_files(), *_names(),
            *_zeros(), *_numbers(), *shapes()]


def shapes() -> list[Damage]:
    """Each JSON file of a run with each wrong shape."""
    return [Damage(f"{shape[:40]} as {name}", lambda folder, name=name, shape=shape: _write(folder / name, shape.encode()))
            for name in ("run.json", "summary.json", "tracked.json", "config.yaml") for shape in _SHAPES]


def records_path(folder: Path) -> Path:
    return folder / "records.jsonl"


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = records_path(folder)
        path.write_bytes(change(path.read_bytes()))
    return apply


def _flips(chosen: random.Random, count: int) -> list[Damage]:
    """Bits at random places of the file, and each bit of the end of its second line."""
    def flip(place: float | int, bit: int) -> Callable[[bytes], bytes]:
        def change(content: bytes) -> bytes:
            end = content.index(b"\n", content.index(b"\n") + 1)
            at = int(place * len(content)) if isinstance(place, float) else end - place
            return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1:]
        return change
    places = [(chosen.random(), chosen.randrange(8)) for _ in range(count)]
    ends = [(place, bit) for place in range(40) for bit in range(8)]
    ends = chosen.sample(ends, min(count, len(ends)))
    return [Damage(f"bit {bit} at {place}", _changed(flip(place, bit)), None if isinstance(place, float) else True)
            for place, bit in [*places, *ends]]


def _cuts(chosen: random.Random, count: int) -> list[Damage]:
    """A part of the second line is missing, with or without what follows it."""
    def cut(start: float, end: float) -> Callable[[bytes], bytes]:
        def change(content: bytes) -> bytes:
            first, second, *rest = content.split(b"\n")
            a, b = sorted((int(start * len(second)), int(end * len(second))))
            return b"\n".join([first, second[:a] + second[max(b, a + 1):], *rest])
        return change

    def end(place: float) -> Callable[[bytes], bytes]:
        return lambda content: content[: int(place * len(content))]
    parts = [(chosen.random(), chosen.random()) for _ in range(count)]
    return [*(Damage(f"line without {a:.3f} to {b:.3f}", _changed(cut(a, b)), True) for a, b in parts),
            *(Damage(f"file up to {a:.3f}", _changed(end(a))) for a, _ in parts)]


def _fields() -> list[Damage]:
    """Each field with each other value, and without it, in a line with a right checksum."""
    def put(name: str, **value: object) -> Callable[[bytes], bytes]:
        def change(content: bytes) -> bytes:
            first, second, *rest = content.split(b"\n")
            left = {key: old for key, old in json.loads(second).items() if key not in (CHECKSUM, name)}
            return b"\n".join([first, to_line({**left, **value})[:-1], *rest])
        return change
    names = [*ALLOWED, "chain", "verdict", "num_tokens", "proposals", "accepted", "moved", "abandoned", "tokens_drawn",
             "target_forwards", "token_forwards", "tokens_skipped", "blocks_drafted", "tokens_drafted", "tokens_kept"]
    optional = ("tokens", "trace")
    made = [Damage(f"{name} = {value!r:.20}", _changed(put(name, **{name: value})),
                   not any(type(value) is type(good) and value == good for good in ALLOWED.get(name, ())))
            for name in names for value in OTHERS]
    return [*made, *(Damage(f"no {name}", _changed(put(name)), name not in optional) for name in names)]


def _lines() -> list[Damage]:
    def put(line: bytes) -> Callable[[bytes], bytes]:
        return lambda content: b"\n".join([content.split(b"\n")[0], line, *content.split(b"\n")[2:]])
    return [Damage(f"line: {name}", _changed(put(line)), True) for name, line in _BROKEN_LINES.items()]


def _not_files() -> list[Damage]:
    """A pipe, a folder, a socket, a device and links in place of each file."""
    def pipe(path: Path) -> None:
        os.mkfifo(path)

    def listening(path: Path) -> None:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)
    kinds: dict[str, Callable[[Path], None]] = {
        "pipe": pipe, "folder": lambda path: path.mkdir(), "socket": listening,
        "dangling link": lambda path: path.symlink_to("none"),
        "device": lambda path: path.symlink_to("/dev/zero"), "link to itself": lambda path: path.symlink_to(path.name)}

    def replace(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            make(folder / name)
        return apply
    return [Damage(f"{kind} as {name}", replace(name, make), True if name.startswith("records") else None)
            for name in _FILES for kind, make in kinds.items()]


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _names() -> list[Damage]:
    return [Damage(f"file {name}", lambda folder, name=name: _write(folder / name, b""), True)
            for name in ("records.99999999999999999999.jsonl", "records.4093.jsonl", "records.0.jsonl", "records.01.jsonl",
                         "records.\u0663.jsonl")]


def _zeros() -> list[Damage]:
    ends = {"": b"\0" * 4096, "with a line feed": b"\0" * 512 + b"\n", "after a part": b'{"problem": "p' + b"\0" * 100,
            "twice": b"\0" * 30 + b"\n" + b"\0" * 30 + b"\n"}
    return [Damage(f"zeros at the end {name}", _changed(lambda content, end=end: content + end), False)
            for name, end in ends.items()]


def _numbers() -> list[Damage]:
    return [Damage(f"lock with {content[:12]!r}", lambda folder, content=content: _write(folder / "lock", content))
            for content in (b"99999999", b"00004094", b"x", b"-1", b"1" * 400, b"\0" * 8, b"\0" * 4096, b"")]
