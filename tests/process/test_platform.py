"""A stand-in for macOS, whose kernel refuses every limit of the address space (python/cpython 78783): nothing asks for one."""

import json
import subprocess
import sys

import pytest

from dflash_mcmc.dataset.inputs import template_program

AS_ON_MACOS = """
import jinja2.ext, resource, runpy, sys
from dflash_mcmc.grading.math.worker import limit_memory, leave_network, die_with
limit = resource.setrlimit
def refusing(kind, values):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    limit(kind, values)
resource.setrlimit = refusing
"""


@pytest.mark.parametrize("does", ["limit_memory(2.0); leave_network(); die_with(0)",
                                  f"runpy.run_path({template_program.__file__!r}, run_name='__main__')"],
                         ids=["grading", "chat template"])
@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_worker_starts(does, platform):
    request = {"path": sys.path, "megabytes": 512, "seconds": 10, "template": "{{ messages }}", "values": {"messages": "hi"}}
    program = f"{AS_ON_MACOS}sys.platform = {platform!r}\n{does}"
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(request), capture_output=True, text=True)
    assert (done.returncode == 0) == (platform == "darwin"), done.stderr
    assert ("current limit exceeds maximum limit" in done.stderr) == (platform == "linux")
