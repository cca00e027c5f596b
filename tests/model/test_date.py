"""Chat templates that ask for the time: one prompt on any day, by `model.date`, part of the identity for them alone."""

from __future__ import annotations

import shutil

import pytest
from transformers import AutoTokenizer

from dflash_mcmc.api.choices import LoadedModel
from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.config.schema import PACKAGE
from dflash_mcmc.dataset.inputs.conversations import Conversation
from tests.refusals import refused

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
