"""`model=hf`: checkpoint folders, their identity, stop ids and prompts. Nothing else of generation_config is used."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from dflash_mcmc.api.choices import LoadedModel
from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.dataset.inputs.conversations import Conversation
from dflash_mcmc.errors import UserError
from dflash_mcmc.store.records import read_records
from tests.refusals import refused
from tests.runs import execute
from tests.train.embedded import build_config

pytestmark = pytest.mark.usefixtures("random_weights")
TINY = PACKAGE / "assets" / "tiny"
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the embedded checkpoint, which tests can change."""
    return shutil.copytree(TINY, tmp_path / "checkpoint")


def greedy_texts(config) -> list[str]:
    result = execute(config)
    return [record["text"] for record in read_records(result.folder)]


def test_greedy_texts_are_those_of_transformers(make_config):
    config = make_config("sampler=greedy", "dataset.limit=4", "dataset.max_new_tokens=64")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    parts, expected = config.model.load("cpu"), []
    for problem in config.dataset.problems():
        ids = torch.from_numpy(parts.encode(config.model.prompt(parts.tokenizer, problem.question)))[None]
        drawn = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64, pad_token_id=0)
        expected.append(parts.tokenizer.decode(drawn[0, ids.shape[1]:], skip_special_tokens=True))
    assert sorted(greedy_texts(config)) == sorted(expected)


@pytest.mark.slow
def test_generation_config_has_no_effect_except_for_stop_ids(make_config, checkpoint):
    path = checkpoint / "generation_config.json"
    settings = {**json.loads(path.read_text()), "do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1,
                "repetition_penalty": 5.0, "max_new_tokens": 3}
    options = ("sampler=temperature", "dataset.limit=4")
    before = greedy_texts(make_config(*options))
    path.write_text(json.dumps(settings))
    assert sorted(greedy_texts(make_config(*options, f"model.path={checkpoint}"))) == sorted(before)


@pytest.mark.slow
def test_every_tensor_is_part_of_the_identity_and_the_path_is_not(make_config, checkpoint):
    here, there = (identity_of(make_config(f"model.path={path}"))["model.content"] for path in (TINY, checkpoint))
    config, weights = make_config(f"model.path={checkpoint}").model, checkpoint / "model.safetensors"
    tensors = load_file(weights)
    seen, of_weights = {config.fingerprint()}, {config.weights_fingerprint()}
    assert here == there
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor * 1.5}, weights, metadata={"format": "pt"})
        seen.add(config.fingerprint())
        of_weights.add(config.weights_fingerprint())
        assert identity_of(make_config(f"model.path={checkpoint}"))["model.content"] != here
    assert len(seen) == len(of_weights) == len(tensors) + 1


def test_a_hash_of_weights_alone_knows_neither_files_nor_configuration(make_config, checkpoint):
    config, weights = make_config(f"model.path={checkpoint}").model, checkpoint / "model.safetensors"
    before = config.weights_fingerprint()
    tensors = load_file(weights)
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text() + " ")
    assert config.weights_fingerprint() == before
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, checkpoint / f"model-{number}.safetensors", {"note": "a part"})
    weights.unlink()
    assert config.weights_fingerprint() == before
    last = max(list(tensors)[::2])  # has another name, with the same place in their order
    save_file({name + "s" * (name == last): tensors[name] for name in list(tensors)[::2]}, checkpoint / "model-0.safetensors")
    assert config.weights_fingerprint() != before


def test_a_hub_name_without_network_and_cache_is_an_error(make_config):
    with pytest.raises(UserError, match="hub cannot be reached; allowed: the folder of a downloaded checkpoint"):
        make_config("model=qwen3_4b", "model.path=nobody/nothing-of-this-name").model.load("cpu")


