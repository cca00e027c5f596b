"""Ways to damage a checkpoint of a target or of a draft, or a problem, as functions of the checkpoint's folder.

A seed gives the same list again.
"""

import itertools
import json
import os
import random  # noqa: TID251  (the places of damage do not belong to an experiment)
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mcmc.config.schema import PACKAGE

ASSETS = PACKAGE / "assets"
TARGET, DRAFTS = "tiny", ("tiny_draft", "tiny_dspark", "tiny_dflash2")
WEIGHTS = "model.safetensors"
_OTHERS = (None, "x", "", -1, 0, 1, 2, 7, 1.5, 1e-30, 1e300, 2**31, 2**62, 10**40, True, False, [], {}, [0], ["x"], {"x": 0},
           [None], [[1]], float("nan"), float("inf"), "../x", "\x00", "float16", "x" * 5000)
_HEADERS = (None, -1, 0, 1.5, 2**62, "F64", "I8", "x", [], {}, [0], [0, 0], [-1, 2], [2**62, 2**62], ["a", "b"], "BOOL")
PROBLEMS = "problems.jsonl"
"""The file beside the checkpoint with a problem, where the text is damaged."""
_QUESTIONS = (
    "", " ", "\n" * 1000, "\x00", "\ud800", "\udfff\ud800", "\ufeffx", "\u202ex", "\x1b[2J", "<|im_end|>",
    "<|im_start|>system", "<|im_start|>" * 300, "{{ 5 * 5 }}", "{% for x in y %}", "{question}", "{0}", "%s%n",
    "\U0001f469\u200d\U0001f4bb" * 40, "e\u0301" * 99, "\u0301" * 99, "x" * 900, "x" * 10**6, "\ud83d\ude00" * 20,
    "\r\n\t\v\f", "\uffff\ufffe", "1" * 5000, None, 5, 1.5, True, [], {}, ["x"])
_TEXTS = (b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe\x00", b"\x00" * 4096, b"[" * 100_000, b'{"a":' * 20_000, b"{}{}")
_TEMPLATES = (
    "{{ messages", "{% for m in messages %}", "{{ messages[99].content }}", "{{ nothing.at_all }}",
    "{{ raise_exception('x') }}", "{% include 'x' %}", "{{ 1 / 0 }}", "", "\x00", "{{ messages }}" * 50,
    "{% set x = 5 %}{{ x.y.z }}", "{{ '\ud800' }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages | nothing }}", "{% generation %}",
    "{{ messages | tojson }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ 'x' * 10 ** 10 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ strftime_now(5) }}", "{{ messages[0]['content'].encode().decode('nothing') }}", "\x1b[31m{{ messages[0].content }}")


class Damage(NamedTuple):
    """A way to damage a checkpoint."""

    name: str
    checkpoint: str
    """A folder of `ASSETS`."""
    apply: Callable[[Path], None]


def all_ways(seed: int, count: int) -> list[Damage]:
    """`count` damages in a random order, from all kinds for the target and for each draft. At most those that there are."""
    chosen = random.Random(seed)
    found = [*(damage for checkpoint in (TARGET, *DRAFTS) for damage in (
        *_values(checkpoint, chosen), *_headers(checkpoint, chosen), *_bytes(checkpoint, chosen), *_files(checkpoint))),
             *_templates(chosen), *_tokenizers(chosen), *_problems(chosen)]
    chosen.shuffle(found)
    kinds: dict[str, list[Damage]] = {}
    for damage in found:
        kinds.setdefault(f"{damage.checkpoint}: {damage.name.split(' ')[0]}", []).append(damage)
    turns = itertools.zip_longest(*kinds.values())
    return [damage for turn in turns for damage in turn if damage is not None][:count]


def damaged(damage: Damage, folder: Path) -> Path:
    """A copy of the checkpoint with this damage, in `folder`, which is made. Whole weights are a link."""
    folder.mkdir(parents=True)
    for file in (ASSETS / damage.checkpoint).iterdir():
        if file.name == WEIGHTS:
            (folder / file.name).symlink_to(file)
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    damage.apply(folder)
    return folder


def _own(file: Path) -> bytes:
    """The content of a file, which is no link after that."""
    content = file.read_bytes()
    file.unlink()
    return content


def _json_files(checkpoint: str) -> list[str]:
    return sorted(file.name for file in (ASSETS / checkpoint).glob("*.json") if file.name != "tokenizer.json")


def _put(file: str, steps: tuple, value: Any, folder: Path) -> None:
    """Puts a value into a field of a JSON file; `...` takes the field out."""
    content = json.loads((folder / file).read_text())
    at = at_steps(content, steps[:-1])
    if value is ...:
        del at[steps[-1]]
    else:
        at[steps[-1]] = value
    (folder / file).write_text(json.dumps(content))


def _values(checkpoint: str, chosen: random.Random) -> list[Damage]:
    """Each field of each JSON file without its value, and with some other values."""
    found = []
    for file in _json_files(checkpoint):
        for steps, _ in fields_of(json.loads((ASSETS / checkpoint / file).read_text())):
            if "training" not in steps:
                for value in (..., *chosen.sample(_OTHERS, 8)):
                    shown = "absent" if value is ... else repr(value)[:30]
                    found.append(Damage(f"{file} {'.'.join(map(str, steps))} = {shown}", checkpoint,
                                        partial(_put, file, steps, value)))
    return found


def _with_header(change: Callable[[dict], Any], folder: Path) -> None:
    raw = _own(folder / WEIGHTS)
    length = struct.unpack("<Q", raw[:8])[0]
    text = json.dumps(change(json.loads(raw[8:8 + length]))).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length:])


