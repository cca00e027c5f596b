"""Records of probes: their key, finite numbers and a checksum are checked. A damaged one is a line, and is measured again."""

import math

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.records import read_records, unit_schema
from tests.runs import execute

UNIT = {"problem": "p0", "chain": 0}


@pytest.mark.parametrize(("record", "fault"), [
    ({**UNIT, "sums": {"a source": [[1.0, None]]}}, None), ({**UNIT, "failure": "killed"}, None),
    ({**UNIT, "skipped": "short", "level": 1}, None), ({"problem": "p0"}, "chain: given nothing; allowed: a value"),
    ({**UNIT, "chain": True}, "chain: given True; allowed: a valid integer"),
    ({**UNIT, "skipped": 3}, "skipped: given 3; allowed: a valid string"),
    ({**UNIT, "sums": {"a source": [[1.0, math.inf]]}}, "sums: given {'a source'")])
def test_what_a_record_must_have(record, fault):
    found = unit_schema().fault(record)
    assert found == fault if fault is None else found.startswith(fault)


@pytest.mark.slow
def test_a_run_names_the_line_and_measures_it_again(make_config, capsys):
    config = make_config("probe=rejection_sampling", "probe.num_draws=1000", "probe.chunk_size=500")
    done = execute(config)
    path = done.folder / "records.jsonl"
    whole = path.read_bytes()
    first, second = whole.splitlines(keepends=True)
    path.write_bytes(first + second.replace(b'"draws": 500', b'"draws": 501'))
    with pytest.raises(UserError, match=r"line 2: checksum: given .*a part of the line has changed since it was written"):
        execute(config)
    config.repair = True
    assert execute(config).summary["tables"] == done.summary["tables"]
    assert "1 damaged line moved" in capsys.readouterr().err
    assert path.read_bytes() == whole
    assert len(read_records(done.folder)) == 2
