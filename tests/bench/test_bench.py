"""The benchmark runs, measures what it says, and refuses what it does not know. Its figures are no test's business."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dflash_mcmc.bench import measure, published
from dflash_mcmc.bench.__main__ import subject_of, table
from dflash_mcmc.rng import Key


@pytest.mark.slow
def test_every_part_writes_its_rows(command, tmp_path):
    done = command("dflash_mcmc.bench", "subjects=[tiny]", "parts=[a,c,f]", "tiny_slots=4", "most_slots=4", "waves=1",
                   "loop_chains=1", "blocks=2", timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "outputs/bench.json").read_text())
    assert report["machine"]["cores"] >= 1
    results = report["results"]["tiny"]
    assert [len(results[part]) for part in "acf"] == [2, 6, 2]
    for row in results["a"]:
        assert row["loop token-forwards"] > row["engine token-forwards"] > 0
        assert row["utilisation"] > 0.9
    for row in results["f"]:
        assert 0.5 < row["peak / planned"] < 1.5
    assert "tiny: (a) The engine against the loop" in done.stdout


@pytest.mark.parametrize(("override", "told"), [("parts=[x]", "parts: given ['x']; allowed: some of a, b"),
                                                ("subjects=[]", "subjects: given []; allowed: some of tiny, mid"),
                                                ("waves=0", "waves: given 0")])
def test_mistakes_are_one_line(command, override, told):
    done = command("dflash_mcmc.bench", override)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {told}")
    assert done.stderr.count("\n") == 1


def test_the_loop_draws_what_the_engine_draws():
    """Same law: where the proposal is all but certain, the same tokens; and it counts every token that it feeds."""
    subject = subject_of("tiny", 64)._replace(horizon=24)
    sampler = measure.power_mh(alpha=1000.0, num_blocks=2, num_steps=1, early_reject="off")
    prompt = subject.prompts[0]
    spent = published.chain(subject, sampler, prompt, Key(0))
    greedy = measure.run(subject, measure.power_mh(alpha=1000.0, num_blocks=2, num_steps=1), 1, 1)
    assert spent.proposals == 2
    assert spent.accepted == 2
    assert spent.token_forwards >= spent.tokens_drawn + len(prompt)
    assert greedy.mean_drawn + greedy.mean_skipped == pytest.approx(spent.tokens_drawn, abs=24)


def test_tables_have_three_digits_that_count():
    lines = table([{"a": "x", "b": 1234.5}, {"a": "y", "b": 0.012345}, {"a": "z", "b": None}]).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["1,234", "0.0123", "-"]
    assert np.isfinite(float("0.0123"))
