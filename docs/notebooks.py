"""`make notebooks`: runs the notebooks of docs/examples and stores what their cells show. Needs no Jupyter.

A cell's output is what it prints, the value of its last expression as text and table, and its figures. Progress bars, which go
to the standard error, are not stored. `python docs/notebooks.py NAME.ipynb --to FOLDER` writes into another folder.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent / "examples"


def main(arguments: list[str]) -> None:
    """Writes the notebooks with these names, all without names."""
    parser = argparse.ArgumentParser(description="Runs the notebooks of docs/examples and stores what their cells show.")
    parser.add_argument("names", nargs="*", metavar="NAME.ipynb")
    parser.add_argument("--to", type=Path, default=EXAMPLES, metavar="FOLDER")
    options = parser.parse_args(arguments)
    target = options.to.resolve()
    for name in options.names or [file.name for file in sorted(EXAMPLES.glob("*.ipynb"))]:
        stored = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            execute(stored["cells"])
        (target / name).write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(target / name)


def execute(cells: list[dict[str, Any]]) -> None:
    """Runs the code of the cells in order, in one namespace, and sets their outputs."""
    os.environ["MPLBACKEND"] = "agg"
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), start=1):
        tree, value, printed = ast.parse("".join(cell["source"])), None, io.StringIO()
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"cell {number}", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        outputs = [{"output_type": "stream", "name": "stdout", "text": lines(text)}] if (text := printed.getvalue()) else []
        if value is not None:
            outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": shown(value)})
        cell["execution_count"], cell["outputs"] = number, [*outputs, *figures()]


def shown(value: Any) -> dict[str, list[str]]:
    """A value as a notebook shows it."""
    table = getattr(value, "_repr_html_", None)
    return {**({"text/html": lines(table())} if table else {}), "text/plain": lines(repr(value))}


def figures() -> list[dict[str, Any]]:
    """The open figures, which are closed."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    found = []
    for number in pyplot.get_fignums():
        picture, figure = io.BytesIO(), pyplot.figure(number)
        figure.savefig(picture, format="png", dpi=80)
        found.append({"output_type": "display_data", "metadata": {}, "data": {
            "image/png": base64.b64encode(picture.getvalue()).decode() + "\n", "text/plain": lines(repr(figure))}})
    pyplot.close("all")
    return found


def lines(text: str) -> list[str]:
    """A text as notebooks store it."""
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    main(sys.argv[1:])
