"""A stand-in for macOS, whose kernel refuses every limit of the address space (python/cpython 78783): nothing asks for one."""

import subprocess
import sys

import pytest

AS_ON_MACOS = """
import resource
from dflash_mcmc.process.worker import confine
limit = resource.setrlimit
def refusing(kind, values):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    limit(kind, values)
resource.setrlimit = refusing
"""


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_worker_starts(platform):
    program = f"{AS_ON_MACOS}import sys\nsys.platform = {platform!r}\nconfine(2.0, 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode == 0) == (platform == "darwin"), done.stderr
    assert ("current limit exceeds maximum limit" in done.stderr) == (platform == "linux")
