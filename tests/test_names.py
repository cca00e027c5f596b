"""Names and imports: a component has an option, a file and a test; components do not import each other; help is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mcmc.registry import GROUPS, ROOMS, components
from tests.conftest import ROOT

PACKAGE = ROOT / "dflash_mcmc"
HEAVY = {"torch", "transformers", "wandb", "datasets", "accelerate", "matplotlib", "sympy", "math_verify", "scipy",
         "statsmodels", "pandas", "arviz"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
COMPONENTS = [component for group in GROUPS for component in components(group).values()]


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda c: f"{c.group}={c.name}")
def test_a_component_has_an_option_a_file_and_a_test(component):
    assert (ROOT / "conf" / component.group / f"{component.name}.yaml").is_file()
    room = ROOMS.get(component.group, component.group)
    place = PACKAGE / room / component.name
    assert Path(component.file) in (place.with_suffix(".py"), place / "__init__.py")
    assert (ROOT / "tests" / room / f"test_{component.name}.py").is_file()
    assert component.summary.endswith(".")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_components_do_not_import_each_other(path):
    parts = path.relative_to(PACKAGE).parts
    group = parts[0]
    if len(parts) < 2 or not _is_component(*parts[:2]):
        return
    own = f"dflash_mcmc.{group}.{parts[1].removesuffix('.py')}"
    for imported in _imports(ast.parse(path.read_text())):
        parts = imported.split(".")
        is_leaf = parts[0] == "dflash_mcmc" and len(parts) > 2 and _is_component(*parts[1:3])
        assert not is_leaf or f"{imported}.".startswith(f"{own}."), f"{path.name} imports the component {imported}"


@pytest.mark.parametrize("path", [*PACKAGE.glob("sampler/*.py"), *(PACKAGE / f"{n}.py" for n in (
    "rng", "ops", "types", "statistics/summaries", "registry"))],
                         ids=lambda p: p.name)
def test_samplers_and_shared_modules_import_no_model_library(path):
    tree = ast.parse(path.read_text())
    top_level = {name.split(".")[0] for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
                 for name in _imports(node)}
    assert not top_level & HEAVY


def modules_after(code: str) -> set[str]:
    """Names of the modules that a new interpreter has imported after the code."""
    code += "\nimport sys; print('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.partition("MODULES ")[2].split())


def test_command_line_starts_without_heavy_libraries():
    imported = modules_after("import dflash_mcmc.__main__, dflash_mcmc.config.command as c; c.prepare()")
    assert "dflash_mcmc.__main__" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize("module", ["dflash_mcmc.train.__main__", "tests.bench.__main__"])
def test_help_imports_no_heavy_library(module):
    imported = modules_after(f"import {module} as command; command._main(['--help'])")
    assert module in imported
    assert not imported & HEAVY


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_and_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path.name} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


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
