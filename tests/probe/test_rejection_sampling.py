"""Correct samplers are within noise of the target, faulty ones are not; counts follow each sampler's exact distribution."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.probe import Work
from dflash_mcmc.probe.rejection_sampling import samplers_by_name, verdict
from dflash_mcmc.store.records import read_records
from dflash_mcmc.testing import EnumeratedKey, Enumerator
from tests.composing import composed
from tests.runs import execute

SAMPLERS = list(samplers_by_name())
RIGHT = ("speculative_rejection", "speculative_match")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The experiment's configuration, with its own output folder."""
    return composed(tmp_path_factory.mktemp("outputs"), "experiment=rejection_sampling")


@pytest.fixture(scope="module")
def result(config):
    """The document's 50,000 draws."""
    return execute(config)


def row_of(result, name: str) -> dict:
    decoder, _, fault = name.partition(" ")
    (row,) = [row for row in result.summary["tables"]["samplers"]
              if (row["decoder"], row["fault"]) == (decoder, fault or None)]
    return row


def records(folder) -> list[dict]:
    return read_records(folder)


def exact_law(sampler, probe) -> np.ndarray:
    """The exact distribution of the token, float64 (vocabulary,), by enumeration of all random choices."""
    logits = tuple(torch.from_numpy(values).float() for values in probe.logits())
    enumerator, law = Enumerator(), np.zeros(probe.vocab_size)
    while True:
        chance = EnumeratedKey(enumerator).chance(0, 1)
        found = verdict(sampler, logits, SamplingParams(probe.temperature), chance, 1)
        law[int(found.tokens[0, 0])] += enumerator.probability
        if not enumerator.next_branch():
            return law


@pytest.mark.slow
def test_the_documents_table(result):
    assert row_of(result, "speculative_rejection argmax_proposal")["max_deviation"] == pytest.approx(0.1426, abs=0.007)
    assert row_of(result, "speculative_rejection")["acceptance"] == pytest.approx(result.summary["overlap"], abs=0.01)
    for name in SAMPLERS:
        row = row_of(result, name)
        assert row["draws"] == 50_000
        if name in RIGHT:
            assert row["max_deviation"] < 3.5 * row["standard_error"] < 0.01
            assert row["chi_square_p"] > 1e-3
        else:
            assert row["max_deviation"] > 5.0 * row["standard_error"]
            assert row["chi_square_p"] < 1e-20
    assert len(SAMPLERS) == 9


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_each_sampler_draws_from_its_exact_law(result, config, name):
    law, (p, _) = exact_law(samplers_by_name()[name], config.probe), config.probe.both_laws()
    drawn = np.sum([record["counts"][name] for record in records(result.folder)], axis=0)
    standard_error = np.sqrt((law * (1.0 - law)).clip(min=0.0).max() / 50_000)
    assert np.abs(drawn / 50_000 - law).max() < 4.0 * standard_error + 1e-12
    assert (np.abs(law - p).max() < 1e-6) == (name in RIGHT)


def test_a_target_with_one_token_has_no_standard_errors(config):
    """At this temperature p is 1 for one token to the last bit."""
    probe = replace(config.probe, num_draws=500, temperature=1e-4)
    found = probe.summarise(config, measured(probe, config))
    rows = {(row["decoder"], row["fault"]): row for row in found.tables["samplers"]}
    assert {row["in_standard_errors"] for row in rows.values()} == {None}
    assert rows["speculative_rejection", None]["max_deviation"] == 0.0


def measured(probe, config) -> list[dict]:
    """The records of all units, measured without a run."""
    work = Work(probe.units(config), "cpu")
    return [{**unit._asdict(), **record} for unit, record in probe.measure(config, work)]


@pytest.mark.slow
def test_draws_do_not_depend_on_their_chunk(config):
    totals = []
    for size in (500, 200):
        probe = replace(config.probe, num_draws=1000, chunk_size=size)
        totals.append({name: np.sum([record["counts"][name] for record in measured(probe, config)], axis=0).tolist()
                       for name in SAMPLERS})
    assert totals[0] == totals[1]


def test_the_identity_has_only_the_probes_fields(config, monkeypatch):
    for reader in ("dflash_mcmc.model.hf.HFModel.fingerprint", "dflash_mcmc.dataset.arith.Arith.fingerprint"):
        monkeypatch.setattr(reader, lambda self: pytest.fail("read what is not used"))
    found = identity_of(config)
    assert all(name in ("version", "seed", "probe") or name.startswith("probe.") for name in found)
    assert identity_of(replace(config, probe=replace(config.probe, num_draws=500))) == found
    assert identity_of(replace(config, probe=replace(config.probe, temperature=1.0))) != found
