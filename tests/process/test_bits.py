"""The same bits in every batch, on a processor where MKL does not give them by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_mcmc.process import machine
from tests import processes
from tests.targets import rows_do_not_depend_on_the_batch


def mode(cpuinfo: Path, **environment: str) -> str | None:
    """The mode that `keep` leaves in an environment."""
    machine.keep_bits(environment, cpuinfo)
    return environment.get(machine.VARIABLE)


@pytest.mark.parametrize(("vendor", "expected"), [("GenuineIntel", "AUTO,STRICT"), ("AuthenticAMD", None)])
def test_the_mode_is_strict_where_it_is_needed_and_a_mode_that_is_set_stays(tmp_path, vendor, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert mode(cpuinfo) == expected
    assert mode(cpuinfo, **{machine.VARIABLE: "COMPATIBLE"}) == "COMPATIBLE"
    assert mode(tmp_path / "no_such_file") is None
    assert mode(tmp_path / "no_such_file", **{machine.VENDOR: vendor}) == expected
    (other,) = {"GenuineIntel", "AuthenticAMD"} - {vendor}
    cpuinfo.write_text(f"vendor_id\t: {other}\n")
    assert mode(cpuinfo, **{machine.VENDOR: vendor}) == expected


def test_programs_that_tests_start_have_the_mode_of_this_process(tmp_path):
    """The mode depends on `--processor` alone, also where a program sets it for itself."""
    show = f"import dflash_mcmc, os; print(os.environ.get({machine.VARIABLE!r}))"
    assert processes.run(["-c", show], tmp_path).stdout.strip() == str(os.environ.get(machine.VARIABLE))


def test_rows_have_the_same_bits_in_every_batch_here():
    """Rows of the embedded model's widths. On a processor of another kind records are equal except in their last bits."""
    if os.environ.get(machine.VARIABLE) != "AUTO,STRICT":
        pytest.skip("strict mode is off: --processor=intel turns it on")
    assert rows_do_not_depend_on_the_batch()
