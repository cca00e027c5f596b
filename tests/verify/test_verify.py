"""Audits of what engines drew: run folders with and without faults, files of texts, a server, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash_mcmc as dm
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.engine.api import endpoint
from dflash_mcmc.engine.api.endpoint import Endpoint
from dflash_mcmc.errors import UserError
from dflash_mcmc.forcing import sequences
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.process.http import NoReplyError
from dflash_mcmc.store.files import to_line
from dflash_mcmc.verify import __main__ as program, drawn, report, verify
from dflash_mcmc.verify.audit import audit
from dflash_mcmc.verify.behaviour import Finding
from dflash_mcmc.verify.report import verdict
from tests import runs

PROMPTS = [np.array(ids) for ids in ([5, 17, 200, 31], [40, 41, 42], [300, 12, 9, 77, 5])]


class Drawn(NamedTuple):
    """Prompts and answers, token ids."""

    prompts: list[np.ndarray]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def tiny():
    return dm.component("model", "tiny")


def drawn_by(sampler: Any, num_chains: int = 16) -> Drawn:
    """What the embedded model draws: up to 48 tokens for each chain of three prompts."""
    found = dm.sample(dm.component("model", "tiny"), None, PROMPTS, sampler=sampler, num_chains=num_chains, max_new_tokens=48,
                      progress=False)
    return Drawn([PROMPTS[one.prompt] for one in found], [one.tokens for one in found])


@pytest.fixture(scope="module")
def warm() -> Drawn:
    return drawn_by(dm.Temperature(temperature=0.7), 6)


def lines(drawn: Drawn) -> str:
    return "".join(json.dumps({"prompt_ids": prompt.tolist(), "ids": answer}) + "\n"
                   for prompt, answer in zip(*drawn, strict=True))


def told(arguments: list[str], capsys) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    with pytest.raises(SystemExit) as end:
        program.main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def connected(monkeypatch, choices: Callable[[dict], list], name: str = "model", kind: str = "vllm") -> Endpoint:
    """A server that answers a request with these choices."""
    monkeypatch.setattr(endpoint, "fetch_json", lambda url, body=None, **_: (
        {"data": [{"id": name, "owned_by": kind}]} if body is None else {"choices": choices(body)}))
    return drawn.connected("http://server/v1")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind"), [
    (None, None), ("greedy_bonus", "most likely token"), ("greedy_first", "first token")])
def test_a_faulty_decoder_is_red_and_its_fault_is_named(fault, kind, make_config, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    overrides = ["experiment=faults", "draft=tiny", "dataset.limit=12", "num_chains=2", "dataset.max_new_tokens=24"]
    result = runs.execute(make_config(*overrides, f"decoder.fault={fault or 'null'}"))
    code, out, _ = told([str(result.folder)], capsys)
    found = json.loads((tmp_path / "verify" / result.folder.name / "verify.json").read_text())
    assert found["red"] == (fault is not None) == (code == 1)
    assert found["log_p_error"][0] < 1e-5
    best = max(found["bets"], key=lambda bet: bet["evidence"])
    if fault is None:
        assert out.startswith("GREEN: no evidence")
        assert found["together"]["largest"] < 3.0
    else:
        assert best["group"] == kind
        assert out.startswith("RED after")
        assert best["says"] in out.splitlines()[0]
    page = (tmp_path / "verify" / result.folder.name / "report.html").read_text()
    assert found["verdict"].split(":")[0] in page
    assert "<svg" in page


@pytest.mark.slow
def test_crafted_cases_are_models_and_prompts_for_any_engine(tmp_path, capsys):
    folder = tmp_path / "cases"
    assert told(["cases", str(folder)], capsys)[0] == 0
    models = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "assistant", "close")]
    assert [len(model.model.layers) for model in models] == [8, 4, 7]
    target = models[0]
    for name, model in zip(("target", "assistant", "close"), models, strict=True):
        _is_in_gguf(folder / f"{name}.gguf", model)
    asked = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.jsonl")}
    usual = {"prompt", "prompt_ids", "n", "max_tokens", "temperature", "top_p"}
    assert {name: set(case) - usual for name, case in asked.items()} == {
        "plain": set(), "cut": set(), "long": set(), "block": set(), "penalty": {"frequency_penalty"}}
    assert _late_penalty(asked["penalty"], target, models[2]) > 0.2
    assert _block_residual(asked["block"], target, models[2]) > 0.03
    case = asked["plain"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = target.generate(torch.tensor([case["prompt_ids"]]), do_sample=True, temperature=case["temperature"], top_k=0,
                                top_p=case["top_p"], max_new_tokens=case["max_tokens"], num_return_sequences=64)
    drawn = drawn[:, len(case["prompt_ids"]):].tolist()
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({**case, "ids": ids}) + "\n" for ids in drawn))
    common = [str(tmp_path / "texts.jsonl"), f"model={folder / 'target'}", f"paths.outputs={tmp_path}"]
    code, out, _ = told([*common, f"sampler.temperature={case['temperature']}"], capsys)
    assert code == 0
    assert "64 texts" in out
    (folder / "plain.jsonl").write_text("of the user")
    code, _, err = told(["cases", str(folder)], capsys)
    assert code == 2
    assert "allowed: an empty folder, or a new one" in err
    assert (folder / "plain.jsonl").read_text() == "of the user"
    assert told(["cases"], capsys)[2].startswith("error: cases: given 'nothing'; allowed: one folder to write to")


@pytest.mark.slow
def test_defaults_of_a_checkpoint_are_named_where_the_stated_law_lacks_them(tmp_path, capsys):
    """transformers draws with the top-k of generation_config.json, whatever a request leaves out."""
    checkpoint = shutil.copytree(PACKAGE / "assets" / "tiny", tmp_path / "checkpoint")
    path = checkpoint / "generation_config.json"
    of_qwen = {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, "min_p": 0.0, **of_qwen}))
    (tmp_path / "texts.jsonl").write_text(lines(drawn_by(dm.Temperature(temperature=1.0, **of_qwen))))
    stated = [f"sampler.{name}={value}" for name, value in of_qwen.items()]
    command = [str(tmp_path / "texts.jsonl"), "model=hf", f"model.path={checkpoint}", f"paths.outputs={tmp_path}"]
    code, out, _ = told(command, capsys)
    assert code == 1
    assert f"{path} sets other values than the stated law" in out
    assert f"If the texts were drawn so, state {' '.join(stated)}." in out
    code, out, _ = told([*command, *stated], capsys)
    assert (code, "generation_config" in out, "fault of speculation" in out) == (0, False, False)
    (tmp_path / "texts.jsonl").write_text(lines(drawn_by(dm.Temperature(temperature=1.0, top_k=3))))
    code, out, _ = told([*command, "sampler.top_k=3", "sampler.temperature=0.5"], capsys)
    assert (code, "a fault of speculation fits this as well" in out) == (1, True)


def _is_in_gguf(file, model):
    """All weights, and what llama.cpp reads beside them: it has run these files (docs/findings/engines.md)."""
    import gguf

    read = gguf.GGUFReader(file)
    stated = {name.removeprefix("qwen3."): field.contents() for name, field in read.fields.items()}
    wanted = {"block_count": len(model.model.layers), "rope.freq_base": 10_000.0, "attention.key_length": 32,
              "attention.head_count": 4, "attention.head_count_kv": 2, "tokenizer.ggml.eos_token_id": 470}
    assert {name: stated[name] for name in wanted} == wanted
    assert len(stated["tokenizer.ggml.tokens"]) == model.config.vocab_size
    weights = {**model.state_dict()}
    weights.pop("lm_head.weight", None)  # it is that of the embedding
    last = len(model.model.layers) - 1
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    assert len(tensors) == len(weights)
    for theirs, ours in ((f"blk.{last}.ffn_down.weight", f"model.layers.{last}.mlp.down_proj.weight"),
                         ("token_embd.weight", "model.embed_tokens.weight")):
        assert np.array_equal(tensors[theirs], weights[ours].numpy())


def _laws(case, model, first):
    """The laws of the first token, (vocabulary,), and of the second one after each of some first tokens, without penalties."""
    with torch.no_grad():
        logits = model(torch.tensor([[*case["prompt_ids"], token] for token in first])).logits[:, -2:].double()
    laws = torch.softmax(logits / case["temperature"], dim=-1)
    return laws[0, 0], laws[:, 1]


def _late_penalty(case, target, draft):
    """By how much the second token repeats the first too often, where a draft's first is kept and its penalty forgotten."""
    (one, two), (draft_one, _) = (_laws(case, model, range(16, 17)) for model in (target, draft))
    repeats, allowed = two[0, 16], two[0, 16] * np.exp(-case["frequency_penalty"])
    return float(min(one[16], draft_one[16]) * (repeats - allowed / (1.0 - repeats + allowed)))


