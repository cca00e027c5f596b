"""The benchmark: each part returns its rows, and bad values are errors. The measured speeds are not tested."""

import json
import sys

import numpy as np
import pytest
import torch

from dflash_mcmc.draft.network import checkpoint
from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape
from tests.bench import decoders, gpu, measure, pair
from tests.bench.__main__ import main, table
from tests.bench.measure import temperature
from tests.bench.subject import subject_of

pytestmark = pytest.mark.usefixtures("random_weights")
SMALL = measure.Sizes(slots=2, waves=1, decoder_slots=(1, 2), decoder_chains=2)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """The embedded model with a random draft and short answers. The tests do not depend on the quality of the draft."""
    folder = tmp_path_factory.mktemp("draft")
    shape = DFlashShape(hidden_size=128, num_layers=1, num_heads=2, num_key_heads=1, head_dim=16, intermediate_size=32,
                        block_size=3, mask_token_id=468, target_layers=(1, 4), num_target_layers=8, max_positions=1024,
                        rope={"rope_type": "default", "rope_theta": 1e4}, sliding=(None,))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        checkpoint.save(DFlash(shape), folder)
    subject = subject_of("tiny", 64, str(folder))
    return subject._replace(prompts=subject.prompts[:3], horizon=12)


@pytest.mark.slow
def test_every_part_writes_its_rows(command, tmp_path):
    done = command("tests.bench", "subjects=[tiny]", "parts=[c,f]", "tiny_slots=4", "waves=1", timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "outputs/bench.json").read_text())
    assert report["machine"]["cores"] >= 1
    results = report["results"]["tiny"]
    assert [len(results[part]) for part in "cf"] == [6, 2]
    for row in results["f"]:
        assert 0.25 < row["peak / planned"] < 1.5
    assert "tiny: (c) Duration of an engine step " in done.stdout


@pytest.mark.parametrize(("override", "message"), [("parts=[x]", "parts: given ['x']; allowed: some of c, f"),
                                                   ("subjects=[]", "subjects: given []; allowed: some of tiny, mid"),
                                                   ("subjects=[smollm2]", "model.path: given "),
                                                   ("waves=0", "waves: given 0"),
                                                   ("decoder_slots=[0]", "decoder_slots: given [0]"),
                                                   ("draft_path=nowhere",
                                                    "draft_path: given 'nowhere'; allowed: the folder of")])
def test_bad_values_are_errors_of_one_line(monkeypatch, tmp_path, capsys, override, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", override])
    with pytest.raises(SystemExit, match="2"):
        main()
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def finite(rows: list[dict], without: tuple[str, ...] = ()) -> None:
    """Checks that values are finite and that exactly the rows named in `without` lack a value."""
    for row in rows:
        assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))
        assert (None in row.values()) == (next(iter(row.values())) in without), row


@pytest.mark.slow
def test_decoders_are_measured_at_every_law_and_batch(drafted):
    rows = decoders.drawing(drafted, SMALL)
    finite(rows, ("plain", "match, the target itself"))
    assert [row["law"] for row in rows] == ["greedy"] * 7 + ["temperature 0.25"] * 8 + ["temperature 1"] * 8
    for row in rows:
        if row["decoder"] == "plain":
            assert row["forwards/token"] >= 1.0 == row["ratio (1)"] == row["ratio (2)"]
        else:
            assert 1.0 <= row["tau"] <= (8 if "ngram" in row["decoder"] else 5 if "itself" in row["decoder"] else 3)


@pytest.mark.slow
def test_a_model_without_a_draft_is_measured_with_ngrams(drafted):
    rows = decoders.drawing(drafted._replace(draft=None), SMALL)
    finite(rows, ("plain",))
    assert [row["decoder"] for row in rows] == ["plain", "match, ngram"]
    assert decoders.chains(drafted._replace(draft=None), SMALL) == []


def test_numbers_in_tables_have_three_significant_digits():
    lines = table([{"a": "x", "b": 1234.5}, {"a": "y", "b": 0.012345}, {"a": "z", "b": None}]).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["1,234", "0.0123", "-"]


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_measures_what_is_missing_beside_its_limit(tmp_path, capsys):
    """The whole command, on a CPU with a tiny model."""
    arguments = [str(tmp_path), "--tiny"]
    assert gpu.main([*arguments, "--seconds", "0"]) == 1  # no time: nothing is measured
    assert "not measured: start, kernels, slots_1" in capsys.readouterr().out
    assert gpu.main(arguments) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() == printed.removesuffix("\n")
    assert "not measured" not in printed
    names = [name.strip() for name in printed.splitlines()[2].split("|")[1:-1]]
    rows = [dict(zip(names, (cell.strip() for cell in line.split("|")[1:-1]), strict=True))
            for line in printed.splitlines()[4:-1]]
    assert {"case", "slots", "ms a step", "limit, ms", "ratio", "tokens/s", "aim", "met"} < set(names)
    steps = [row for row in rows if row["ms a step"] != "-"]
    assert len(steps) == 7
    for row in steps:
        numbers = [float(row[name].replace(",", "")) for name in ("ms a step", "limit, ms", "ratio")]
        assert numbers[2] == pytest.approx(numbers[0] / numbers[1], rel=0.02)
    assert [row["slots"] for row in rows if "generate" in row["case"]] == ["1", "2"]
    (tmp_path / "blocks.json").unlink()
    assert gpu.main(arguments) == 0
    assert "s: blocks\n" in (errors := capsys.readouterr().err)
    assert errors.count("\n") == 1  # the other parts are as they were


def test_the_limit_of_a_step_is_that_of_its_bytes(tmp_path):
    bench = gpu.Bench(tiny=True)
    weights = 5 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 8) + 128 * 32
    assert bench.step_bytes(bench.model()) == 4 * weights
    row = bench.drawn("Qwen3-4B", 2, temperature(1.0), prompt=10, horizon=4)
    assert row["limit, ms"] * bench.bandwidth / 1e3 == pytest.approx(4 * weights + 2 * 12 * 5 * 2 * 2 * 8 * 4)


def test_a_machine_without_a_gpu_is_told_so(tmp_path, capsys):
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="2"):
            gpu.main([str(tmp_path)])
        assert "no GPU: PyTorch finds none here; allowed: --tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pair_has_a_row_for_each_way_of_drawing(make_config):
    rows = pair.compare(make_config(
        "sampler=greedy", "draft=model", "draft.model=tiny", "decoder=speculative_match",
        "dataset.limit=2", "dataset.max_new_tokens=6", "hardware.num_slots=1"))
    names = ["plain", "speculative", "generate", "generate, assisted"]
    assert [(row["by"], row["answers"], row["answers of plain"]) for row in rows] == [(name, 2, 1.0) for name in names]
    assert [row["tau"] is not None for row in rows] == [False, True, False, False]
