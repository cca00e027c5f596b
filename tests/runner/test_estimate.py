"""Estimates against published arithmetic, against the engine where it must agree exactly, and against real runs."""

import json
import shutil
from typing import NamedTuple

import numpy as np
import pytest

from dflash_mcmc.__main__ import main
from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.chains import build, cost
from dflash_mcmc.components import registered
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.chains import RequestPart
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.forcing import sequences
from dflash_mcmc.forcing.sequences import Tree
from dflash_mcmc.probe import Probe
from dflash_mcmc.rng import Key
from dflash_mcmc.sampler import Sampler
from tests.cases import quick
from tests.probes import measured
from tests.runs import execute, records_of
from tests.targets import random_model

PS = ("condition=ps", "sampler.early_reject=off", "assumed.identical=0")
FULL = ("assumed.answer_length=1", "assumed.prompt_length=100")


# (blocks, block length, steps) -> decoded tokens. From the design's table for no stop id.
@pytest.mark.parametrize(("blocks", "block", "steps", "decoded"), [
    (16, 64, 2, 9_744), (16, 192, 10, 133_712), (4, 192, 10, 10_388), (4, 192, 2, 2_692)])
def test_full_length_answers_cost_what_the_closed_form_says(make_config, blocks, block, steps, decoded):
    setting = (*PS, *FULL, f"sampler.num_blocks={blocks}", f"sampler.num_steps={steps}",
               f"dataset.max_new_tokens={blocks * block}")
    assert cost.token_forwards(make_config(*setting)) == pytest.approx(99 + decoded)


def test_without_stop_ids_the_engine_counts_exactly_this(make_config):
    """Greedy, temperature and power_mh without steps have one cost; with steps the cuts decide, whose mean is the estimate."""
    horizon, prompt, count = 24, np.arange(5, 16), 40
    model = LanguageModel(random_model())
    model.stop_ids = ()
    measured = {}
    for name, overrides in {"greedy": ("sampler=greedy",), "temperature": ("sampler=temperature",),
                            "no steps": (*PS, "sampler.num_steps=0"), "steps": PS}.items():
        blocks = () if "sampler" in overrides[0] else ("sampler.num_blocks=4",)
        config = make_config(*overrides, *blocks, f"dataset.max_new_tokens={horizon}", "assumed.answer_length=1",
                             f"assumed.prompt_length={len(prompt)}")
        engine = BatchedEngine(model, NoBlend(), 32, len(prompt) + horizon, Options(skip_identical=False))
        done = list(engine.run((n, config.sampler.chain(prompt, horizon, Key(3).fold_in(n))) for n in range(count)))
        measured[name] = (cost.token_forwards(config), done)
    for name in ("greedy", "temperature", "no steps"):
        expected, done = measured[name]
        assert {chain.cost.token_forwards for chain in done} == {len(prompt) - 1 + horizon} == {expected}
    expected, done = measured["steps"]
    stages = (6, 12, 18, 24)
    for chain in done:
        redrawn = sum(entry["block"] * 6 - entry["cut"] for entry in chain.result.trace)
        assert chain.cost.token_forwards == len(prompt) - 1 + horizon + redrawn
    variance = 2 * sum((stage**2 - 1) / 12 for stage in stages)  # of uniform cuts, two steps a stage
    mean = np.mean([chain.cost.token_forwards for chain in done])
    assert abs(mean - expected) < 4 * (variance / count) ** 0.5


REFINE = ("sampler=draft_refine", "sampler.cut=current", "sampler.num_blocks=4", "draft=tiny")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    (*REFINE, "sampler.num_steps=2"), (*REFINE, "sampler.num_steps=0", "blend=draft"),
    ("condition=draft_blend_ps", "draft=tiny", "sampler.num_blocks=4", "sampler.num_steps=0"),
    ("sampler=power_smc", "draft=tiny", "sampler.proposal=draft", "sampler.num_particles=2", "sampler.block_size=6")], ids=str)