def _block_residual(case, target, draft):
    """Total variation of two tokens between (p - q)+ and (w p - q)+ after a kept one. The block ends there with the mass of
    the second: it keeps x with probability w = min(1, p / q) on average."""
    first = range(target.config.vocab_size)
    (one, two), (draft_one, draft_two) = (_laws(case, model, first) for model in (target, draft))
    right = ((one / draft_one).clamp(max=1.0)[:, None] * two - draft_two).clamp(min=0.0)
    wrong, mass = (two - draft_two).clamp(min=0.0), right.sum(dim=1)
    apart = (wrong / wrong.sum(dim=1, keepdim=True).clamp(min=1e-30) - right / mass[:, None].clamp(min=1e-30)).abs().sum(dim=1)
    return float((draft_one * mass * apart).sum() / 2.0)


def test_the_temperature_is_1_also_with_the_sampler_named():
    laws = [program._stated([*given, "model=tiny"]).sampler.law().temperature for given in (
        ["sampler=temperature", "sampler.top_p=0.9"], ["sampler.alpha=2"],
        ["sampler=temperature", "sampler.temperature=0.3"], ["sampler=greedy"])]
    assert laws == [1.0, 0.5, 0.3, 0.0]


def test_texts_of_the_stated_law_are_green_and_another_temperature_is_named(warm, tiny, tmp_path, capsys):
    file = tmp_path / "texts.jsonl"
    file.write_text(lines(warm))
    common = [str(file), "model=tiny", f"paths.outputs={tmp_path}"]
    code, out, _ = told([*common, "sampler.temperature=0.7"], capsys)
    assert code == 0
    assert out.startswith("GREEN")
    assert f"{sum(map(len, warm.answers)):,} tokens of" in out
    code, out, _ = told(common, capsys)
    assert code == 1
    assert out.startswith("RED after")
    assert "temperature 0.8 instead of 1" in out
    found = verify(tiny, *warm)
    assert found.is_red
    assert found.tokens == sum(map(len, warm.answers))
    clean = found._replace(outside=(), near_ties=0, together=found.together._replace(red_at=None))
    for level, threshold in ((1e-3, "10^3"), (0.05, "10^1.3")):
        assert f", red at {threshold}); " in verdict(clean._replace(level=level))