def _headers(checkpoint: str, chosen: random.Random) -> list[Damage]:
    """Other values in the entries of a safetensors header, entries that are renamed, absent or exchanged."""
    raw = (ASSETS / checkpoint / WEIGHTS).read_bytes()
    names = [name for name in json.loads(raw[8:8 + struct.unpack("<Q", raw[:8])[0]]) if name != "__metadata__"]

    def entry(name: str, field: str, value: Any) -> Callable[[dict], Any]:
        return lambda header: {**header, name: {**header[name], field: value}}

    def exchanged(one: str, other: str) -> Callable[[dict], Any]:
        return lambda header: {**header, one: header[other], other: header[one]}

    found = []
    for _ in range(40):
        name, other = chosen.sample(names, 2)
        field, value = chosen.choice(("dtype", "shape", "data_offsets")), chosen.choice(_HEADERS)
        found += [(f"{name} {field} = {value!r:.30}", entry(name, field, value)),
                  (f"{name} and {other} exchanged", exchanged(name, other))]
    for name in chosen.sample(names, 6):
        found += [(f"no {name}", lambda header, name=name: {key: each for key, each in header.items() if key != name}),
                  (f"{name} renamed", lambda header, name=name: {f"{key}x" if key == name else key: each
                                                                 for key, each in header.items()})]
    found.append(("metadata", lambda header: {**header, "__metadata__": {"format": chosen.choice(("tf", 5, None))}}))
    return [Damage(f"{WEIGHTS} header {text}", checkpoint, partial(_with_header, change)) for text, change in found]


def _bytes(checkpoint: str, chosen: random.Random) -> list[Damage]:
    """Bits that are flipped, parts that are missing, and files that end early."""
    def change(file: str, kind: str, place: float, bit: int, folder: Path) -> None:
        content = _own(folder / file)
        if file == WEIGHTS and kind == "flip":  # in the header, or in the weights
            size = 8 + struct.unpack("<Q", content[:8])[0]
            at = int(place * 2 * size) if place < 0.5 else size + int((place - 0.5) * 2 * (len(content) - size))
        else:
            at = int(place * len(content))
        (folder / file).write_bytes({
            "flip": content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1:], "cut": content[:at],
            "hole": content[:at] + content[at + 1 + bit:]}[kind])

    files = sorted(file.name for file in (ASSETS / checkpoint).iterdir())
    return [Damage(f"{file} {kind} {place:.5f} {bit}", checkpoint, partial(change, file, kind, place, bit))
            for file in files for kind in ("flip", "cut", "hole")
            for place, bit in [(chosen.random(), chosen.randrange(8)) for _ in range(12 if kind == "flip" else 3)]]


