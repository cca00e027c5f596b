"""`potential=reward`: the score of a checkpoint for sequence classification."""

import json
from shutil import copytree

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.types import Problem
from tests import runs
from tests.refusals import refused

QUESTION, ANSWERS = Problem("one", "What is 2+3?", "5"), ("The answer is 5.", "7", "")


@pytest.fixture
def reward(tmp_path):
    """Writes a checkpoint with random weights and this number of outputs: reward(2)."""
    def write(outputs: int, template: str | None = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"):
        folder = tmp_path / f"reward{outputs}{template is None}"
        tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "assets/tiny")
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        with torch.random.fork_rng():
            torch.manual_seed(outputs)
            Qwen3ForSequenceClassification(Qwen3Config(
                vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, head_dim=8, num_labels=outputs, initializer_range=0.5)).save_pretrained(folder)
        return folder
    return write


def scores(config) -> list[float]:
    evaluator = config.potential.start(config)
    found = [evaluator.submit(QUESTION, answer).result() for answer in ANSWERS]
    evaluator.close()
    assert not any(one.failed for one in found)
    return [one.value for one in found]


@pytest.mark.parametrize("template", [True, False])
def test_r_is_the_score_of_the_conversation(make_config, reward, template):
    folder = reward(1) if template else reward(1, None)
    model, tokenizer = Qwen3ForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    expected = []
    for answer in ANSWERS:
        texts = [f"user: {QUESTION.question}\nassistant: {answer}\n"] if template else [QUESTION.question, answer]
        ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
        expected.append(float(model(torch.tensor([ids])).logits[0, 0].detach()))
    found = scores(make_config("condition=ps", "potential=reward", f"potential.path={folder}"))
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({*found}) == 3


def test_r_is_the_probability_of_a_label(make_config, reward):
    config = ("condition=ps", "potential=reward", f"potential.path={reward(3)}")
    three = [scores(make_config(*config, f"potential.label=LABEL_{place}")) for place in range(3)]
    assert [sum(of) for of in zip(*three, strict=True)] == pytest.approx([1.0, 1.0, 1.0])
    with refused(start="potential.label: given None; allowed: one of 'LABEL_0', 'LABEL_1', 'LABEL_2'"):
        make_config(*config)


def test_a_text_that_is_too_long_is_a_counted_failure(make_config, reward):
    config = make_config("condition=ps", "potential=reward", f"potential.path={reward(1)}", "potential.max_tokens=8",
                         "potential.on_failure=-2.5")
    evaluator = config.potential.start(config)
    found = evaluator.submit(QUESTION, "The answer is 5.").result()
    evaluator.close()
    assert (found.value, found.failed) == (-2.5, True)


@pytest.mark.slow
def test_a_run_is_tilted_towards_the_reward(make_config, reward):
    """Of four draws the one with the highest score stays; the content of the checkpoint is part of the identity."""
    folder = reward(1)
    few = ("experiment=demo", "sampler=best_of_n", "sampler.num_candidates=4", "sampler.temperature=1.0", "dataset.limit=4",
           "dataset.max_new_tokens=24")
    config = make_config(*few, "potential=reward", f"potential.path={folder}", "potential.beta=1000.0")
    summary = runs.execute(config).summary
    found = [runs.execute(make_config(*few, "potential=reward", f"potential.path={folder}", f"potential.beta={beta}")).summary
             ["measures/potential"] for beta in (-1000.0, 1000.0)]
    assert found[0] < found[1] == summary["measures/potential"]
    other = copytree(folder, folder.parent / "other")
    assert identity_hash(make_config(*few, "potential=reward", f"potential.path={other}", "potential.beta=1000.0")) == (
        identity_hash(config))
    told = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**told, "rms_norm_eps": 1e-3}))
    assert identity_hash(make_config(*few, "potential=reward", f"potential.path={other}", "potential.beta=1000.0")) != (
        identity_hash(config))


def test_what_cannot_score_is_one_line(make_config):
    with refused("potential.path: not given"):
        make_config("condition=ps", "potential=reward")
    with refused(start="potential.path: given '/nowhere'; allowed: a folder that exists, or a hub name such as Skywork"):
        make_config("condition=ps", "potential=reward", "potential.path=/nowhere")
    with refused(start="potential.stop_at_max: given True; allowed: false with potential=reward, whose largest value"):
        make_config("condition=ps", "potential=reward", f"potential.path={PACKAGE / 'assets/tiny'}", "potential.label=LABEL_0",
                    "potential.stop_at_max=true")
    config = make_config("condition=ps", "potential=reward", f"potential.path={PACKAGE / 'assets/tiny'}",
                         "potential.label=LABEL_0")
    with refused(start=f"potential.path: given {str(PACKAGE / 'assets/tiny')!r}, which lacks score.weight; allowed: a "):
        config.potential.start(config)