@pytest.mark.slow
def test_greedy_states_the_most_likely_token(warm, tmp_path, capsys):
    file = tmp_path / "texts.jsonl"
    file.write_text(lines(drawn_by("greedy", 1)))
    common = [str(file), "model=tiny", f"paths.outputs={tmp_path}"]
    assert told([*common, "sampler=greedy"], capsys)[1].startswith("GREEN: every token is the most likely one")
    file.write_text(lines(warm))
    code, out, _ = told([*common, "sampler=greedy"], capsys)
    assert code == 1
    assert "that the stated law cannot draw" in out


@pytest.mark.slow
def test_tokens_outside_of_the_support_are_red_at_once_and_near_ties_are_not(warm, tiny):
    cut = verify(tiny, *warm, temperature=0.7, top_p=0.5)
    assert cut.is_red
    assert len(cut.outside) > cut.near_ties
    assert verify(tiny, *warm, temperature=0.0).is_red
    clean = verify(tiny, *drawn_by("greedy", 1), temperature=0.0)
    assert not clean.is_red
    assert not clean.outside
    assert "llama.cpp" not in verdict(cut)
    assert "before the temperature, as in llama.cpp" in verdict(cut._replace(kept_otherwise=True))
    padded = verify(tiny, PROMPTS[:1], [np.array([5, 511, 17])])  # a row of the head that has no token
    assert padded.outside == (("answer 0", 1, np.inf),)
    assert "the farthest is no token of the law (answer 0, token 1)" in verdict(padded)
    near = cut._replace(outside=cut.outside[:2], near_ties=2, log_p_error=None, together=clean.together)
    assert not near.is_red
    for outcome, first in (("wrong", "RED besides the law: log p. The law: "), ("differs", "")):
        found = report.of_findings([Finding("log p", outcome, "off by 0.14 nats a token")])
        assert report.text(near, [found]).startswith(first + verdict(near))


