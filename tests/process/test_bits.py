"""The same bits in every batch, on a processor where MKL does not give them by itself."""

from __future__ import annotations

import os

import pytest

from dflash_mcmc.process import bits
from tests.targets import rows_do_not_depend_on_the_batch


@pytest.mark.parametrize(("vendor", "set_before", "comes_to"), [
    ("GenuineIntel", None, "AUTO,STRICT"), ("GenuineIntel", "COMPATIBLE", "COMPATIBLE"), ("AuthenticAMD", None, None)])
def test_strict_where_it_is_needed_and_what_is_set_stays(tmp_path, monkeypatch, vendor, set_before, comes_to):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.delenv(bits.VARIABLE, raising=False)
    if set_before:
        monkeypatch.setenv(bits.VARIABLE, set_before)
    bits.keep(tmp_path / "cpuinfo")
    assert os.environ.get(bits.VARIABLE) == comes_to
    monkeypatch.delenv(bits.VARIABLE, raising=False)
    bits.keep(tmp_path / "no_such_file")
    assert bits.VARIABLE not in os.environ


def test_rows_have_the_same_bits_in_every_batch_here():
    """Of the embedded model's widths. Elsewhere records are equal but for their last bits, and tests compare them so."""
    if os.environ.get(bits.VARIABLE) != "AUTO,STRICT":
        pytest.skip("this processor is not known to need it")
    assert rows_do_not_depend_on_the_batch()
