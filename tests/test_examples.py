"""docs/examples: the cells of each notebook run in order, and each script runs as a program."""

import json
import re

import pytest

from tests import pages, processes
from tests.cases import quick
from tests.conftest import ROOT

EXAMPLES = ROOT / "docs/examples"
NOTEBOOKS = ("power_sampling.ipynb", "worth_its_cost.ipynb", "write_a_sampler.ipynb")
PRINTED = {"own_sampler.py": r"one draw: mean log p -[\d.]+\nthe better of two: mean log p -[\d.]+\n",
           "own_grader.py": r"Lovelace!': correct\n'It is Ada.': wrong\n'': no_answer\nWordGrader\(ignore_case=True\)\n",
           "own_dataset.py": r"[23] of 3 correct; everything is in outputs/mine/"}


def cells(name: str) -> list[str]:
    """The code of a notebook."""
    stored = json.loads((EXAMPLES / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in stored if cell["cell_type"] == "code"]


def test_the_notebook_runs_and_power_sampling_takes_ten_lines(tmp_path):
    first, second, third = cells("power_sampling.ipynb")
    assert len([line for line in first.splitlines() if line]) <= 10
    code = "\n".join([first, second, "print('MEANS', *means['log p'])", f"assert len({third}) == samples[0].proposals"])
    done = processes.run(["-c", code], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("accepted ") == 4
    of_p, of_a_temperature, of_the_power = map(float, done.stdout.partition("MEANS ")[2].split())
    assert of_p < of_the_power
    assert of_p < of_a_temperature
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_notebook_on_costs_runs(tmp_path):
    """Its vote is counted from the table of records; the accuracy of one vote is that of the first chains."""
    code = "\n".join([*cells("worth_its_cost.ipynb"), "print('TABLE', *table['accuracy'], 'COST', *table['token-forwards'])"])
    done = processes.run(["-c", code], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"power sampling against greedy: [-+][\d.]+ points \[[-+][\d.]+, [-+][\d.]+\], p = ", done.stdout)
    accuracy, cost = (list(map(float, part.split())) for part in done.stdout.partition("TABLE ")[2].split(" COST "))
    assert all(0 <= value <= 1 for value in accuracy)
    greedy, power, plain, vote = cost
    assert plain <= vote <= 8 * plain
    assert greedy < power
    assert (tmp_path / "worth.png").stat().st_size > 1000


def test_the_notebook_on_samplers_tells_the_right_law_from_a_wrong_one(tmp_path):
    done = processes.run(["-c", "\n".join(cells("write_a_sampler.ipynb"))], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    right, wrong = map(float, re.findall(r"right: (\S+), without log q: (\S+)", done.stdout)[0])
    assert right < 1e-12
    assert wrong > 1e-3
    assert done.stdout.count("accepted ") == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_with_what_its_cells_show(name, tmp_path):
    """Texts, tables and figures. Numbers and answers can differ between processors."""
    done = processes.run([str(ROOT / "docs/notebooks.py"), name, "--to", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    stored, fresh = (json.loads((folder / name).read_text())["cells"] for folder in (EXAMPLES, tmp_path))
    assert [kinds(cell) for cell in stored] == [kinds(cell) for cell in fresh]
    assert [cell["source"] for cell in stored] == [cell["source"] for cell in fresh]
    shown = [kind for cell in stored for kind in kinds(cell)]
    assert len(shown) >= 2
    assert ("image/png" in str(shown)) == (name == "worth_its_cost.ipynb")


def kinds(cell: dict) -> list[tuple]:
    """The kind of each output of a cell, and its number of lines."""
    return [(output["output_type"], *sorted(output.get("data", {})), len(output.get("text", [])))
            for output in cell.get("outputs", [])]


@pytest.mark.parametrize("name", quick(PRINTED, "own_sampler.py"))
def test_a_script_runs(name, tmp_path):
    done = processes.run([str(EXAMPLES / name)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(PRINTED[name], done.stdout), done.stdout


@pytest.mark.slow
def test_a_law_draws_and_is_audited(tmp_path):
    """The commands of the page: its own draws are green, and the same tokens are red where another law is stated."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    drawn, audited = map(pages.run, pages.marked(pages.commands(ROOT / "docs/howto/verify-an-engine.md"), pages.IN_A_CHECKOUT),
                         [tmp_path] * 2)
    assert "temperature function=xtc" in drawn.stdout, drawn.stderr[-2000:]
    assert (audited.returncode, "GREEN" in audited.stdout) == (0, True), audited.stdout + audited.stderr
    (folder,) = (tmp_path / "outputs/laws").glob("temperature-*")
    values = folder / "config.yaml"
    values.write_text(values.read_text().replace("laws.py:xtc", "laws.py:grammar"))
    other = pages.run(f"python -m dflash_mcmc.verify {folder}", tmp_path)
    assert other.returncode == 2, other.stdout
    assert "laws.py:grammar'; allowed: what " in other.stderr


def test_every_example_is_run():
    """Each law of `laws.py` has a test of its own in tests/sampler/test_law_functions.py."""
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {*NOTEBOOKS, *PRINTED, "laws.py"}