@pytest.mark.slow
def test_near_ties_are_wider_in_bfloat16(tiny):
    """A token 0.15 to 0.4 nats below the most likely one: red in float32 alone."""
    coarse = dm.component("model", "tiny", dtype="bfloat16")
    prompts, answers = drawn_by(dm.Temperature(temperature=1.6))
    found = verify(tiny, prompts, answers, temperature=0.0)
    name, place = next((int(name.split()[1]), place) for name, place, distance in found.outside if 0.15 < distance < 0.4)
    one = [np.concatenate([prompts[name], answers[name][:place]])], [answers[name][place : place + 1]]
    assert (found.near, verify(tiny, *one, temperature=0.0).is_red) == (0.1, True)
    given = verify(coarse, *one, temperature=0.0)
    assert (given.near, given.near_ties, given.is_red) == (0.5, 1, False)
    assert verify(coarse, prompts, answers, temperature=0.0).is_red
    assert verify(coarse, *one, temperature=2.0).near == 0.25


@pytest.mark.parametrize(("dtype", "slack"), [("float32", 1e-3), ("bfloat16", 0.02)])
@pytest.mark.parametrize("field", ["top_p", "min_p"])
def test_the_token_just_behind_a_truncation_is_a_near_tie(field, dtype, slack, tiny):
    """The mass before it exceeds top-p by less than rounding; it lies as little below min-p. It is far from the kept ones."""
    model = dm.component("model", "tiny", dtype=dtype)
    loaded = model.load("cpu")
    with torch.no_grad():
        hidden = sequences.read(loaded, torch.from_numpy(PROMPTS[0])[None]).hidden[0, -1:]
    p, order = torch.softmax(loaded.logits(hidden)[0].double(), dim=-1).sort(descending=True)
    place = next(place for place in range(1, 40) if p[place - 1] > 2.0 * p[place])
    edge = float(p[:place].sum()) if field == "top_p" else float(p[place] / p[0])
    inside, outside = (-0.7 * slack, -1.5 * slack) if field == "top_p" else (0.01 * edge, 2.0 * edge)
    for shift, red in ((inside, False), (outside, True)):
        found = verify(model, PROMPTS[:1], [[int(order[place])]], **{field: edge + shift})
        assert (len(found.outside), found.near_ties, found.is_red) == (1, 1 - red, red)