def test_without_stop_ids_the_plan_has_the_blocks_that_the_engine_counts(make_config, monkeypatch, overrides):
    """Prompts begin anywhere in a block of the draft.

    Scores and steps of draft_refine take the draft's forwards under its blend alone.
    """
    config = make_config(*overrides, "dataset.max_new_tokens=24", "assumed.answer_length=1")
    model, size = config.model.load("cpu"), cost.block_size(config)
    monkeypatch.setattr(model, "stop_ids", ())
    prompts = [np.arange(5, 5 + length) for length in range(size, 2 * size)]
    config.assumed.prompt_length = np.mean([len(prompt) for prompt in prompts])
    engine = BatchedEngine(model, config.blend, 8, 2 * size + 24, drafter=config.draft.load(model))
    done = engine.run((n, config.sampler.chain(prompt, 24, Key(3).fold_in(n))) for n, prompt in enumerate(prompts))
    assert np.mean([chain.cost.blocks_drafted for chain in done]) == pytest.approx(cost.draft_blocks(config))


@pytest.mark.slow
def test_savings_are_estimated_from_their_measured_shares(make_config):
    """Of a run over 12 problems, whose lengths are assumed too."""
    config = make_config("condition=ps", "sampler.num_blocks=8", "sampler.proposal_temperature=1", "dataset.limit=12")
    records = list(records_of(execute(config).folder).values())
    prompts = build.prompts(config, config.model.load("cpu"), config.dataset.problems())
    config.assumed.prompt_length = np.mean([len(prompt) for prompt in prompts.values()])
    config.assumed.answer_length = np.mean([record["num_tokens"] for record in records]) / config.dataset.max_new_tokens
    measured = np.mean([record["token_forwards"] for record in records])
    assert config.sampler.early_reject == "exact"
    tried = [entry for record in records for entry in record["trace"]]
    rejected = [entry for entry in tried if entry["decision"] in ("reject", "abandon")]
    kept = sum(entry["proposal_length"] - entry["cut"] for entry in tried if entry["decision"] in ("accept", "identical"))
    lost = sum(entry["length"] - entry["cut"] for entry in rejected)
    drawn_of_lost = sum(entry["proposal_length"] - entry["cut"] for entry in rejected)
    proposed = sum(record["tokens_drawn"] + record["tokens_skipped"] - record["num_tokens"] for record in records)
    config.assumed.acceptance, config.assumed.abandoned_at = kept / (kept + lost), drawn_of_lost / lost
    config.assumed.identical = sum(record["tokens_skipped"] for record in records) / proposed
    assert 0 < config.assumed.identical < 1
    assert config.assumed.abandoned_at < 0.9
    assert cost.token_forwards(config) == pytest.approx(measured, rel=0.25)
    config.assumed.acceptance = config.assumed.abandoned_at = 1.0
    config.assumed.identical = 0.0
    assert cost.token_forwards(config) > 1.4 * measured


class Metered(NamedTuple):
    """What the target and the draft were given, in tokens and in blocks."""

    token_forwards: list[int]
    draft_blocks: list[int]


@pytest.fixture
def metered(monkeypatch) -> Metered:
    """Counts the tokens that every part of a probe reads: the engine's meter, whole sequences, and branches."""
    found = Metered([], [])
    read, drafted, branches, of_part = sequences.read, sequences.drafted, Tree.read, RequestPart.charge

    def reading(model, tokens, *others, **settings):
        found.token_forwards.append(tokens.numel())
        return read(model, tokens, *others, **settings)

    def drafting(draft, model, features, tokens, lengths, anchors, *others):
        found.draft_blocks.append(anchors.numel())
        return drafted(draft, model, features, tokens, lengths, anchors, *others)

    def branching(tree, parents, tokens):
        found.token_forwards.append(len(tokens))
        return branches(tree, parents, tokens)

    def charging(part, **amounts):
        found.token_forwards.append(amounts.get("token_forwards", 0))
        found.draft_blocks.append(amounts.get("blocks_drafted", 0))
        return of_part(part, **amounts)

    monkeypatch.setattr(sequences, "read", reading)
    monkeypatch.setattr(sequences, "drafted", drafting)
    monkeypatch.setattr(Tree, "read", branching)
    monkeypatch.setattr(RequestPart, "charge", charging)
    return found


