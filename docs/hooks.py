"""Pages that are made from the code and from files of the root, when MkDocs builds the documentation.

- `reference/options/GROUP.md`: every option and field, from the registered components and the files of `conf/`;
- `reference/probe-tables.md`: the columns of the probes' tables;
- `reference/python/MODULE.md`: the public modules, from their docstrings (by mkdocstrings);
- `reference/package.md`: every file of the package with the first line of its docstring;
- `about/changelog.md`, `about/contributing.md`: CHANGELOG.md and CONTRIBUTING.md.
"""

import ast
import dataclasses
import re
import sys
import typing
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dflash_mcmc.components import GROUPS, has_spec, registered, schema_of, shown_default, spec_of  # noqa: E402
from dflash_mcmc.config.help import options  # noqa: E402
from dflash_mcmc.config.schema import Config  # noqa: E402
from dflash_mcmc.probe import meanings_of  # noqa: E402

MODULES = ("api", "types", "ops", "rng", "components", "errors", "testing")
PAGES = {"about/changelog.md": "CHANGELOG.md", "about/contributing.md": "CONTRIBUTING.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for place, text in generated().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_post_page(output: str, **_: object) -> str:
    """Code in a table may break after an equals sign, a comma and a slash, and numbers do not break.

    The index of the search is made before.
    """
    def cell(match: re.Match) -> str:
        return re.sub(r"(?<=<code>)[^<]+(?=</code>)", parted, match[0])

    def parted(code: re.Match) -> str:
        return re.sub(r"[=,/](?=[A-Za-z\[{])", r"\g<0><wbr>", code[0])

    number = r"<td([^>]*)>(?=(?:&lt; )?[-+]?\d[\d.,]*( - [\d.,]+| %| of \d+| \[[^]<]+\])?</td>)"
    return re.sub(r"<td.*?</td>", cell, re.sub(number, r'<td class="number"\1>', output), flags=re.DOTALL)


def generated() -> dict[str, str]:
    """Markdown of each generated page, by its place below docs/."""
    pages = {place: from_root((ROOT / source).read_text()) for place, source in PAGES.items()}
    pages.update({f"reference/python/{name}.md": f"# `dflash_mcmc.{name}`\n\n::: dflash_mcmc.{name}\n" for name in MODULES})
    pages.update({f"reference/options/{group}.md": options_page(group) for group in GROUPS})
    pages["reference/options/run.md"] = run_page()
    pages["reference/probe-tables.md"] = probes_page()
    pages["reference/options/settings.md"] = settings_page()
    pages["reference/package.md"] = package_page()
    return pages


def from_root(text: str) -> str:
    """The page of a file at the root: links into docs/ become links between pages, links to other files plain text."""
    text = re.sub(r"\]\(docs/", "](../", text)
    for place, source in PAGES.items():
        text = text.replace(f"]({source})", f"]({Path(place).name})")
    return re.sub(r"\[([^\]]+)\]\((?!\.\./|https?:|#|[\w-]+\.md)[^)]+\)", r"\1", text)


def options_page(group: str) -> str:
    """The options of a group with their values, and the fields of its components."""
    lines = [f"# {group}", "", f"An option is chosen by `{group}=NAME`, and a field is set by `{group}.FIELD=VALUE`. The "
             f"same as text: `python -m dflash_mcmc --help {group}`.", "", "## Options", ""]
    for name, (meaning, file) in options()[group].items():
        lines += _option(group, name, meaning, file)
    lines += ["## Fields", ""]
    for component in registered(group).values():
        lines += [f"### {group}={component.name}", "", f"`{component.cls.__module__}.{component.cls.__qualname__}`", "",
                  *_docstring(component.cls), "", *_fields(component.cls)]
    return "\n".join(lines) + "\n"


def run_page() -> str:
    """The fields of a run that belong to no group."""
    lines = ["# Run", "", "Fields of a run that belong to no group. A field is set by `FIELD=VALUE`.", "",
             *_fields(schema_of(Config))]
    for name, cls in _nested(Config):
        lines += [f"## {name}", "", *_docstring(cls), "", *([] if _nested(cls) else _fields(cls))]
    values = (ROOT / "conf/config.yaml").read_text().partition("\n# Hydra itself")[0].strip()
    lines += ["## Options of a run", "", "```yaml", values, "```"]
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """The options of the groups that have no components: values for fields of other groups."""
    lines = ["# Named settings", "", "An option of these groups sets fields of other groups.", ""]
    for group, entries in options().items():
        if group not in GROUPS and group not in ("schema", "local"):
            lines += [f"## {group}", ""]
            for name, (meaning, file) in entries.items():
                lines += _option(group, name, meaning, file)
    return "\n".join(lines) + "\n"


def probes_page() -> str:
    """The columns of every probe's tables and the values of its summary."""
    lines = ["# Tables of the probes", "", "`summary.json` of a run with a probe has the values, and the tables in `tables`. "
             "A CSV file of the run folder has the name of its table. The columns `x_low` and `x_high` are the 95 % interval "
             "of `x`. An empty cell, or null, means that there is no number. A part of a name in braces varies. Shares are "
             "from 0 to 1, and `log` is the natural logarithm.", ""]
    for component in registered("probe").values():
        meanings = meanings_of(component.cls.columns())
        if meanings:
            lines += [f"## {component.name}", "", component.summary, ""]
        for table, columns in meanings.items():
            title = "values of the summary" if table == "values" else f"`{table}`"
            lines += [f"### {component.name}: {title}", "", "| column | meaning |", "|---|---|"]
            lines += [f"| `{name}` | {meaning} |" for name, meaning in columns.items()]
            lines.append("")
    return "\n".join(lines) + "\n"


def package_page() -> str:
    """Every file of the package with the first line of its docstring, by folder."""
    package = ROOT / "dflash_mcmc"
    lines = ["# Files of the package", "", "Each file with the first line of its docstring.", ""]
    folders = sorted({file.parent for file in package.rglob("*.py")})
    for folder in folders:
        files = sorted(folder.glob("*.py"), key=lambda file: (file.name != "__init__.py", file.name))
        about = _first_line(folder / "__init__.py") if (folder / "__init__.py").is_file() else ""
        lines += [f"## {folder.relative_to(ROOT)}/", "", about, "", "| file | what |", "|---|---|"]
        lines += [f"| `{file.name}` | {_cell(_first_line(file))} |" for file in files if file.name != "__init__.py"]
        if len(files) == 1:  # the header alone would be an empty table
            del lines[-2:]
        lines.append("")
    return "\n".join(lines) + "\n"


def _nested(cls: type, prefix: str = "") -> list[tuple[str, type]]:
    """The groups of fields in a group, by dotted name, each followed by its own."""
    types = typing.get_type_hints(cls)
    own = {f"{prefix}{field.name}": types[field.name] for field in dataclasses.fields(cls)}
    return [found for name, kind in own.items() if dataclasses.is_dataclass(kind)
            for found in ((name, kind), *_nested(kind, f"{name}."))]


def _option(group: str, name: str, meaning: str, file: Path) -> list[str]:
    text = file.read_text().strip()
    return [f"### `{group}={name}`", "", meaning, "", f"```yaml title=\"{file.relative_to(ROOT)}\"", text, "```", ""]


def _fields(cls: type) -> list[str]:
    types = typing.get_type_hints(cls)
    rows = [(field.name, spec_of(field), re.sub(r"([0-9a-f]{12})[0-9a-f]{28}", r"\1...", str(shown_default(field))))
            for field in dataclasses.fields(cls) if has_spec(field)]  # a commit has no place to break a line
    if not rows:
        return ["No fields.", ""]
    lines = ["| field | kind | default | allowed | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{name}` | {spec.role} | `{default}` | {_cell(spec.describe(types[name]))} | {_cell(spec.help)} |"
              for name, spec, default in rows]
    return [*lines, ""]


def _docstring(cls: type) -> Iterable[str]:
    return [line.replace("*", r"\*").replace("_", r"\_") if "`" not in line else line
            for line in (cls.__doc__ or "").replace("\n    ", "\n").strip().splitlines()]


def _first_line(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("_", r"\_") if "`" not in text else text.replace("|", r"\|")
