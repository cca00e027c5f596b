"""Measures the layout of the package: `python -m tests.house`, or `make house`. `--check` exits with 1 above a limit.

    path of one run      files on the call stack when a run's configuration is typed, its engine steps, a record is appended,
                         the summary is written and the table is rendered: what to read to follow a run.
                         Without engine and components
    lines on it          lines of the functions on that stack
    called in one run    files with any function that one sampling run calls; the functions; their lines. Without engine and
                         components
    modules at the root  files directly in dflash_mcmc/
    branches on probes   comparisons that ask whether a configuration has a probe, outside runner/tasks.py and probe/
    names of leaves      comparisons of a component's name with a literal, outside the component's own file
    recurring classes    class names, without leading underscores, that two files define
    optional hooks       hasattr() and getattr() with a default on a component of a configuration
    typed records        parameters for records of samples that are not typed as `Record`
    circles              files that import each other, imports inside functions and for types included
    born late            attributes that a class sets first outside `__init__`
    small files          files under 60 lines with a single importer

A limit of size has a little air above where the layout stands; one of kind has none. The aims are 265 files, 45,000 lines, and
none of circles, recurring classes and attributes born late.
"""

import ast
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from tests import imports

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dflash_mcmc"
GROUPS = ("model", "draft", "blend", "sampler", "decoder", "probe", "dataset", "grading", "hardware", "engine",
          "tracker", "potential")
_TRACED = """
import runpy, sys
root, called, path = sys.argv[1], set(), set()
EVENTS = {"to_typed", "steps", "append", "write_summary", "overall"}
sys.path.insert(0, root)
sys.argv = ["dflash_mcmc", "sampler=greedy", "dataset.limit=1", "tracker=none"]

def note(frame, event, argument):
    code = frame.f_code
    if not code.co_flags & 1 or not code.co_filename.startswith(root + "/dflash_mcmc/"):
        return
    if not code.co_name.startswith("<"):
        called.add(code)
    while code.co_name in EVENTS and frame:
        path.add(frame.f_code)
        frame = frame.f_back

def shown(codes):
    for code in codes:
        last = max(line for _, _, line in code.co_lines() if line)
        yield f"{code.co_filename}:{last + 1 - code.co_firstlineno if not code.co_name.startswith('<') else 0}"

sys.settrace(note)
try:
    runpy.run_module("dflash_mcmc", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.settrace(None)
print("CALLED", *shown(called), "PATH", *shown(path), sep="\\n")
"""


class Figure(NamedTuple):
    """One number of the layout."""

    name: str
    value: int
    limit: int | None
    """Largest value that `--check` accepts; None accepts every value."""
    details: tuple[str, ...] = ()


def sources() -> dict[Path, ast.Module]:
    """Every file of the package, parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def functions_of_one_run() -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """(functions on the path of one sampling run, functions that it calls), each with its file and its number of lines.

    Engine and components are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _TRACED, str(ROOT)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    called, _, on_path = done.stdout.partition("CALLED\n")[2].partition("PATH\n")
    return _of_the_trunk(on_path), _of_the_trunk(called)


def _of_the_trunk(text: str) -> list[tuple[Path, int]]:
    found = [(Path(name), int(count)) for name, _, count in (line.rpartition(":") for line in text.splitlines())]
    return [(path, count) for path, count in found if path.is_relative_to(PACKAGE) and room(path) not in GROUPS]


def room(path: Path) -> str:
    """The first folder of a file below the package; empty for the root."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text().splitlines())


def probe_branches(path: Path, tree: ast.Module) -> Iterator[str]:
    """Places that compare the name of a configuration's probe."""
    if path == PACKAGE / "runner" / "tasks.py" or room(path) == "probe":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and re.search(r"\bprobe\)? (==|!=|is|in|not)", ast.unparse(node)):
            yield place(path, node)


