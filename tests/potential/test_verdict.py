"""`potential=verdict`: an oracle, in a run of the embedded model, while the engine runs other chains."""

import json
from pathlib import Path

import pytest

from dflash_mcmc.types import Problem
from tests import runs


def test_the_grader_s_verdict_is_the_potential(make_config):
    config = make_config("condition=ps", "potential=verdict")
    evaluator = config.potential.start(config)
    found = [evaluator.submit(Problem("one", "1 + 1", "2"), text).result().value for text in (r"\boxed{2}", r"\boxed{3}", "")]
    assert found == [1.0, 0.0, 0.0]
    evaluator.close()
    assert config.potential.remarks([])[0].startswith("potential=verdict: An oracle that reads the gold answer: ")


def drawn(make_config, slots: int) -> list[dict]:
    """The records of a run with this number of slots."""
    config = make_config("experiment=demo", *runs.QUICK, "potential=verdict", "potential.beta=16", "dataset.limit=6",
                         f"hardware.num_slots={slots}", f"name=slots{slots}")
    runs.execute(config)
    [path] = Path(config.paths.outputs).glob(f"slots{slots}/*/records.jsonl")
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda record: record["problem"])


@pytest.mark.slow
def test_a_run_records_the_potential_of_each_answer(make_config):
    """Chains that wait change nothing: one slot, and eight."""
    for one, other in zip(drawn(make_config, 1), drawn(make_config, 8), strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["measures"]["potential"] == other["measures"]["potential"] == (one["verdict"] == "correct")
        assert one["measures"]["potential_calls"] == other["measures"]["potential_calls"] > 0
        assert one["measures"]["potential_failures"] == 0.0
