"""Summaries, figures and reports of probes of which few units are recorded, or none could be measured."""

from __future__ import annotations

import json

import pytest

from dflash_mcmc.config.command import check_command
from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.report.build import build
from dflash_mcmc.runner import tasks_of
from dflash_mcmc.store.folder import RunStore
from dflash_mcmc.store.schema import to_line
from tests.golden.runs import RUNS, overrides, stored

QUICK = ("probe_layer_rank", "probe_rejection_sampling")
PROBES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS if name.startswith("probe_")]


@pytest.mark.parametrize("name", PROBES)
def test_a_report_of_few_units_is_made(name, tmp_path):
    """The stored records of each probe: none, the first, and one that has nothing to measure or was not measured."""
    job, = check_command([*overrides(name), f"paths.outputs={tmp_path}"]).jobs
    tasks, (first, *_) = tasks_of(job.config), stored(name)["records"]
    if name == "probe_speculative_mcmc":  # stored records have no times
        first |= {"seconds": 0.5}
    key = {"problem": first["problem"], "chain": first["chain"]}
    graded = {field: first[field] for field in ("level", "verdict", "num_tokens") if field in first}
    nothing = {**graded, "skipped": "too short"}
    cases = {"first": [first], "failed": [{**key, "failure": "it died"}]}
    if name not in ("probe_rejection_sampling", "probe_mixing"):  # which skip no unit
        cases |= {"skipped": [{**key, **nothing}], "both": [first, {**key, "chain": 9, **nothing}]}
    for case, records in cases.items():
        folder = tmp_path / "demo" / case
        with RunStore.open(folder, schema=tasks.schema()) as store:
            for record in records:
                store.append(record)
            results = tasks.summarise(store.records)
            store.write_session(identity_of(job.config) | {"seed": case}, {"started": case})
            store.write_config(json.dumps({"name": "demo", "probe": {"name": name.removeprefix("probe_")}}))
            store.write_summary(results.summary)
            if hasattr(results, "records") and results.records:
                job.config.probe.figures(job.config, results.records, results.found)
        assert (folder / "records.jsonl").read_bytes() == b"".join(map(to_line, records))
    assert build([tmp_path / "demo"]).page.is_file()