def leaf_names(path: Path, tree: ast.Module) -> Iterator[str]:
    """Places that compare `name_of(...)` with a literal. A component may name itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and "name_of(" in ast.unparse(node):
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            literals = [value for value in constants if isinstance(value, str)]
            if (literals and room(path) not in GROUPS) or any(literal != path.stem for literal in literals):
                yield place(path, node)


def optional_hooks(path: Path, tree: ast.Module) -> Iterator[str]:
    """Places that ask whether a component of a configuration has an attribute."""
    pattern = r"(hasattr|getattr)\((self\.)?_?((job\.)?config\.(" + "|".join(GROUPS) + r")|component(_of)?)\b"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.match(pattern, text := ast.unparse(node)) and (
                text.startswith("hasattr") or len(node.args) == 3):
            yield place(path, node)


def place(path: Path, node: ast.AST) -> str:
    """`file:line`, relative to the checkout."""
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def dict_records(path: Path, tree: ast.Module) -> Iterator[str]:
    """Parameters named `record` or `records` that are annotated as plain dictionaries. Records of probes are not typed."""
    if room(path) == "probe":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg in ("record", "records") and node.annotation is not None and (
                re.search(r"\bdict\b", ast.unparse(node.annotation))):
            yield place(path, node)


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def figures() -> list[Figure]:
    """All numbers of the layout."""
    parsed = sources()
    on_path, called = functions_of_one_run()
    path_files, called_files = (sorted({path for path, _ in each}) for each in (on_path, called))
    classes = Counter(node.name.lstrip("_") for tree in parsed.values() for node in tree.body
                      if isinstance(node, ast.ClassDef))
    recurring = [name for name, count in classes.items() if count > 1]
    lengths = sorted((length, f"{path.relative_to(ROOT)}: {name}") for path, tree in parsed.items()
                     for name, length in functions(tree))
    files = sorted((lines(path), str(path.relative_to(ROOT))) for path in parsed)
    modules = imports.names_of(PACKAGE)
    edges = imports.graph(modules, parsed)
    circles = [module for circle in imports.circles(edges) for module in circle]
    late = [f"{path.relative_to(PACKAGE)}: {name}" for path, tree in parsed.items() for name in imports.born_late(tree)]
    small = imports.small_with_one_importer(edges, {module: lines(path) for module, path in modules.items()})
    by_room = Counter(room(path) or "root" for path in called_files)
    found = {check: [line for path, tree in parsed.items() for line in check(path, tree)]
             for check in (probe_branches, leaf_names, optional_hooks, dict_records)}
    return [
        Figure("path of one run", len(path_files), 11, tuple(str(path.relative_to(PACKAGE)) for path in path_files)),
        Figure("lines on it", sum(count for _, count in on_path), 330),
        Figure("called in one run", len(called_files), None,
               tuple(f"{name}: {count}" for name, count in by_room.most_common())),
        Figure("functions", len(called), None),
        Figure("lines in them", sum(count for _, count in called), None),
        Figure("modules at the root", len(list(PACKAGE.glob("*.py"))), 15),
        Figure("branches on probes", len(found[probe_branches]), 0, tuple(found[probe_branches])),
        Figure("names of leaves", len(found[leaf_names]), 0, tuple(found[leaf_names])),
        Figure("optional hooks", len(found[optional_hooks]), 0, tuple(found[optional_hooks])),
        Figure("records as dictionaries", len(found[dict_records]), None, tuple(found[dict_records])),
        Figure("recurring classes", len(recurring), 0, tuple(recurring)),
        Figure("circles", len(circles), 0, tuple(circles)),
        Figure("born late", len(late), 0, tuple(late)),
        Figure("small files", len(small), 2, tuple(small)),
        Figure("longest file", files[-1][0], 600, (files[-1][1],)),
        Figure("longest function", lengths[-1][0], 80, (lengths[-1][1],)),
        Figure("median function", lengths[len(lengths) // 2][0], None),
        Figure("files", len(parsed), 265),
        Figure("lines", sum(length for length, _ in files), 45_500),
    ]


def main(arguments: list[str]) -> None:
    """Prints the table."""
    measured = figures()
    rows = [(figure.name, figure.value, "" if figure.limit is None else figure.limit, ", ".join(figure.details[:6]))
            for figure in measured]
    print(tabulate(rows, headers=("layout", "now", "limit", "where"), tablefmt="github"))
    if "--check" in arguments:
        over = [figure for figure in measured if figure.limit is not None and figure.value > figure.limit]
        for figure in over:
            print(f"{figure.name}: {figure.value}; allowed: {figure.limit}: {', '.join(figure.details)}", file=sys.stderr)
        sys.exit(bool(over))


if __name__ == "__main__":
    main(sys.argv[1:])
