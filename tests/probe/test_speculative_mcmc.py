"""The probe compared with a loop over blocks that uses only transformers, the draft's class and numpy; tables by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.probe import Summary, Work, speculative_mcmc
from dflash_mcmc.probe.speculative_mcmc import weighing
from dflash_mcmc.rng import Key
from dflash_mcmc.store.records import read_records
from tests.refusals import refused
from tests.runs import execute
from tests.train.drafts import block_alone

SHORT = ("probe=speculative_mcmc", "draft=tiny", "dataset.limit=4", "probe.num_samples=12", "probe.timed_rows=0")


@pytest.fixture
def probe_config(make_config):
    return lambda *overrides: make_config(*SHORT, *overrides)


def records_of(result) -> dict[str, dict]:
    lines = read_records(result.folder)
    return {line["problem"]: {name: value for name, value in line.items() if not name.startswith("seconds")} for line in lines}


def straightforward(config, problem) -> dict[str, dict[str, list[float]]]:
    """The greedy answer, then block by block: distances, and weights given the reference and given the drawn tokens."""
    model = config.model.load("cpu")
    drafter = config.draft.load(model)
    network, n = drafter.network, drafter.num_drafted
    prompt = model.encode(config.model.prompt(model.tokenizer, problem.question)).tolist()
    answer = greedy(model, prompt, config.dataset.max_new_tokens)
    sequence = torch.tensor(prompt + answer)
    alpha, key = config.probe.alpha, Key(config.seed).fold_in("speculative_mcmc", problem.id)
    found = {f"{t:g}": {"kl": [], "tvd": [], "reference": [], "joint": []} for t in config.probe.temperatures()}
    places = [start for start in range(0, len(answer), n + 1) if start + n + 1 <= len(answer)]
    for number, start in enumerate(places):
        anchor = len(prompt) + start
        draft = block_alone(network, model, sequence, anchor).double()
        with torch.no_grad():
            hidden = model.decoder(input_ids=sequence[None, : anchor + n], use_cache=False).last_hidden_state[0, anchor:]
        log_p = torch.log_softmax(model.logits(hidden).double(), dim=-1)
        sharp = torch.log_softmax(alpha * model.logits(hidden).double(), dim=-1)
        for name, columns in found.items():
            log_q = torch.log_softmax(draft / float(name), dim=-1)
            for a, b in zip(sharp.exp(), log_q, strict=True):
                real = a > 0
                columns["kl"].append((a[real] * (a[real].log() - b[real])).sum().item())
                columns["tvd"].append(0.5 * (a - b.exp()).abs().sum().item())
            samples = config.probe.num_samples
            every = key.fold_in("draft", name).uniforms(0, len(places) * n * samples).reshape(-1, n, samples)
            uniforms = every[number]
            upto = log_q.exp().cumsum(dim=-1).numpy()
            tokens = np.array([[np.searchsorted(upto[k], uniforms[k, s] * upto[k, -1]) for k in range(n)]
                               for s in range(samples)])
            own_q = [sum(log_q[k, x].item() for k, x in enumerate(row)) for row in tokens]
            columns["reference"].append([alpha * sum(log_p[k, x].item() for k, x in enumerate(row)) - q
                                         for row, q in zip(tokens, own_q, strict=True)])
            prefix = sequence[: anchor + 1].tolist()
            columns["joint"].append([joint(model, prefix, row.tolist(), log_q, alpha) for row in tokens])
    return found


def greedy(model, prompt, horizon) -> list[int]:
    answer: list[int] = []
    while len(answer) < horizon and not set(answer) & set(model.stop_ids):
        with torch.no_grad():
            hidden = model.decoder(input_ids=torch.tensor([prompt + answer]), use_cache=False).last_hidden_state[0, -1]
        answer.append(int(model.logits(hidden).argmax()))
    return answer


def joint(model, prefix, tokens, log_q, alpha) -> float:
    """log w of one drawn block, up to a stop id, from its own forward."""
    kept = next((k + 1 for k, token in enumerate(tokens) if token in model.stop_ids), len(tokens))
    with torch.no_grad():
        hidden = model.decoder(input_ids=torch.tensor([prefix + tokens]), use_cache=False).last_hidden_state[0]
    log_p = torch.log_softmax(model.logits(hidden[len(prefix) - 1 :]).double(), dim=-1)
    return sum(alpha * log_p[k, tokens[k]].item() - log_q[k, tokens[k]].item() for k in range(kept))


def test_records_equal_those_of_a_straightforward_loop(probe_config):
    config = probe_config("dataset.limit=2", "probe.autoregressive=false", "probe.num_samples=6")
    records = records_of(execute(config))
    for problem in config.dataset.problems():
        expected, record = straightforward(config, problem), records[problem.id]
        for name, columns in record["proposals"].items():
            np.testing.assert_allclose(columns["tvd"], expected[name]["tvd"], atol=2e-4)
            np.testing.assert_allclose(columns["kl"], expected[name]["kl"], atol=3e-3, rtol=2e-3)
            for weights in ("reference", "joint"):
                log_w = np.array(expected[name][weights])
                np.testing.assert_allclose(columns[weights]["log_w"], log_w.mean(axis=1), atol=2e-2, rtol=1e-3)
                np.testing.assert_allclose(columns[weights]["log_w_std"], log_w.std(axis=1, ddof=1), atol=2e-2, rtol=1e-3)
                np.testing.assert_allclose(columns[weights]["equilibrium"], weighing.in_equilibrium(log_w), atol=1e-2)
    assert sum(record["blocks"] for record in records.values()) >= 4


def test_runtime_fields_leave_the_identity(probe_config):
    plain = identity_of(probe_config())
    assert plain == identity_of(probe_config("probe.timed_rows=8", "probe.position_edges=[1,2]"))
    assert plain == identity_of(probe_config("probe.draft_temperatures=[0.25,1,0.5]")), "null is these"
    assert plain != identity_of(probe_config("probe.num_samples=13"))


@pytest.mark.parametrize(("overrides", "message"), [
    (("draft=none",), "draft: given 'none'; allowed: a draft, such as tiny"),
    (("draft=ngram",), "draft: given 'ngram'; allowed: tiny, smollm2 or dflash with probe=speculative_mcmc"),
    (("probe.alpha=0.5",), "probe.alpha: given 0.5; allowed: a number >= 1"),
    (("probe.num_samples=1",), "probe.num_samples: given 1; allowed: a whole number >= 2"),
    (("probe.draft_temperatures=[1,0]",), "probe.draft_temperatures: given"),
    (("probe.draft_temperatures=[1,1]",), "probe.draft_temperatures: given"),
    (("probe.draft_temperatures=[]",), "probe.draft_temperatures: given"),
    (("probe.draft_temperatures=[1,inf]",),
     "probe.draft_temperatures: given [1.0, inf]; allowed: a list of numbers ([0.5,1]), each > 0 or null"),
    (("probe.draft_temperatures=[0.5,1,0.50000001]",),
     "probe.draft_temperatures: given [1.0, 0.50000001, 0.5]; allowed: numbers that differ in their first six digits"),
    (("probe.alpha=1.00000001",), "probe.draft_temperatures: given [1.0, 0.99999999"),
    (("probe.position_edges=[3,2]",), "probe.position_edges: given"),
    (("dataset.max_new_tokens=7",), "dataset.max_new_tokens: given 7; allowed: at least 8, a block"),
    (("dataset.max_new_tokens=2000",), "dataset.max_new_tokens: given 2000; allowed: at most"),
])
def test_bad_input_is_a_one_line_error(make_config, tmp_path, overrides, message):
    short = [text for text in SHORT if not any(text.split("=")[0] == other.split("=")[0] for other in overrides)]
    with refused(start=message):
        execute(make_config(*short, *overrides))
    assert list(tmp_path.iterdir()) == []


def made_record(problem: str, acceptance: list[float], log_w: list[float], block_size: int = 16,
                seconds: tuple[float, float] = (0.8, 0.1), timed_rows: int = 8) -> dict:
    n = (block_size - 1) * len(acceptance)
    chain = {"acceptance": acceptance, "moved": acceptance, "equilibrium": acceptance, "log_w": log_w,
             "log_w_std": [1.0] * len(log_w), "effective": [2.0] * len(log_w)}
    laws = {"kl": [3.0] * n, "tvd": [0.332] * n}
    return {"problem": problem, "chain": 0, "num_tokens": n, "blocks": len(acceptance), "block_size": block_size,
            "p": {"kl": [1.0] * n, "tvd": [0.367] * n}, "proposals": {"0.25": {**laws, "reference": chain}},
            "seconds_target": seconds[0], "seconds_draft": seconds[1], "timed_rows": timed_rows}


def summary_of(records: list[dict], timed_rows: int = 8) -> Summary:
    return speculative_mcmc.summary_of(records, num_samples=100, position_edges=(1, 3), timed_rows=timed_rows)


def test_tables_by_hand():
    """Two problems with the document's -466 per block of 15 tokens, its 66.8 % and 63.3 %, and its speed of 8x."""
    records = [made_record("a", [0.02, 0.06, 0.10, 0.95], [-466.0] * 4), made_record("b", [0.10, 1.0], [-460.0, -472.0])]
    found = summary_of(records)
    (row,) = found.tables["aggregate"]
    assert round(row["log_w_per_token"], 1) == -31.1
    assert (row["log_w_per_token_low"], row["log_w_per_token_high"]) == (row["log_w_low"] / 15, row["log_w_high"] / 15)
    assert row["token_acceptance"] == pytest.approx(0.668)
    assert row["block_product"] == pytest.approx(0.668**15)
    assert row["acceptance"] == pytest.approx(np.mean([0.02, 0.06, 0.10, 0.95, 0.10, 1.0]))
    assert row["acceptance_median"] == 0.10
    assert (row["blocks"], row["tokens"], found.values["num_predicted_tokens"]) == (6, 90, 90)
    assert found.tables["baseline"][0]["token_acceptance"] == pytest.approx(0.633)
    (row,) = found.tables["thresholds"]
    assert [row[f"above_{t}_percent"] for t in (1, 5, 10, 20, 50, 70)] == pytest.approx([1, 5 / 6, 2 / 6, 2 / 6, 2 / 6, 2 / 6])
    assert [(row["position"], row["from"], row["to_below"], row["blocks"], row["tokens"])
            for row in found.tables["positions"]] == [
        ("early", 0, 1, 2, 30), ("mid", 1, 3, 3, 45), ("late", 3, None, 1, 15)]
    (row,) = found.tables["convergence"]
    assert row["median_once"] == pytest.approx(0.65, abs=0.005)
    assert row["median_three_times"] == pytest.approx(0.07, abs=0.005)
    rates = [0.02, 0.06, 0.10, 0.95, 0.10, 1.0]
    assert row["blocks_once"] == pytest.approx(np.mean([1 - (1 - rate) ** 10 for rate in rates]))
    (row,) = found.tables["throughput"]
    assert row["speed"] == pytest.approx(8.0)
    assert row["accepts_per_second"] == pytest.approx(10 * np.mean(rates))
    assert {(row["temperature"], row["weights"]) for row in found.tables["strata"]} == {(0.25, "reference")}
    shares = {row["difficulty"]: (row["share"], row["blocks"]) for row in found.tables["strata"]}
    assert shares == dict.fromkeys(("easy", "middle", "hard"), (pytest.approx(2 / 6), 2))


