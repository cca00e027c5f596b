"""What a harness asks of a model, in this package's terms, and the scores of given answers. lm_eval is not needed."""

from __future__ import annotations

import pytest

import dflash_mcmc
from dflash_mcmc import harness
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.harness.lm_eval.requests import request, without_cache

TINY = str(PACKAGE / "assets/tiny")


def chosen(given: dict) -> harness.ModelArguments:
    return harness.chosen(given, ("pretrained",), "model_args")


def test_model_args_are_fields_of_a_run():
    config, has_sampler = chosen({"pretrained": TINY, "condition": "ps", "sampler.alpha": 2, "seed": 5,
                                  "model.dtype": "float32"})
    assert (config.model.path, config.model.dtype, config.sampler.alpha, config.seed) == (TINY, "float32", 2.0, 5)
    assert has_sampler
    assert not chosen({"pretrained": TINY, "blend": "layer"}).has_sampler


@pytest.mark.parametrize(("given", "message"), [
    ({"sampelr.alpha": 2}, "model_args: given 'sampelr.alpha'"),
    ({"dataset.limit": 2}, "model_args: given 'dataset.limit'"),
    ({"dtype": "float32"}, r"model_args: given 'dtype' \(did you mean model.dtype\?\); allowed: "),
    ({"device": "cpu"}, r"\(did you mean hardware.device\?\)"),
    ({"condition": "ps", "sampler.alpha": -1}, "sampler.alpha"),
])
def test_other_model_args_are_one_line(given, message):
    with pytest.raises(UserError, match=message):
        chosen(given)


def test_a_task_says_how_answers_are_drawn_without_a_sampler():
    plain = chosen({"pretrained": TINY})
    how = request(plain, {"until": ["\n\n", ""], "do_sample": False, "temperature": 0.7, "max_gen_toks": 9})
    assert (type(how.sampler).__name__, how.max_new_tokens, how.stop) == ("Greedy", 9, ["\n\n"])
    how = request(plain, {"until": "Q:", "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (how.sampler.temperature, how.sampler.top_p, how.max_new_tokens, how.stop) == (0.7, 0.9, 256, ["Q:"])
    assert request(plain, {"max_gen_toks": "9"}).max_new_tokens == 9
    for wrong, name in (({"do_sample": True}, "temperature"), ({"num_beams": 4}, "num_beams"), ({"until": [3]}, "until"),
                        ({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature"),
                        ({"temperature": "warm"}, "temperature"), ({"max_gen_toks": 0}, "max_gen_toks"),
                        ({"do_sample": False, "repetition_penalty": 1.2}, "repetition_penalty")):
        with pytest.raises(UserError, match=rf"generation_kwargs\.{name}: given"):
            request(plain, wrong)


def test_a_sampler_of_model_args_draws_whatever_a_task_says():
    given = chosen({"pretrained": TINY, "sampler": "power_mh", "sampler.alpha": 3})
    assert request(given, {"do_sample": True, "temperature": 1.0}).sampler.alpha == 3.0


def test_scores_are_the_log_p_of_samples():
    with dflash_mcmc.Engine(TINY) as engine:
        tokenizer = dflash_mcmc.component("model", "tiny").tokenizer()
        prompts = [tokenizer.encode(text) for text in ("What is 7*6?", "Ann has 39 apples. Ann buys 2 more.")]
        drawn = engine.sample(prompts, sampler="greedy", max_new_tokens=24, progress=False)
        scored = engine.score(prompts, [sample.tokens for sample in drawn], progress=False)
        for sample, score in zip(drawn, scored, strict=True):
            assert sum(score.log_p) == pytest.approx(sample.log_p, abs=1e-4)
            assert score.is_greedy
        other = [[*drawn[0].tokens[:3], drawn[0].tokens[3] + 1]]
        assert not engine.score(prompts[:1], other, progress=False)[0].is_greedy
        with pytest.raises(UserError, match="1024 tokens together"):
            engine.score([[5] * 1000], [[6] * 25], progress=False)
        for wrong in ([], [5, [6]], [0.5]):
            with pytest.raises(UserError, match="answers: given"):
                engine.score([[5]], [wrong], progress=False)


@pytest.mark.parametrize(("given", "kept"), [
    (["--model", "dflash_mcmc", "--use_cache", "f.db", "--tasks", "x"], ["--model", "dflash_mcmc", "--tasks", "x"]),
    (["--model=dflash_mcmc", "--use_cache=f.db"], ["--model=dflash_mcmc"]),
    (["--model", "hf", "--use_cache", "f.db"], ["--model", "hf", "--use_cache", "f.db"])])
def test_the_cache_of_lm_eval_is_off_with_a_line(given, kept, capsys):
    note.cache_clear()
    assert without_cache(given) == kept
    assert ("--use_cache f.db has no effect" in capsys.readouterr().err) == (given != kept)
