"""Chat templates that fail, loop or fill the memory are errors of one line before anything is loaded."""

from __future__ import annotations

import resource
import shutil

import pytest

import dflash_mcmc as dm
from dflash_mcmc.config.schema import PACKAGE, Job
from dflash_mcmc.dataset.inputs import template_limits
from dflash_mcmc.runner import preflight
from tests.refusals import refused


@pytest.mark.parametrize(("template", "error"), [
    ("{% if %}", "TemplateSyntaxError"), ("{{ raise_exception('no\\nway') }}", "no way"), ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ nothing.at.all }}", "'nothing' is undefined"), ("{{ messages | nothing }}", "No filter named 'nothing'"),
    ("{% include 'nothing' %}", "TypeError"), ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"), ('{{ "\\ud800" }}', "UnicodeEncodeError"),
])
def test_templates_that_fail(make_config, tmp_path, template, error):
    checkpoint = shutil.copytree(PACKAGE / "assets" / "tiny", tmp_path / "checkpoint")
    (checkpoint / "chat_template.jinja").write_text(template)
    with refused(error, "; allowed: ", start="model.chat: the tokenizer's chat template refuses the conversation of user"):
        preflight.check([Job(make_config(f"model.path={checkpoint}", "sampler=greedy", "dataset.limit=1"))])
    assert not list(tmp_path.glob("default/*"))


FOR_EVER = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLING = ("{% set held = namespace(text='x' * 1000) %}{% for a in range(60) %}{% set held.text = held.text + held.text %}"
            "{% endfor %}{{ held.text }}")


@pytest.fixture
def of_template(tmp_path, monkeypatch):
    """The folder of a checkpoint with another template, which has one second if it would run for ever."""
    monkeypatch.setattr(template_limits, "_tried", {})

    def make(template):
        monkeypatch.setattr(template_limits, "SECONDS", 1 if FOR_EVER in template else 60)
        checkpoint = shutil.copytree(PACKAGE / "assets" / "tiny", tmp_path / "checkpoint", dirs_exist_ok=True)
        (checkpoint / "chat_template.jinja").write_text(template)
        return checkpoint

    return make


@pytest.mark.parametrize(("template", "error"), [
    (FOR_EVER, "takes more than 1 seconds of the processor"), (DOUBLING, "takes more than 512 MB"),
    pytest.param("{{ 'x' * 10 ** 10 }}", "takes more than 512 MB", marks=pytest.mark.slow),
    pytest.param("{{ 'x' | center(10 ** 10) }}", "takes more than 512 MB", marks=pytest.mark.slow),
    pytest.param("{% if tools %}" + FOR_EVER + "{% endif %}", "takes more than 1 seconds", marks=pytest.mark.slow),
])
def test_templates_without_an_end_or_a_size(make_config, of_template, template, error):
    config = make_config(f"model.path={of_template(template)}", "sampler=greedy", "dataset.limit=1")
    preflight.check([Job(make_config("sampler=greedy", "dataset.limit=1"))])  # its imports are in the memory before
    peak = _peak()
    tokenizer, tools = config.model.tokenizer(), [{"name": "sum"}] if "tools" in template else None
    for _ in range(2):  # the second time without a trial
        with refused(error, "; allowed: at most ", start="model.chat: given a tokenizer whose chat template "):
            template_limits.check(tokenizer, [{"role": "user", "content": "1 + 1?"}], tools, enable_thinking=False)
    if tools is None:
        with refused(error, "for the conversation of user"):
            preflight.check([Job(config)])
    assert _peak() - peak < 300 << 10


def _peak() -> int:
    """Largest memory of this process so far, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_template_for_ever_from_python(of_template, monkeypatch):
    monkeypatch.setattr(template_limits, "_exceeded", lambda template, values: "takes more than 1 seconds")
    with refused("takes more than 1 seconds for the conversation of user"):
        dm.sample(of_template(FOR_EVER), None, ["1 + 1?"], sampler=dm.Greedy(), max_new_tokens=4)


def test_the_trial_has_the_environment_of_transformers(of_template, make_config, monkeypatch):
    """A template with all extensions, filters and globals is rendered in the trial without an error."""
    template = ("{% generation %}{{ messages | tojson(indent=1) }}{% endgeneration %}{{ strftime_now('%Y') }}"
                "{% for turn in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ bos_token }}"
                "{{ 'x' * 10 ** 10 }}")
    config = make_config(f"model.path={of_template(template)}")
    with refused("takes more than 512 MB"):  # reached only if nothing before it raises
        template_limits.check(config.model.tokenizer(), [{"role": "user", "content": "é"}], None)


def test_each_template_is_tried_once_and_that_of_the_embedded_model_never(make_config, of_template, monkeypatch):
    tried = []
    monkeypatch.setattr(template_limits, "_exceeded", lambda template, values: tried.append(values))
    turns = [{"role": "user", "content": "1 + 1?"}]
    template_limits.check(make_config().model.tokenizer(), turns, None)
    other = make_config(f"model.path={of_template('{{ messages[0].content }}')}").model.tokenizer()
    for _ in range(2):
        template_limits.check(other, turns, None, enable_thinking=False)
    assert [(values["messages"], values["enable_thinking"]) for values in tried] == [(turns, False)]


def test_a_server_with_a_template_for_ever_does_not_start(of_template, monkeypatch):
    from dflash_mcmc.serve import options
    from dflash_mcmc.serve.app import built

    monkeypatch.setattr(template_limits, "_exceeded", lambda template, values: "takes more than 1 seconds")
    plan, config = options.compose([f"model.path={of_template(FOR_EVER)}"])
    with refused("takes more than 1 seconds for the conversation of user"):
        built(plan, config)