@pytest.mark.parametrize("named", [{}, {"tokenizer_class": "Qwen2Tokenizer"}, {"tokenizer_class": "Qwen2TokenizerFast"},
                                   {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": None}])
def test_the_tokenizer_is_the_one_that_transformers_chooses(make_config, checkpoint, named):
    file = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
    ours, theirs = make_config(f"model.path={checkpoint}").model.tokenizer(), AutoTokenizer.from_pretrained(checkpoint)
    assert type(ours) is type(theirs)
    assert ours("3 + 4 <|im_end|>").input_ids == theirs("3 + 4 <|im_end|>").input_ids
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.slow
def test_a_tokenizer_without_a_chat_template_is_refused(make_config, checkpoint):
    (checkpoint / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"model.chat: .* has no chat template"):
        execute(make_config(f"model.path={checkpoint}", "dataset.limit=1"))
    assert execute(make_config(f"model.path={checkpoint}", "dataset.limit=1", "model.chat=false")).summary["num_samples"] == 1


@pytest.fixture(scope="module")
def real_vocabulary(shared_data, tmp_path_factory):
    return random_qwen3(tmp_path_factory.mktemp("checkpoint") / "random_qwen3", shared_data)


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["greedy", "temp", "ps", "blend_greedy", "blend_ps"])
def test_real_problems_through_the_real_tokenizer(make_config, shared_data, real_vocabulary, condition):
    """A small random Qwen3 in bfloat16 runs MATH-500 prompts with the tokenizer, chat template and stop ids of Qwen3."""
    config = make_config(f"condition={condition}", "dataset=math500", f"dataset.path={shared_data}/math500/test.jsonl",
                         f"model.path={real_vocabulary}", "dataset.max_new_tokens=16", "dataset.limit=3")
    result = execute(config)
    assert result.summary["num_samples"] == 3
    model = config.model.load("cpu")
    assert model.stop_ids == (151643, 151645)
    assert model.dtype == torch.bfloat16
    assert int(model.forbidden.sum()) == 151936 - 151669
    for record in read_records(result.folder):
        assert max(record["tokens"]) < 151669


def test_all_500_prompts_equal_those_of_the_document(make_config, shared_data):
    config = make_config("dataset=math500", f"dataset.path={shared_data}/math500/test.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "qwen3_tokenizer")
    lengths = []
    for problem in config.dataset.problems():
        text = config.model.prompt(tokenizer, config.dataset.prompt.replace("{question}", problem.question))
        assert text.startswith("<|im_start|>user\nCan you solve the following math problem? ")
        assert text.endswith(INSTRUCTION + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert problem.question in text
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert ids[-4:].tolist() == [151667, 271, 151668, 271]
        lengths.append(len(ids))
    assert len(lengths) == 500
    assert max(lengths) < 1024


def random_qwen3(folder, shared_data):
    """Writes a checkpoint folder: a small random Qwen3 with the real vocabulary, tokenizer and generation_config."""
    config = build_config()
    config.update({"vocab_size": 151936, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4,
                   "layer_types": ["full_attention"] * 4, "max_position_embeddings": 4096})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_data / "qwen3_tokenizer" / name, folder)
    shutil.copy(shared_data / "model_configs/Qwen3-4B/generation_config.json", folder)
    return folder


# Chat templates that ask for the time: one prompt on any day, by `model.date`, part of the identity for them alone.

LLAMA = ('{%- if not date_string is defined %}{%- if strftime_now is defined %}'
         '{%- set date_string = strftime_now("%d %b %Y") %}'
         '{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}Today Date: {{ date_string }}')
SMOLLM3 = 'Today Date: {%- set today = strftime_now("%d %B %Y") -%}{{ today }}'
GPT_OSS = 'Current date: {{ strftime_now("%Y-%m-%d") }}'
TIME = 'Now: {{ strftime_now("%A %H:%M:%S") }}'


def folder_with(tmp_path, template):
    folder = tmp_path / "model"
    shutil.copytree(PACKAGE / "assets" / "tiny", folder)
    (folder / "chat_template.jinja").write_text(template + "{% for turn in messages %}{{ turn.content }}{% endfor %}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("template", "told", "other"), [
    (LLAMA, "Today Date: 26 Jul 2024", "Today Date: 29 Nov 2026"),
    (SMOLLM3, "Today Date:26 July 2024", "Today Date:29 November 2026"),
    (GPT_OSS, "Current date: 2024-07-26", "Current date: 2026-11-29"), (TIME, "Now: Friday 00:00:00", "Now: Sunday 00:00:00")],
    ids=["llama3.1", "smollm3", "gpt-oss", "time"])
def test_the_clock_stands_at_the_date(make_config, tmp_path, template, told, other):
    folder = folder_with(tmp_path, template)
    default, dated = (make_config(f"model.path={folder}", *more) for more in ((), ("model.date=2026-11-29",)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for question in ("Hi", "Hi <|im_end|>"):  # a name of a special token makes the text in parts
        conversation = Conversation.of(question)
        assert default.model.render(tokenizer, conversation) == told + question
        assert dated.model.render(tokenizer, conversation) == other + question
        assert LoadedModel(None, True).render(tokenizer, conversation) == told + question
    assert identity_of(default) != identity_of(dated)
    assert identity_of(dated)["model.content"].endswith(" date:2026-11-29")
    plain = ("model.chat=false",)
    assert identity_of(make_config(f"model.path={folder}", *plain)) == identity_of(
        make_config(f"model.path={folder}", "model.date=2026-11-29", *plain))


def test_other_templates_have_no_date(make_config):
    assert identity_of(make_config()) == identity_of(make_config("model.date=2026-11-29"))
    for date in ("today", "26 Jul 2024", "2024-13-01", "''"):
        with refused("model.date: given "):
            make_config(f"model.date='{date}'" if date != "''" else "model.date=''")
