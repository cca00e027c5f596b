"""`--model dflash/...` and logs of runs, against the package inspect_ai: answers, cancellation, the commands of the page."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator

import numpy as np
import pytest

import dflash_mcmc as dm
from dflash_mcmc.errors import UserError
from tests import pages
from tests.harness.examples import ROWS, TINY, page_commands, shell

pytest.importorskip("inspect_ai", reason="inspect_ai is not installed: make harness")
pytestmark = pytest.mark.harness

from inspect_ai._util.error import PrerequisiteError  # noqa: E402
from inspect_ai.log import read_eval_log  # noqa: E402
from inspect_ai.model import ChatMessageUser, ContentImage, GenerateConfig, Model, get_model  # noqa: E402

QUESTIONS = [row["question"] for row in ROWS]
POWER = {"condition": "ps", "sampler.alpha": 2, "sampler.num_blocks": 4, "sampler.num_steps": 2, "seed": 3}


@pytest.fixture(autouse=True)
def guard_of_a_test() -> None:
    """Replaces the guard of tests/leaks.py: inspect_ai sets variables, and models keep their threads."""


@pytest.fixture(autouse=True, scope="module")
def guard_of_a_module() -> None:
    """As `guard_of_a_test`."""


@pytest.fixture(scope="module")
def power() -> Iterator[Model]:
    """inspect_ai finds the provider by the entry point of this package."""
    model = get_model(f"dflash/{TINY}", max_new_tokens=32, memoize=False, **POWER)
    yield model
    model.api.close()


def asked_at_once(model: Model, prompts: list[str], config: GenerateConfig) -> list:
    async def all_of() -> list:
        return await asyncio.gather(*(model.generate(prompt, config=config) for prompt in prompts))

    return asyncio.run(all_of())


def python_draws(prompts: list[str], num_chains: int, **values) -> list[dm.Sample]:
    """What Python draws for prompts with the names that the provider gives them."""
    model = dm.component("model", "hf", path=TINY)
    tokenizer = model.tokenizer()
    named = {}
    for text in prompts:
        ids = np.array(tokenizer.encode(model.prompt(tokenizer, text)), np.int64)
        named[hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()] = text
    return dm.sample(model, None, named, num_chains=num_chains, progress=False, **values)


def test_answers_are_those_of_python(power):
    sampler = dm.PowerMH(alpha=2.0, num_blocks=4, num_steps=2)
    found = asked_at_once(power, QUESTIONS, GenerateConfig(num_choices=2, logprobs=True, max_tokens=24))
    mine = python_draws(QUESTIONS, 2, sampler=sampler, seed=3, max_new_tokens=24)
    details = [entry for output in found for entry in output.metadata["dflash_mcmc"]]
    assert [entry["tokens"] for entry in details] == [sample.tokens for sample in mine]
    choices = [choice for output in found for choice in output.choices]
    for choice, sample in zip(choices, mine, strict=True):
        assert choice.message.text == sample.text
        assert choice.stop_reason == {"stop_id": "stop", "length": "max_tokens"}[sample.finish_reason]
        assert sum(token.logprob for token in choice.logprobs.content) == pytest.approx(sample.log_p)
    assert sum(output.usage.output_tokens for output in found) == sum(len(sample.tokens) for sample in mine)
    again = asked_at_once(power, QUESTIONS[:1], GenerateConfig(num_choices=2, max_tokens=24))
    assert [entry["tokens"] for entry in again[0].metadata["dflash_mcmc"]] == \
        [sample.tokens for sample in python_draws(QUESTIONS[:1], 4, sampler=sampler, seed=3, max_new_tokens=24)[2:]]


def test_plain_models_take_the_temperature_and_stop_strings_of_requests():
    with get_model(f"dflash/{TINY}", max_new_tokens=40, memoize=False) as model:
        cold = asked_at_once(model, QUESTIONS, GenerateConfig(temperature=0.0, stop_seqs=["="]))
        mine = python_draws(QUESTIONS, 1, sampler="greedy", max_new_tokens=40, stop=["="])
        assert [output.completion for output in cold] == [sample.text for sample in mine]
        warm = asked_at_once(model, QUESTIONS, GenerateConfig(temperature=0.7, top_k=5, seed=9))
        # the prompts are asked for the second time
        mine = python_draws(QUESTIONS, 2, sampler=dm.Temperature(temperature=0.7, top_k=5), seed=9, max_new_tokens=40)[1::2]
        assert [output.completion for output in warm] == [sample.text for sample in mine]


def test_a_request_that_is_cancelled_leaves_the_engine(power):
    endless = GenerateConfig(extra_body={"sampler": {"num_steps": 1_000_000}})

    async def cancelled() -> None:
        task = asyncio.create_task(power.generate(QUESTIONS[0], config=endless))
        while power.api._workers.counts[1] == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while power.api._workers.counts != (0, 0):
            await asyncio.sleep(0.001)

    asyncio.run(cancelled())
    assert asked_at_once(power, QUESTIONS[:1], GenerateConfig(max_tokens=4))[0].usage.output_tokens == 4


def test_what_cannot_be_done_is_refused(power):
    for config in (GenerateConfig(temperature=0.5), GenerateConfig(top_logprobs=2), GenerateConfig(max_tokens=33)):
        with pytest.raises(UserError, match="; allowed: "):
            asked_at_once(power, QUESTIONS[:1], config)
    image = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,aGk=")])
    with pytest.raises(UserError, match="input: given 'content of the type image'"):
        asyncio.run(power.generate([image]))
    for wrong in ({"condition": "pss"}, {"sampler.alpha": -1}, {"dataset.limit": 2},
                  {"config": GenerateConfig(top_logprobs=1)}):
        with pytest.raises(PrerequisiteError):
            get_model(f"dflash/{TINY}", memoize=False, **wrong)


def test_a_run_opens_as_a_log(tmp_path, monkeypatch, capsys):
    from dflash_mcmc.export import main

    monkeypatch.chdir(tmp_path)
    run = dm.run("condition=temp", "sampler.temperature=1.5", "dataset.limit=6", "num_chains=2", "tracker=none",
                 "dataset.max_new_tokens=24")
    records = {(record["problem"], record["chain"]): record for record in dm.read(run).to_dict("records")}
    for form in ("eval", "json"):
        with pytest.raises(SystemExit) as ended:
            main([str(run.folder), "--to", "inspect", "--format", form])
        assert ended.value.code == 0
        (path,) = (tmp_path / "logs").glob(f"*.{form}")
        log = read_eval_log(str(path))
        assert (log.status, log.eval.task, log.eval.model) == ("success", "arith", "dflash/tiny")
        assert log.results.scores[0].metrics["accuracy"].value == pytest.approx(run.summary["accuracy"])
        assert {(sample.id, sample.epoch - 1) for sample in log.samples} == set(records)
        for sample in log.samples:
            record = records[sample.id, sample.epoch - 1]
            assert sample.output.completion == record["text"]
            assert sample.scores["math"].value == {"correct": "C", "wrong": "I"}.get(record["verdict"], "N")
            assert sample.metadata["log_p"] == pytest.approx(record["log_p"])
            assert (sample.target, sample.messages[-1].text) == (record["gold"], record["text"])
        assert log.stats.model_usage["dflash/tiny"].output_tokens == sum(record["num_tokens"] for record in records.values())
    assert sorted(path.suffix for path in (tmp_path / "logs").iterdir()) == [".eval", ".json"]


def test_the_commands_of_the_page_run(tmp_path):
    commands = page_commands(tmp_path, "python", pages.NEEDS_INSPECT)
    assert len(commands) == 5
    for command in commands:
        done = shell(command, tmp_path)
        assert done.returncode == 0, (command, done.stderr[-2000:], done.stdout[-2000:])
    assert json.loads((tmp_path / "shown/logs/listing.json").read_text())
    logs = [read_eval_log(str(path)) for path in (tmp_path / "logs").glob("*.eval")]
    assert max(log.results.scores[0].metrics["accuracy"].value for log in logs) > 0.5