PROBED = ("draft=tiny", "dataset.limit=3", "dataset.max_new_tokens=64")
"""Prompts of 43, 47 and 59 tokens, with solutions of 22, 47 and 55."""


def mean_length(records: list[dict]) -> float:
    """Mean length of the answers in a probe's records; that of the solutions where the records do not have it."""
    parts = [part for record in records for part in record.get("cells", [record])]
    return float(np.mean([part.get("num_tokens", (22 + 47 + 55) / 3) for part in parts]))


VERIFYING = ("probe=sampled_verify", "sampler=temperature", "probe.temperatures=[1.0]", "probe.faults=[]",
             "probe.long_tokens=32", "probe.agent_tokens=300", "probe.agent_answer=8", "probe.agent_runs=1")


@pytest.mark.parametrize(("overrides", "factor"), quick([
    (("probe=layer_rank",), 1.15), (("probe=logit_blend", "probe.answers=greedy"), 1.15), (("probe=deep_readout",), 1.15),
    (("probe=logit_blend", "blend=prompt"), 1.15),
    (("probe=deep_readout", "probe.context=block", "probe.reinject_every=2"), 1.15),
    (("probe=speculative_mcmc", "probe.timed_rows=2"), 1.4),
    (("probe=speculative_mcmc", "probe.timed_rows=0", "probe.num_samples=8", "assumed.shared=0.8"), 1.15),
    (("probe=difficulty", "sampler=best_of_n", "sampler.num_candidates=3"), 1.15)],
    ("probe=layer_rank",), ("probe=deep_readout",), ("probe=logit_blend", "blend=prompt")))
def test_units_of_probes_cost_what_is_estimated_for_their_lengths(make_config, metered, overrides, factor):
    config = make_config(*PROBED, *overrides)
    count = len(config.probe.units(config))
    config.assumed.prompt_length = (43 + 47 + 59) / 3
    config.assumed.answer_length = mean_length(measured(config)) / config.dataset.max_new_tokens
    expected = config.probe.expected_cost(config)
    for wanted, parts in zip(expected, metered, strict=True):
        assert 1 / factor < wanted * count / sum(parts) < factor


@pytest.mark.slow
def test_sampled_verify_costs_what_is_estimated_from_the_tokens_that_a_block_keeps(make_config, metered):
    config = make_config(*PROBED, *VERIFYING)
    count = len(config.probe.units(config))
    config.assumed.prompt_length = (43 + 47 + 59) / 3
    records = measured(config)
    short = [len(cell["tokens"]) for record in records if record["workload"] == "short" for cell in record["cells"]]
    config.assumed.answer_length = float(np.mean(short)) / config.dataset.max_new_tokens
    config.probe.agent_tokens = next(record["prompt_tokens"] for record in records if record["workload"] == "agent")
    drafted = [len(cell["tokens"]) for record in records for cell in record["cells"] if cell["decoder"] != "plain"]
    config.assumed.kept = sum(drafted) / sum(metered.draft_blocks)
    expected = config.probe.expected_cost(config)
    for wanted, parts in zip(expected, metered, strict=True):
        assert 1 / 1.15 < wanted * count / sum(parts) < 1.15


def test_every_probe_and_every_sampler_has_an_estimate():
    for group, base in (("probe", Probe), ("sampler", Sampler)):
        lacking = [name for name, found in registered(group).items()
                   if not found.cls.is_null and found.cls.expected_cost is base.expected_cost]
        assert lacking == []


