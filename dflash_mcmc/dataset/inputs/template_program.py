"""Renders one chat template under limits of memory and time, in a process of its own (`template_limits.py`).

stdin has a JSON object: `path` (of Python), `megabytes`, `seconds`, `template` and `values`, the variables of the template.
The exit code is TOO_LARGE if the memory does not suffice. A signal of the kernel ends the process if the time does not. An
error of the template is none here: the caller renders the template again and reports it.

The environment is that of `transformers.utils.chat_template_utils`. That module is not imported, because this takes a second.
"""

import json
import resource
import sys
from datetime import datetime

TOO_LARGE = 3


def main() -> None:
    """Reads the object, sets the limits and renders."""
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (as jinja2 types it)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

        def _rendered(self, caller):
            return caller()

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    if sys.platform == "linux":  # macOS refuses limits of the address space
        _limit(resource.RLIMIT_AS, request["megabytes"] << 20)
    _limit(resource.RLIMIT_CPU, request["seconds"])
    try:
        environment.from_string(request["template"]).render(**request["values"])
    except MemoryError:
        sys.exit(TOO_LARGE)
    except Exception:
        return


def _limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
