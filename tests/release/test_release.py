"""The check of a release sees what a wheel lacks, and takes the lower bounds of pyproject.toml exactly."""

import zipfile

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.release import artifacts, environments, walk

FILES = {"dflash_mcmc/__init__.py", "dflash_mcmc/py.typed", "conf/config.yaml", "tests/test_api.py", "README.md"}
METADATA = f"Metadata-Version: 2.4\nVersion: {artifacts.version()}\n"
GOOD = {"dflash_mcmc/__init__.py": "", "dflash_mcmc/py.typed": "", "dflash_mcmc/conf/config.yaml": "",
        "x.dist-info/METADATA": METADATA, "x.dist-info/entry_points.txt": "dflash-mcmc = dflash_mcmc.__main__:main",
        "x.dist-info/licenses/LICENSE": (ROOT / "LICENSE").read_text()}


def faults(tmp_path, without: str = "", **more: str) -> list[str]:
    """What is found in a wheel that has these files."""
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for name, text in {**GOOD, **more}.items():
            if name != without:
                archive.writestr(name, text)
    return artifacts.faults_of_wheel(tmp_path / "a.whl", FILES)


def test_a_good_wheel_has_no_faults(tmp_path):
    assert faults(tmp_path) == []


@pytest.mark.parametrize("name", [name for name in GOOD if name != "dflash_mcmc/__init__.py"])
def test_a_file_that_the_wheel_lacks_is_named(name, tmp_path):
    words = {"LICENSE": "licence", "METADATA": "version", "entry_points.txt": "command"}
    last = name.rpartition("/")[2]
    assert any(words.get(last, last) in fault for fault in faults(tmp_path, without=name))


def test_tests_in_the_wheel_and_another_version_are_faults(tmp_path):
    assert faults(tmp_path, **{"tests/test_api.py": ""}) == ["wheel: tests/test_api.py does not belong there"]
    assert "version" in faults(tmp_path, **{"x.dist-info/METADATA": "Metadata-Version: 2.4\nVersion: 0.0.1\n"})[0]


def test_lower_bounds_are_exact():
    found = environments.lower_bounds([Requirement("torch>=2.6,<2.14"), Requirement("numpy>=2")])
    assert found == ("numpy==2", "torch==2.6")
    with pytest.raises(ValueError, match=r"pyproject\.toml: numpy<3; allowed: one lower bound"):
        environments.lower_bounds([Requirement("numpy<3")])


def test_every_requirement_has_one_lower_bound_also_where_two_extras_state_it():
    """`dev` states the packages of other extras again."""
    optional = environments.project()["optional-dependencies"]
    extras = [text for extra in optional.values() for text in extra]
    bounds = environments.lower_bounds(map(Requirement, [*environments.project()["dependencies"], *extras]))
    assert len(bounds) == len({line.partition("==")[0] for line in bounds})


def test_the_citation_has_the_version():
    assert [fault for fault in artifacts.faults_of_version() if not fault.startswith("CHANGELOG")] == []


def test_the_tests_of_the_subset_exist():
    assert [name for name in walk.SUBSET if not (ROOT / name).exists()] == []