def test_the_device_is_that_of_the_hardware(warm, tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(dm.Local, "resolve", lambda hardware: asked.append(hardware.device) or "cpu")
    few = Drawn(warm.prompts[:2], warm.answers[:2])
    given = verify(tiny, *few, temperature=0.7, hardware=dm.Local(device="cuda"))
    assert asked == ["cuda"]
    assert given.together == verify(tiny, *few, temperature=0.7).together
    assert asked == ["cuda"]


@pytest.mark.parametrize(("temperature", "more", "group", "says"), [
    (1.6, {"top_p": 0.8}, "truncation", "top_p=0.8, which is not stated"),
    (1.0, {"frequency_penalty": 1.5}, "repetition", "")])
@pytest.mark.slow
def test_what_is_not_stated_is_named(temperature, more, group, says, tiny):
    given = drawn_by(dm.Temperature(temperature=temperature, **more))
    assert not verify(tiny, *given, temperature=temperature, **more).is_red
    found = verify(tiny, *given, temperature=temperature)
    assert found.is_red
    best = found.bets[found.best]
    assert (best.group, best.says) == (group, says or best.says)


def test_penalties_are_a_part_of_a_law_at_temperature_0(tiny):
    """The most likely token after a penalty is drawn: another one than without it."""
    model, answer = tiny.load("cpu"), []
    for _ in range(16):
        with torch.no_grad():
            logits = model.logits(sequences.read(model, torch.tensor([[*PROMPTS[0], *answer]])).hidden[0, -1:])[0]
        logits[answer] -= logits.new_tensor([5.0 * answer.count(token) for token in answer])
        answer.append(int(logits.argmax()))
    assert not verify(tiny, PROMPTS[:1], [answer], temperature=0.0, frequency_penalty=5.0).outside
    assert verify(tiny, PROMPTS[:1], [answer], temperature=0.0).is_red


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "says"), [
    (["condition=blend_ps", "sampler.num_blocks=2", "dataset.limit=2"], ""),
    (["sampler=temperature", "sampler.temperature=1.5", "dataset.limit=3", "num_chains=4", "dataset.must_end=true"],
     "(dataset.must_end)")], ids=["chains", "drawn until one ends"])
def test_a_run_without_a_law_of_a_token_has_its_log_p_checked(overrides, says, make_config, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runs.execute(make_config(*overrides, "dataset.max_new_tokens=12", "model=tiny", "dataset=arith"))
    code, out, _ = told([str(result.folder)], capsys)
    assert code == 0
    assert out.startswith("GREEN: the stated log p is right")
    assert says in out.splitlines()[0]
    if not says:
        wrong = [one._replace(log_p=one.log_p - 1.0) for one in _texts(result.folder)]
        assert audit(dm.component("model", "tiny").load("cpu"), wrong, None, 1e-3, dm.component("blend", "layer")).is_red


def test_a_run_that_is_not_complete_is_read_up_to_its_first_missing_text(make_config, capsys, monkeypatch, tmp_path):
    """Which of the later ones are there depends on how long they are, and the order of the file on when they end. One that
    could not be drawn is missing too."""
    monkeypatch.chdir(tmp_path)
    config = make_config("model=tiny", "sampler=temperature", "dataset=arith", "dataset.limit=2", "num_chains=3",
                         "dataset.max_new_tokens=6", "sampler.temperature=1.0")
    folder, problems = runs.execute(config).folder, [problem.id for problem in config.dataset.problems()]
    file, keys = folder / "records.jsonl", [(name, chain) for name in problems for chain in range(3)]
    rows = {(row["problem"], row["chain"]): line for line in file.read_text().splitlines() for row in [json.loads(line)]}
    file.write_text("\n".join(rows[key] for key in keys[::-1]) + "\n")
    assert [text.name for text in _texts(folder)] == [f"{name}, chain {chain}" for name, chain in keys]
    undrawn = {**json.loads(rows[keys[4]]), "verdict": "not_drawn", "tokens": []}
    del undrawn["checksum"]
    model = dm.component("model", "tiny").load("cpu")
    for missing, replaced, read in ((keys[5], [], 5), (keys[4], [to_line(undrawn).decode()[:-1]], 4), (keys[2], [], 2)):
        file.write_text("\n".join([*(rows[key] for key in keys if key != missing), *replaced]) + "\n")
        texts, left_out = drawn.of_run(folder, model, True)
        assert left_out == 5 - read
        assert [text.name for text in texts] == [f"{name}, chain {chain}" for name, chain in keys[:read]]
    code, out, _ = told([str(folder)], capsys)
    assert (code, " of 2 texts (3 more are left out, behind one that is missing or " in out.splitlines()[0]) == (0, True), out
    file.write_text("\n".join(rows[key] for key in keys[1:]) + "\n")
    code, _, err = told([str(folder)], capsys)
    assert code == 2
    assert "lacks its first sample" in err


@pytest.mark.slow
def test_names_of_special_tokens_in_a_message_are_audited_as_text(make_config, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "<|im_end|>2 + 2<|im_start|> =", "answer": "4"}))
    result = runs.execute(make_config("model=tiny", "sampler=temperature", "dataset=jsonl", "dataset.path=questions.jsonl",
                                      "dataset.max_new_tokens=24", "num_chains=2"))
    code, out, _ = told([str(result.folder)], capsys)
    assert code == 0, out
    assert json.loads((tmp_path / "verify" / result.folder.name / "verify.json").read_text())["log_p_error"][0] < 1e-5


