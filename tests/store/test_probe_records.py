"""Records of probes have a schema, too: what does not fit is one line with file, line, field, found and allowed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.registry import components
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.reading import read_records, schema_of
from dflash_mcmc.store.records import DAMAGED, unit_schema
from dflash_mcmc.store.schema import to_line
from tests.runs import execute
from tests.store.probe_records import EXAMPLES, ways

UNIT = {"problem": "p0", "chain": 0}
PROBES = [name for name, found in components("probe").items() if not found.cls.is_null]


def schema(probe: str):
    return unit_schema(components("probe")[probe].cls.record_type)


LENGTHS = {  # lists whose length another field states
    "deep_readout": {"rank.a reader"}, "sampled_verify": {"seconds"}, "layer_rank": {"hard", "ranks.a row"},
    "logit_blend": {"sums.hard.a source"}, "speculative_mcmc": {"proposals.a draft.joint.moved", "p.tvd"}}


@pytest.mark.parametrize("probe", PROBES)
def test_damage_at_every_depth_is_named(probe):
    of_probe, example = schema(probe), EXAMPLES[probe]
    assert of_probe.fault({**UNIT, **example}) is None
    assert of_probe.fault({**UNIT, "failure": "killed"}) is None
    found = ways(example)
    assert sum(bool(way.noticed) for way in found) > 20
    for way in found:
        fault = of_probe.fault({**UNIT, **way.record})
        where = f"{way.path} {way.name}: {fault}"
        if way.noticed:
            field = re.split(r"[.\[]", way.path)[0]
            assert fault is not None, where
            assert re.match(rf"{field}\b.*: given .*; allowed: .", fault) or way.name == "= []", where
            assert "\n" not in fault
    shorter = {way.path: str(of_probe.fault({**UNIT, **way.record})) for way in found if way.name == "shorter"}
    for path in LENGTHS.get(probe, ()):
        assert re.search(r": given \d values; allowed: \d \(\w+\)$", shorter[path])


def test_what_a_record_may_lack_beside_a_reason():
    difficulty = schema("difficulty")
    assert difficulty.fault({**UNIT, "skipped": "short", "level": None, "verdict": "wrong", "num_tokens": 3}) is None
    assert "verdict: given nothing" in str(difficulty.fault({**UNIT, "skipped": "short", "level": None, "num_tokens": 3}))


def written(folder: Path, probe: str, *records: dict) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"identity": {"version": 3, "probe": probe}, "sessions": []}))
    (folder / "records.jsonl").write_bytes(b"".join(map(to_line, records)))
    return folder


def test_a_folder_is_read_by_the_schema_of_its_probe(tmp_path):
    good = {**UNIT, **EXAMPLES["layer_rank"]}
    bad = {**good, "chain": 1, "num_tokens": "many"}
    folder = written(tmp_path / "run", "layer_rank", good, bad)
    with pytest.raises(UserError, match=r"line 2: num_tokens: given 'many'; allowed: a valid integer; repair=true"):
        read_records(folder)
    left_out: list[str] = []
    assert read_records(folder, damage=left_out) == [good]
    assert len(left_out) == 1
    with RunStore.open(folder, schema=schema_of(folder), repair=True) as store:
        assert list(store.records) == [good]
    assert "many" in (folder / DAMAGED).read_text()
    assert read_records(written(tmp_path / "other", "of_a_plugin_that_is_gone", good, bad)) == [good, bad]


@pytest.mark.slow
def test_a_run_names_the_line_and_measures_it_again(make_config, capsys):
    config = make_config("probe=rejection_sampling", "probe.num_draws=1000", "probe.chunk_size=500")
    done = execute(config)
    path = done.folder / "records.jsonl"
    whole = path.read_bytes()
    records = read_records(done.folder)
    path.write_bytes(whole.splitlines(keepends=True)[0] + to_line({**records[1], "draws": "many"}))
    with pytest.raises(UserError, match="line 2: draws: given 'many'; allowed: a valid integer"):
        execute(config)
    config.repair = True
    assert execute(config).summary["tables"] == done.summary["tables"]
    assert "1 damaged line moved" in capsys.readouterr().err
    assert path.read_bytes() == whole
