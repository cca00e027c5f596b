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


def test_a_component_has_an_option_a_file_and_a_test():
    wrong = []
    for component in COMPONENTS:
        room = ROOMS.get(component.group, component.group)
        place = PACKAGE / room / component.name
        if not ((ROOT / "conf" / component.group / f"{component.name}.yaml").is_file()
                and Path(component.file) in (place.with_suffix(".py"), place / "__init__.py")
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
            "rng", "ops", "types", "statistics/summaries", "registry"))]:
        top_level = {name.split(".")[0] for node in ast.parse(path.read_text()).body
                     if isinstance(node, (ast.Import, ast.ImportFrom)) for name in _imports(node)}
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in top_level & HEAVY]
    assert not wrong


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