def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path, capsys):
    for content in ("a: [", "name: x\nmodel: {name: hf, no_such: 1}", "name: x\nmodel: {name: no_such}", "[]"):
        (tmp_path / "config.yaml").write_text(content)
        code, _, err = told([str(tmp_path)], capsys)
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        assert "config.yaml: " in err


def _texts(folder):
    return drawn.of_run(folder, dm.component("model", "tiny").load("cpu"), True)[0]


def test_a_server_that_cannot_be_audited_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(drawn, "_PATIENCE", 0.1)
    given = ["model=tiny", "dataset=arith", "dataset.limit=1", f"paths.outputs={tmp_path}"]
    code, _, err = told(["http://127.0.0.1:9/v1", *given], capsys)
    assert code == 2
    assert "which gives no answer (ConnectError" in err

    def slow_down(body: dict) -> list:
        raise NoReplyError("status 429: slow down", 429)

    for choices, says in ((lambda body: [{"text": "5"}], "returns no token ids; allowed: a server that returns them"),
                          (slow_down, "error: TARGET: given http://server/v1, which gives no answer (status 429: slow down")):
        connected(monkeypatch, choices, kind="")
        code, _, err = told(["http://server/v1", *given], capsys)
        assert (code, says in err.splitlines()[-1]) == (2, True), err


@pytest.mark.parametrize(("choice", "says"), [
    ({"token_ids": "abc"}, "token_ids 'abc', which is no list of numbers"), ({"token_ids": [1.5]}, "no list of numbers"),
    ({"token_ids": 7}, "token_ids '7', which is no list of numbers"),
    ({"token_ids": [1], "text": 5}, "text '5', which is no text"),
    ({"token_ids": [1], "logprobs": {"token_logprobs": "x"}}, "token_logprobs 'x', which is no list of numbers"),
    ({"token_ids": [1], "logprobs": {"token_logprobs": ["x"]}}, "no list of numbers"), (7, "its answer has no choice"),
    ({"token_ids": [1], "logprobs": "none"}, "its answer has no choice"),
    ({"token_ids": None, "logprobs": {"token_logprobs": None}}, "returns no token ids")])
def test_a_strange_answer_of_a_server_is_one_line(choice, says, monkeypatch):
    with pytest.raises(UserError, match=re.escape(says)) as error:
        drawn.completed(connected(monkeypatch, lambda body: [choice]), {})
    assert len(str(error.value).splitlines()) == 1