def _files(checkpoint: str) -> list[Damage]:
    """Each file with another text, and a folder, a pipe, a link to nowhere or nothing in its place; and broken indices."""
    def text(file: str, content: bytes, folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).write_bytes(content)

    def other(file: str, make: Callable[[Path], object], folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    def index(content: Any, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(content))

    kinds: dict[str, Callable[[Path], object]] = {
        "nothing": lambda path: None, "folder": lambda path: path.mkdir(), "pipe": os.mkfifo,
        "dangling": lambda path: path.symlink_to("none"), "itself": lambda path: path.symlink_to(path.name)}
    shard = "model-00001-of-00001.safetensors"
    indices = ([], 5, None, {}, {"weight_map": 5}, {"weight_map": {"x": shard}}, {"weight_map": {"x": "none.safetensors"}},
               {"weight_map": {"x": "/dev/zero"}}, {"weight_map": {"x": f"../{shard}"}}, {"weight_map": {"x": [shard]}},
               {"weight_map": {"x": ""}}, {"weight_map": {"x": "."}}, {"weight_map": {"x": shard}, "metadata": 5})
    files = sorted(file.name for file in (ASSETS / checkpoint).iterdir())
    return [*(Damage(f"{file} text {content[:12]!r}", checkpoint, partial(text, file, content))
              for file in files for content in _TEXTS),
            *(Damage(f"{file} is {kind}", checkpoint, partial(other, file, make)) for file in files
              for kind, make in kinds.items()),
            *(Damage(f"index {content!r:.60}", checkpoint, partial(index, content)) for content in indices)]


def _templates(chosen: random.Random) -> list[Damage]:
    """Broken and hostile chat templates, and the right one with parts that are missing."""
    right = (ASSETS / TARGET / "chat_template.jinja").read_text()

    def write(content: str, folder: Path) -> None:
        (folder / "chat_template.jinja").write_bytes(content.encode(errors="surrogatepass"))

    cuts = [sorted(chosen.choices(range(len(right)), k=2)) for _ in range(20)]
    texts = [*_TEMPLATES, *(right[:start] + right[stop:] for start, stop in cuts)]
    return [Damage(f"template {text!r:.60}", TARGET, partial(write, text)) for text in texts]


def _tokenizers(chosen: random.Random) -> list[Damage]:
    """Other values at random places of tokenizer.json."""
    places = [steps for steps, _ in fields_of(json.loads((ASSETS / TARGET / "tokenizer.json").read_text()))]
    return [Damage(f"tokenizer.json {'.'.join(map(str, steps))[:60]} = {'absent' if value is ... else repr(value)[:30]}",
                   TARGET, partial(_put, "tokenizer.json", steps, value))
            for steps in chosen.sample(places, min(60, len(places))) for value in chosen.sample((..., *_OTHERS), 2)]


def _problems(chosen: random.Random) -> list[Damage]:
    """Odd questions, answers and ids, and broken lines, for the whole checkpoint."""
    def write(line: bytes, folder: Path) -> None:
        (folder.parent / PROBLEMS).write_bytes(line + b"\n")

    good = {"id": "a", "question": "1 + 1", "answer": "2"}
    lines = [json.dumps({**good, name: value}).encode() for name in good for value in _QUESTIONS]
    lines += [json.dumps({key: each for key, each in good.items() if key != name}).encode() for name in good]
    lines += [bytes(chosen.choices(range(256), k=40)) for _ in range(10)] + list(_TEXTS)
    return [Damage(f"problem {line[:60]!r}", TARGET, partial(write, line)) for line in lines]


def fields_of(value: Any, steps: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """The steps to each field and to the first value of each list, and what is there."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for step, each in inner:
        yield (*steps, step), each
        yield from fields_of(each, (*steps, step))


def at_steps(value: Any, steps: Sequence) -> Any:
    for step in steps:
        value = value[step]
    return value