def test_rates_per_second_by_hand():
    """a: acceptance 0.5, 10 proposals/s; b: 0.25 and 5; both: 0.375 in 0.15 s. A resample has a, b or both."""
    a, b = (made_record(name, rates, [0.0] * 2, seconds=seconds)
            for name, rates, seconds in (("a", [0.05, 0.95], (0.8, 0.1)), ("b", [0.05, 0.45], (0.4, 0.2))))
    found = summary_of([a, b])
    (row,) = found.tables["throughput"]
    for name, values in (("proposals_per_second", (2 / 0.3, 5, 10)), ("speed", (1.2 / 0.3, 2, 8)),
                         ("accepts_per_second", (0.375 / 0.15, 1.25, 5)), ("moves_per_second", (0.375 / 0.15, 1.25, 5))):
        assert [row[name], row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx(values)
    assert (row["blocks"], row["timed_problems"], row["timed_rows"]) == (4, 2, 8)
    easy, middle, hard = found.tables["strata"]
    assert easy["draft_acceptance_per_second"] == pytest.approx(0.95 / 0.15)
    assert [easy[f"draft_acceptance_per_second_{end}"] for end in ("low", "high")] == pytest.approx([0.95 / 0.15, 9.5])
    assert hard["draft_moved_per_second"] == pytest.approx(0.05 / 0.15)
    assert (middle["blocks"], middle["timed_problems"]) == (1, 2)


def test_times_of_other_batches_are_left_out():
    """`timed_rows` is not in the identity, so a continued run may have other timings for some problems, or none."""
    other = made_record("b", [0.2, 0.4], [0.0] * 2, seconds=(80.0, 40.0), timed_rows=2)
    untimed = {name: value for name, value in made_record("c", [0.3], [0.0]).items() if not name.startswith(("sec", "timed"))}
    records = [made_record("a", [0.1, 0.9], [0.0] * 2), other, untimed]
    (row,) = summary_of(records).tables["throughput"]
    assert (row["speed"], row["timed_problems"], row["timed_rows"], row["blocks"]) == (pytest.approx(8.0), 1, 8, 5)
    assert row["accepts_per_second"] == pytest.approx(10 * 1.9 / 5)
    assert [row[f"{name}_low"] for name in ("proposals_per_second", "accepts_per_second")] == [None, None]
    assert summary_of(records, timed_rows=2).tables["throughput"][0]["speed"] == pytest.approx(2.0)
    assert "throughput" not in summary_of(records, timed_rows=3).tables
    assert "draft_moved_per_second" not in summary_of([untimed], timed_rows=0).tables["strata"][0]


def test_an_answer_that_cannot_be_timed_is_skipped(probe_config, monkeypatch):
    monkeypatch.setattr("dflash_mcmc.probe.speculative_mcmc.weighing.BatchedEngine",
                        lambda *given, **more: SimpleNamespace(run=lambda chains: iter([SimpleNamespace(result=None)])))
    config = probe_config("dataset.limit=1", "probe.timed_rows=2", "probe.autoregressive=false", "probe.weights=reference")
    ((_, record),) = config.probe.measure(config, Work(config.probe.units(config), "cpu"))
    assert list(record) == ["skipped", "seconds"]
    assert "not numbers" in record["skipped"]


@pytest.mark.slow
def test_logits_are_computed_in_pieces(probe_config, monkeypatch):
    """No call computes the logits of a whole sequence."""
    config = probe_config("dataset.limit=2")
    model = config.model.load("cpu")
    seen, logits = [], LanguageModel.logits

    def watched(self, hidden):
        seen.append(math.prod(hidden.shape[:-1]))
        return logits(self, hidden)

    work = Work(config.probe.units(config), "cpu")
    plain = {unit: record for unit, record in config.probe.measure(config, work)}
    monkeypatch.setattr("dflash_mcmc.forcing.sequences._LOGITS_BYTES", 4 * model.vocab_size * 14)
    monkeypatch.setattr(LanguageModel, "logits", watched)
    work = Work(config.probe.units(config), "cpu")
    pieces = {unit: record for unit, record in config.probe.measure(config, work)}
    assert max(seen) == 14
    for unit, record in plain.items():
        one, other = (found["proposals"]["1"] for found in (record, pieces[unit]))
        np.testing.assert_allclose(one["tvd"], other["tvd"], atol=1e-5)
        np.testing.assert_allclose(one["joint"]["log_w"], other["joint"]["log_w"], atol=1e-3)