def test_ids_that_a_server_lists_with_its_logprobs_are_read(monkeypatch):
    """llama.cpp does, and returns none without `logprobs`."""
    content = [{"id": 7, "token": "a", "logprob": -0.5}, {"id": 9, "token": "b", "logprob": -1.5}]
    server = connected(monkeypatch, lambda body: [
        {"text": "ab", "logprobs": {"content": content} if body.get("logprobs") else None}], kind="llamacpp")
    assert drawn.completed(server, drawn.asked_of(server, SamplingParams())) == [
        {"ids": [7, 9], "text": "ab", "logprobs": [-0.5, -1.5]}]
    server = connected(monkeypatch, lambda body: [{"logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-1.0]}}])
    assert drawn.completed(server, {}) == [{"ids": [7], "text": "", "logprobs": [-1.0]}]


def test_each_text_of_a_server_has_a_seed_of_its_own(monkeypatch, tmp_path):
    """With one seed for several prompts, the first tokens of a server such as llama.cpp's depend on one another."""
    asked: list[int] = []
    server = connected(monkeypatch, lambda body: asked.append(body["seed"]) or [{"token_ids": [5]}])
    config, file = program._stated(["model=tiny", "dataset=arith", "dataset.limit=3", "seed=7"]), tmp_path / "drawn.jsonl"
    model = config.model.load("cpu")
    for config.num_chains, config.seed in ((2, 7), (3, 7), (4, 5)):
        drawn.draw(server, config, model, SamplingParams(), file)
    assert sorted(asked[:6]) == [7, 8, 9, 10, 11, 12]
    assert sorted(asked) == [5, 6, *range(7, 17)]


def test_kept_texts_of_other_requests_are_not_audited(monkeypatch, tmp_path, tiny):
    """The prompt, the law, the limit or the server's model is another one in an earlier audit with the same folder."""
    asked = []

    def server(name: str) -> Endpoint:
        return connected(monkeypatch, lambda body: asked.append(body) or [{"token_ids": [5 + body["seed"]]}], name)

    servers = [server("model")]
    given = ["model=tiny", "dataset=arith", "dataset.limit=2"]
    model, file, hot = tiny.load("cpu"), tmp_path / "drawn.jsonl", SamplingParams(temperature=1.5)

    def texts(law: SamplingParams, *more: str) -> list[int]:
        return [int(text.tokens[0]) for text in drawn.draw(servers[-1], program._stated([*given, *more]), model, law, file)]

    assert texts(SamplingParams()) == [5, 6]
    assert texts(SamplingParams(), "dataset.prompt=boxed") == [7, 8]
    assert texts(hot) == [9, 10]
    assert texts(SamplingParams(), "dataset.max_new_tokens=3") == [11, 12]
    servers.append(server("another"))
    assert texts(SamplingParams()) == [13, 14]
    servers.append(server("model"))
    assert [texts(SamplingParams()), texts(SamplingParams(), "dataset.limit=1"), texts(hot)] == [[5, 6], [5], [9, 10]]
    assert len(asked) == 10


@pytest.mark.parametrize(("line", "says"), [
    ("{", "line 2 is not JSON"), ("[]", "line 2 is no JSON object"), ('{"ids": [1]}', "line 2 lacks prompt_ids or prompt"),
    ('{"prompt_ids": [1]}', "line 2 lacks ids; allowed: one JSON object a line with"),
    ('{"prompt_ids": [1], "text": "4"}', "line 2 lacks ids: several sequences of tokens have the same text, and"),
    ('{"prompt_ids": [1], "ids": [99999999]}', "allowed: a list of token ids"),
    ('{"prompt_ids": [1], "ids": [5, 6], "steps": [1, 2]}', "line 2: steps: given [1, 2]; allowed: whole numbers > 0, the "
                                                           "tokens of each step of the engine, whose sum is 2"),
    ('{"prompt_ids": [1], "ids": [true]}', "allowed: a list of token ids"),
    ('{"prompt_ids": [1], "ids": "abc"}', "line 2: ids: given 'abc'; allowed: a list of token ids"),
    ('{"prompt": 5, "ids": [1]}', "line 2: prompt: given 5; allowed: a text of valid Unicode"),
    ('{"prompt": "b\\udfff", "ids": [1]}', "line 2: prompt: given 'b\\udfff'; allowed: a text of valid Unicode"),
    ("[" * 9999, "line 2 is not JSON: it has more than 64 levels of nesting"),
    ('{"prompt_ids": [], "ids": [2]}', "line 2: given 1 tokens after a prompt of 0; allowed: a prompt of at least one token,"),
    (json.dumps({"prompt_ids": [1], "ids": [2] * 50_000}), "line 2: given 50000 tokens after a prompt of 1; allowed: "),
    ('{"prompt_ids": [1], "ids": [2], "temperature": 0.5}', "line 2: temperature is 0.5, and the stated law has 1"),
])
def test_a_wrong_line_is_named(line, says, tmp_path, capsys):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"prompt": "2 + 2 =", "ids": [19]}\n' + line + "\n")
    code, _, err = told([str(file), "model=tiny", f"paths.outputs={tmp_path}"], capsys)
    assert code == 2
    assert says in err
    assert not (tmp_path / "verify").exists()


@pytest.mark.parametrize(("arguments", "says"), [
    (["nowhere"], "TARGET: given 'nowhere', which does not exist"), (["."], "config.yaml: cannot be read: No such file"),
    ([".", "--level", "2"], "--level: given 2"), ([".", "--fast"], "--fast: not an option"),
    ([__file__, "decoder=plain"], "decoder: given with verify; allowed: model, dataset, sampler"),
    ([__file__, "sampler=power_mh"], "temperature or greedy: the law of each token"),
    ([__file__, "dataset.must_end=true"], "dataset.must_end: given True; allowed: false: "),
])
def test_a_wrong_command_is_one_line(arguments, says, capsys):
    code, _, err = told(arguments, capsys)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_law_of_ones_own(tmp_path, capsys):
    """A function that forbids the token that was drawn is red, one that allows it is green, and `outside` says it."""
    file, law = tmp_path / "texts.jsonl", tmp_path / "law.py"
    file.write_text('{"prompt": "2 + 2 =", "ids": [19]}\n')
    law.write_text("def same(logits, text):\n    return logits\n\n"
                   "def never(logits, text):\n    logits[1:] = -float('inf')\n    return logits\n")
    given = [str(file), "model=tiny", f"paths.outputs={tmp_path}"]
    assert told([*given, f"sampler.function={law}:same"], capsys)[0] == 0
    code, out, _ = told([*given, f"sampler.function={law}:never"], capsys)
    assert (code, "RED: 1 of 1 tokens" in out, "no token of the law" in out) == (1, True, True)
    for more, says in (([f"sampler.function={law}:other"], "allowed: FILE:FUNCTION"),
                       (["sampler.function=no:f"], "allowed: FILE:FUNCTION"),
                       ([f"sampler.function={law}:same", "sampler.top_p=0.5"], "it is the whole law")):
        code, _, err = told([*given, *more], capsys)
        assert (code, says in err) == (2, True)


def test_a_field_that_no_law_has_is_refused(tiny):
    for law in ({"top_q": 0.5}, {"top_q": 0.5, "temperature": 0.0}, {"alpha": 2.0}, {"top_p": 2.0, "temperature": 0.0}):
        with pytest.raises(UserError, match=next(iter(law))):
            verify(tiny, [np.array([1])], [np.array([2])], **law)
    assert verify(tiny, [np.array([1])], [np.array([2])], counts_prompt=True, presence_penalty=1.0).law.counts_prompt


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 5, float("nan"), "0.5", None, True])
def test_a_level_that_is_no_probability_is_refused(level, tiny):
    with pytest.raises(UserError, match=r"^level: given .*; allowed: a probability between 0 and 1$"):
        verify(tiny, [np.array([1])], [np.array([2])], level=level)


