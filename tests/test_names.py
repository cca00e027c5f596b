"""Names and imports: a component has a file and a test; components do not import each other; help is light."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dflash_mcmc.components import GROUPS, ROOMS, registered
from dflash_mcmc.config.help import PROGRAMS, options, text_for
from tests import processes
from tests.conftest import ROOT

PACKAGE = ROOT / "dflash_mcmc"
HEAVY = {"torch", "transformers", "wandb", "datasets", "accelerate", "matplotlib", "sympy", "math_verify", "scipy",
         "pandas", "arviz_stats"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
COMPONENTS = [component for group in GROUPS for component in registered(group).values()]


def test_a_component_has_a_file_and_a_test():
    wrong = []
    for component in COMPONENTS:
        room = ROOMS.get(component.group, component.group)
        place = PACKAGE / room / component.name
        if not (Path(component.file) in (place.with_suffix(".py"), place / "__init__.py")
                and (ROOT / "tests" / room / f"test_{component.name}.py").is_file() and component.summary.endswith(".")):
            wrong.append(f"{component.group}={component.name}")
    assert not wrong


def test_components_do_not_import_each_other():
    wrong = []
    for path in MODULES:
        parts = path.relative_to(PACKAGE).parts
        if len(parts) < 2 or not _is_component(*parts[:2]):
            continue
        own = f"dflash_mcmc.{parts[0]}.{parts[1].removesuffix('.py')}."
        for imported in _imports(ast.parse(path.read_text())):
            names = imported.split(".")
            is_leaf = names[0] == "dflash_mcmc" and len(names) > 2 and _is_component(*names[1:3])
            if is_leaf and not f"{imported}.".startswith(own):
                wrong.append(f"{path.relative_to(PACKAGE)} imports the component {imported}")
    assert not wrong


def test_samplers_and_shared_modules_import_no_model_library():
    wrong = []
    for path in [*PACKAGE.glob("sampler/*.py"), *(PACKAGE / f"{name}.py" for name in (
            "rng", "ops", "types", "statistics/summaries", "components"))]:
        top_level = {name.split(".")[0] for node in ast.parse(path.read_text()).body
                     if isinstance(node, (ast.Import, ast.ImportFrom)) for name in _imports(node)}
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in top_level & HEAVY]
    assert not wrong


def modules_after(code: str) -> set[str]:
    """Names of the modules that a new interpreter has imported after the code."""
    code += "\nimport sys; print('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.partition("MODULES ")[2].split())


HELP = "command.main.__wrapped__(['--help'])"


@pytest.mark.parametrize(("module", "code"), [
    ("dflash_mcmc.__main__", "import dflash_mcmc.config.command as c; c.prepare()"),
    ("dflash_mcmc.train.__main__", HELP), ("tests.bench.__main__", HELP)])
def test_command_line_and_help_start_without_heavy_libraries(module, code):
    imported = modules_after(f"import {module} as command; {code}")
    assert module in imported
    assert not imported & HEAVY


def test_modules_and_public_names_have_docstrings():
    wrong = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        public = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                  and not node.name.startswith("_")]
        wrong += [f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'the module')}" for node in (tree, *public)
                  if not ast.get_docstring(node)]
    assert not wrong


def _is_component(room: str, name: str) -> bool:
    return any(component.name == name.removesuffix(".py") and ROOMS.get(component.group, component.group) == room
               for component in COMPONENTS)


def _imports(node: ast.AST) -> list[str]:
    names = []
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            names += [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and child.module:
            names.append(child.module)
    return names


# Components of another installed package.

PLUGIN = '''
"""A sampler from elsewhere."""
from dataclasses import dataclass
from dflash_mcmc.components import identity
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.components import register
from dflash_mcmc.sampler import Sampler
from dflash_mcmc.types import ChainResult, Trajectory

@register("sampler", "elsewhere")
@dataclass(slots=True, kw_only=True)
class Elsewhere(Sampler):
    """From elsewhere."""
    warmth: float = identity(0.5, "temperature", gt=0)

    def chain(self, prompt, horizon, key):
        path = yield Draw(Trajectory.start(prompt), horizon, SamplingParams(self.warmth), key)
        return ChainResult(path)
'''


def install(folder, code: str) -> None:
    """Writes the files of an installed distribution with a plugin."""
    (folder / "elsewhere.py").write_text(code)
    info = folder / "elsewhere-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dflash_mcmc.plugins]\nelsewhere = elsewhere\n")


def run(folder, *arguments: str) -> subprocess.CompletedProcess:
    """Runs the command in a process that finds the distribution."""
    command = ["-m", "dflash_mcmc", *arguments]
    return processes.run(command, folder, PYTHONPATH=str(folder))


def test_a_plugin_is_an_ordinary_option(tmp_path):
    install(tmp_path, PLUGIN)
    wrong = run(tmp_path, "sampler=elsewhere", "sampler.warmth=-1")
    assert wrong.returncode == 2
    assert "sampler.warmth: given -1.0; allowed: a number > 0" in wrong.stderr
    (tmp_path / "conf/sampler").mkdir(parents=True)
    (tmp_path / "conf/sampler/warm.yaml").write_text("defaults:\n  - /schema/sampler@_here_: elsewhere\nwarmth: 2.0\n")
    own = ("--config-dir", str(tmp_path / "conf"), "sampler=warm")
    assert "| elsewhere warmth=2" in run(tmp_path, *own, "dataset.limit=2", "tracker=none").stdout
    (tmp_path / "elsewhere-1.0.dist-info/entry_points.txt").unlink()
    unregistered = run(tmp_path, *own)
    assert (unregistered.returncode, unregistered.stderr.count("\n")) == (2, 1)
    assert "sampler=elsewhere: an option file extends a component that no module registers" in unregistered.stderr


@pytest.mark.parametrize(("code", "said"), [
    ("import no_such_module", ("elsewhere", "no_such_module")),
    (PLUGIN.replace("(Sampler)", ""), ("sampler=elsewhere: Elsewhere must inherit dflash_mcmc.sampler.Sampler",))],
    ids=["cannot be loaded", "without the base class"])
def test_a_wrong_plugin_is_refused_in_one_line(tmp_path, code, said):
    install(tmp_path, code)
    done = run(tmp_path, "dataset.limit=2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert all(text in done.stderr for text in said)


# The help of a group lists every option with its meaning and file, and every field.

def test_every_option_has_a_meaning():
    for group, entries in options().items():
        for name, (meaning, _) in entries.items():
            assert meaning.endswith("."), f"conf/{group}/{name}.yaml does not begin with a comment with its meaning"


def test_the_help_of_every_group_has_its_options_and_fields():
    shown = text_for(["--help", *options()])
    for file in (ROOT / "conf").glob("*/*.yaml"):
        assert f"conf/{file.parent.name}/{file.name}" in shown
    for component in COMPONENTS:
        assert f"  {component.name} " in shown
        assert f"{component.group}/{component.name}: {component.summary}" in shown


def test_the_help_of_a_group_of_values_lists_its_options():
    shown = text_for(["condition", "-h"])
    assert "conf/condition/blend_ps.yaml" in shown
    assert "conf/sampler" not in shown


def test_an_unknown_group_is_an_error_of_one_line(command):
    done = command("dflash_mcmc", "--help", "samplers")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: --help: given 'samplers' (did you mean 'sampler'?); allowed: ")


def test_help_begins_with_four_conditions_and_each_program_that_it_names_is_one(command):
    """A program is also a first word of the one entry point."""
    shown = text_for(["--help"])
    assert re.search(r"condition +greedy  temp  ps  blend_ps  and \d+ more\n", shown)
    for name in PROGRAMS:
        assert re.search(rf"^  {name} ", shown, re.MULTILINE)
        assert find_spec(f"dflash_mcmc.{name}")
    assert command("dflash_mcmc", "report").stderr == command("dflash_mcmc.report").stderr
