"""Chat templates that fail are errors of one line before anything is loaded."""

import shutil

import pytest

from dflash_mcmc.config.schema import PACKAGE, Job
from dflash_mcmc.runner import plan
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
        plan.check([Job(make_config(f"model.path={checkpoint}", "sampler=greedy", "dataset.limit=1"))])
    assert not list(tmp_path.glob("default/*"))