@pytest.mark.slow
def test_a_loaded_model_in_training_mode_is_audited_without_dropout(warm):
    model = AutoModelForCausalLM.from_pretrained(drawn._TINY, attention_dropout=0.5, attn_implementation="eager")
    tokenizer, few = AutoTokenizer.from_pretrained(drawn._TINY), Drawn(warm.prompts[:4], warm.answers[:4])
    found = [verify(model.train(mode), *few, tokenizer=tokenizer, temperature=0.7) for mode in (False, True)]
    assert found[0].together == found[1].together
    assert model.training
    assert model.base_model.layers[0].training


@pytest.mark.parametrize(("given", "row", "says"), [
    ("sampler=greedy", {"repetition_penalty": 1.3}, "(in Python: dflash_mcmc.verify.verify(..., temperature=0.0, repetition_"),
    ("sampler=greedy", {"temperature": 0.5}, "(sampler=temperature sampler.temperature=0.5)"),
    ("sampler.top_p=0.5", {"temperature": 0.0}, "(sampler=greedy)"),
    ("sampler.top_p=0.5", {"counts_prompt": True}, "(sampler.penalty_counts=prompt+answer)"),
    ("sampler.top_p=0.5", {"top_p": 0.9}, "(sampler.top_p=0.9)")])
def test_a_line_of_another_law_says_what_states_it(given, row, says, tiny):
    with pytest.raises(UserError, match=re.escape(says)):
        drawn._of_row({"prompt_ids": [1], "ids": [2], **row}, "x", tiny, program._stated(["model=tiny", given]).sampler.law())
