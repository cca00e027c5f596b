"""What import-linter does not measure: circles of files, small files with one importer, attributes that are born late.

Imports inside functions and imports for types count. `pyproject.toml` has the order of the rooms.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path


def names_of(package: Path) -> dict[str, Path]:
    """The files of a package by their module names."""
    dotted = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


def graph(files: Mapping[str, Path], trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """For each module, the modules of the package that it imports."""
    return {name: {target for target in _imported(trees[path], files) if target != name} for name, path in files.items()}


def _imported(node: ast.AST, files: Mapping[str, Path]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                target = f"{child.module}.{alias.name}"
                yield from (module for module in (target if target in files else child.module,) if module in files)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in files)
        yield from _imported(child, files)


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for target in sorted(edges[module]):
            if target not in index:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], index[target])
        if lowest[module] == index[module]:
            component = stack[stack.index(module):]
            del stack[stack.index(module):]
            if len(component) > 1:
                components.append(component)

    for module in edges:
        if module not in index:
            visit(module)
    return components


def small_with_one_importer(edges: Mapping[str, set[str]], lines: Mapping[str, int], limit: int = 60) -> list[str]:
    """Modules of fewer lines than `limit` that one module alone imports, without commands, packages and components."""
    importers: dict[str, list[str]] = {module: [] for module in edges}
    for module, targets in edges.items():
        for target in targets:
            importers[target].append(module)
    return [module for module, those in importers.items() if len(those) == 1 and lines[module] < limit]


def born_late(tree: ast.Module) -> Iterator[str]:
    """Attributes of `self` that a class without slots sets first outside `__init__`, as `Class.attribute`.

    What the `__init__` of a base class in the same file sets is not late.
    """
    at_birth: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or any("dataclass" in ast.unparse(entry) for entry in node.decorator_list):
            continue
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        if not any(method.name == "__init__" for method in methods):
            continue
        born = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}
        born |= {name for method in methods if method.name == "__init__" for name in _set_on_self(method)}
        born |= {name for base in node.bases for name in at_birth.get(ast.unparse(base), ())}
        at_birth[node.name] = born
        properties = {method.name for method in methods}
        late = {name for method in methods if method.name != "__init__" for name in _set_on_self(method)} - born - properties
        yield from (f"{node.name}.{name}" for name in sorted(late))


def _set_on_self(method: ast.FunctionDef) -> set[str]:
    return {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name) and node.value.id == "self"}