def told(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "dry_run=true"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def cells(text: str) -> dict[str, list[str]]:
    """The numbers of each row of a printed table, by its first column."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {first: [cell.replace(",", "") for cell in others] for first, *others in rows[2:]}


def test_dry_run_loads_and_writes_nothing(capsys, tmp_path, monkeypatch):
    for place in ("model.hf.HFModel.load", "store.folder.RunStore.open", "runner.loop.execute"):
        monkeypatch.setattr(f"dflash_mcmc.{place}", lambda *_, **__: pytest.fail("a dry run"))
    text = told(capsys, "experiment=demo", "condition=temp", "num_chains=3", "hardware.tokens_per_second=1000",
                "assumed.prompt_length=100")
    assert cells(text) == {"temp": ["192", "110", "21082", "0.01"]}  # 64 * (99 + 3 * 0.6 * 128)
    counted = cells(told(capsys, "experiment=demo", "condition=temp", "num_chains=3"))["temp"]
    assert int(counted[1]) < 110
    assert "counted with the model's tokenizer: the mean length of prompts" not in text
    assert "hours: at 1000 token-forwards a second (hardware.tokens_per_second)" in text
    text = told(capsys, "experiment=demo", "condition=temp", "num_chains=3", "assumed.prompt_length=100")
    assert cells(text) == {"temp": ["192", "110", "21082", "-"]}
    assert "hours: unknown" in text
    text = told(capsys, "sweep=steps", "experiment=demo")
    assert "3 jobs" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_hours_are_at_the_rate_of_the_newest_finished_run_of_the_model(make_config, capsys, monkeypatch):
    other = execute(make_config("condition=temp", "dataset.limit=2", "model.dtype=bfloat16"))
    plan = ("experiment=demo", "condition=temp", "num_chains=3", "assumed.prompt_length=100",
            f"paths.outputs={other.folder.parents[1]}")
    assert "hours: unknown" in told(capsys, *plan)
    done = execute(make_config("condition=temp", "dataset.limit=2"))
    content = json.loads((summary := done.folder / "summary.json").read_text())
    summary.write_text(json.dumps({**content, "token_forwards": 36, "mean_share_seconds": 9.0, "num_samples": 2}))
    text = told(capsys, *plan)
    assert cells(text)["temp"][-1] == "2.93"  # 21,082 at 2 a second
    assert f"hours: this rate is that of {done.folder}, which this machine has finished" in text
    assert str(other.folder) not in text
    assert "hours: unknown" in told(capsys, *plan, "draft=tiny", "decoder=speculative_match")
    assert "hours: unknown" in told(capsys, "probe=layer_rank", "draft=tiny", plan[-1])
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert "hours: unknown" in told(capsys, *plan)


@pytest.mark.parametrize("several", [["name=one,two", "dataset.limit=10"], ["dataset.shards=[0],[1]", "dataset.num_shards=30"],
                                     ["dataset.ids=[arith-000],[arith-001]"]], ids=["names", "shards", "ids"])
def test_runs_of_other_folders_or_problems_are_not_the_same(capsys, several):
    rows = cells(text := told(capsys, "-m", "sampler=greedy", "condition.name=a", *several))
    samples = [row[0] for row in rows.values()]
    assert len(samples) == 3
    assert sum(map(int, samples[:2])) == int(samples[2])
    assert "the same run as another point" not in text


def test_two_models_of_a_blend_are_two_runs(capsys, tmp_path, make_config):
    other = tmp_path / "other"
    shutil.copytree(make_config().model.path, other)
    rows = cells(text := told(capsys, "-m", "blend=model", f"blend.model=tiny,{other}", "sampler=temperature",
                              "sampler.alpha=2", "dataset.limit=10"))
    assert [row[0] for row in rows.values()] == ["10", "10", "20"]
    assert "sampler.alpha=2 of sampler=temperature: each token is drawn at temperature 0.5" in text
    assert "the same run as another point" not in text


def test_what_is_not_known_is_not_guessed_and_nothing_costs_nothing(capsys, monkeypatch):
    monkeypatch.setattr("dflash_mcmc.sampler.draft_mh.DraftMH.expected_cost", Sampler.expected_cost)
    rows = cells(text := told(capsys, "sampler=draft_mh", "draft=tiny", "dataset.limit=10"))
    assert next(iter(rows.values())) == ["10", "no estimate", "no estimate", "no estimate"]
    assert "no estimate: sampler=draft_mh does not give one" in text
    assert "problems: 10 of 300 in dataset=arith, by dataset.limit" in text
    rows = cells(text := told(capsys, "probe=rejection_sampling"))
    assert "counted in chunks; it evaluates no model" in text
    assert "problems" not in text
    assert next(iter(rows.values())) == ["100", "0", "0", "0.00"]


def test_forwards_of_the_draft_have_a_column_where_there_are_any(capsys):
    rows = cells(text := told(capsys, "-m", "probe=layer_rank", "draft=none,tiny", "dataset.limit=4",
                              "assumed.answer_length=0.6"))
    assert "forwards of the draft" in text
    assert next(iter(rows.values()))[-1] == "0"
    assert int(rows["total"][-1]) == pytest.approx(4 * (76.8 - 3.5) / 8, abs=1)


def test_the_plan_uses_the_lengths_of_a_file(capsys, tmp_path, make_config):
    rows = [{"question": "1 + 1 = ? " * number, "answer": "2"} for number in (1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("condition=greedy", "dataset=jsonl", f"dataset.path={tmp_path}/rows.jsonl", "dataset.max_new_tokens=64")
    config = make_config(*given)
    prompts = build.prompts(config, config.model.load("cpu"), config.dataset.problems())
    mean = np.mean([len(prompt) for prompt in prompts.values()])
    found = cells(text := told(capsys, *given))["greedy"]
    assert "counted with the model's tokenizer: the mean length of prompts" in text
    assert int(found[1]) == round(mean - 1 + 0.6 * 64)
    solved = told(capsys, "-m", "probe=layer_rank", "draft=none", "dataset.limit=3", "seed=0,1")
    assert "the mean length of prompts and solutions" in solved


def test_published_dataset_is_counted_without_reading_it(capsys, monkeypatch):
    monkeypatch.setattr("dflash_mcmc.dataset.inputs.sources.Benchmark.rows", lambda *_: pytest.fail("read"))
    assert cells(told(capsys, "dataset=gsm8k", "condition=greedy"))["greedy"][0] == "1319"
    shards = ("dataset.shards=[39]", "dataset.num_shards=40")
    assert cells(told(capsys, "dataset=math500", "condition=greedy", *shards))["greedy"][0] == "12"
    assert cells(told(capsys, "dataset=math500", "condition=greedy", "dataset.ids=[a,b]"))["greedy"][0] == "2"


@pytest.mark.slow
def test_dry_runs_of_probes_read_no_published_dataset_and_no_hub(capsys, monkeypatch):
    monkeypatch.setattr("dflash_mcmc.dataset.inputs.sources.Benchmark.rows", lambda *_: pytest.fail("read"))
    monkeypatch.setattr("huggingface_hub.file_download.http_get", lambda *_, **__: pytest.fail("downloaded"))
    shared = ("model=hf", "model.path=some/model", "dataset=gsm8k", "num_chains=2", "draft=dflash", "draft.path=some/draft")
    rows = cells(told(capsys, "-m", "probe=layer_rank,difficulty", *shared))
    assert [row[1] for row in rows.values()] == ["1319", "2638", str(1319 + 2638)]
    verified = told(capsys, "probe=sampled_verify", "sampler=temperature", "probe.agent_runs=4", *shared)
    assert [row[0] for row in cells(verified).values()] == [str(1319 * 3 + 4)]


@pytest.mark.parametrize("name", ["layer_rank", "difficulty", "sampled_verify"])  # the others inherit what these have
def test_number_of_units_is_that_of_the_units(make_config, name):
    more = ("sampler=temperature",) if name == "sampled_verify" else ()
    config = make_config(f"probe={name}", "draft=tiny", "dataset.limit=3", "num_chains=2", *more)
    assert config.probe.num_units(config) == len(config.probe.units(config))
