"""Components of another installed package."""

from __future__ import annotations

import subprocess

from tests import processes

PLUGIN = '''
"""A sampler from elsewhere."""
from dataclasses import dataclass
from dflash_mcmc.fields import identity
from dflash_mcmc.ops import Draw, SamplingParams
from dflash_mcmc.registry import register
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
    (folder / "conf/sampler").mkdir(parents=True)
    (folder / "conf/sampler/elsewhere.yaml").write_text("defaults:\n  - /schema/sampler@_here_: elsewhere\n")


def run(folder, *arguments: str) -> subprocess.CompletedProcess:
    """Runs the command in a process that finds the distribution."""
    command = ["-m", "dflash_mcmc", "--config-dir", str(folder / "conf"), *arguments]
    return processes.run(command, folder, PYTHONPATH=str(folder))


def test_a_plugin_is_an_ordinary_option(tmp_path):
    install(tmp_path, PLUGIN)
    done = run(tmp_path, "sampler=elsewhere", "sampler.warmth=0.7", "dataset.limit=2", "tracker=none")
    assert done.returncode == 0, done.stderr
    assert "| elsewhere" in done.stdout
    wrong = run(tmp_path, "sampler=elsewhere", "sampler.warmth=-1")
    assert wrong.returncode == 2
    assert "sampler.warmth: given -1.0; allowed: a number > 0" in wrong.stderr
    unknown = run(tmp_path, "sampler=elswhere")
    assert "did you mean 'elsewhere'" in unknown.stderr


def test_a_plugin_that_cannot_be_loaded_is_an_error_of_one_line(tmp_path):
    install(tmp_path, "import no_such_module")
    done = run(tmp_path, "dataset.limit=2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "elsewhere" in done.stderr
    assert "no_such_module" in done.stderr


def test_a_plugin_without_the_base_class_is_refused_in_one_line(tmp_path):
    install(tmp_path, PLUGIN.replace("(Sampler)", ""))
    done = run(tmp_path, "dataset.limit=2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "sampler=elsewhere: Elsewhere must inherit dflash_mcmc.sampler.Sampler" in done.stderr
