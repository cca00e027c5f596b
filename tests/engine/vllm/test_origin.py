"""What is raised at vLLM's start and in its steps: its refusals are one line, and faults of this package stay tracebacks."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from dflash_mcmc.engine.vllm import core
from dflash_mcmc.errors import UserError

OURS, LIBRARY, VLLM = "dflash_mcmc.engine.vllm.drawing", "torch.nn.functional", "vllm.model_executor.models.some"


def module(name: str, source: str, **names) -> ModuleType:
    """A module with this source, whose frames have its name."""
    made = ModuleType(name)
    vars(made).update(names)
    exec(compile(source, name, "exec"), vars(made))
    return made


def chain(error: Exception, *modules: str) -> Callable[..., None]:
    """A function of the first module that calls one of the second, and so on; the last one raises the error."""
    call: Callable[..., None] | None = None
    for name in reversed(modules):
        source = "def call(*_):\n    raise error" if call is None else "def call(*_):\n    inner()"
        call = module(name, source, error=error, inner=call).call
    assert call is not None
    return call


@pytest.fixture
def start(monkeypatch):
    """Starts the engine with a vLLM whose start is a function."""
    def begin(call: Callable[..., None], parameters: str = "**values") -> None:
        source = f"class EngineArgs:\n    def __init__(self, {parameters}):\n        pass"
        engine = module("vllm.v1.engine.llm_engine", "class LLMEngine:\n    from_engine_args = staticmethod(call)", call=call)
        parts = {"vllm": ModuleType("vllm"), "vllm.engine": ModuleType("vllm.engine"), "vllm.v1": ModuleType("vllm.v1"),
                 "vllm.engine.arg_utils": module("vllm.engine.arg_utils", source), engine.__name__: engine,
                 "vllm.v1.engine": ModuleType("vllm.v1.engine")}
        for name, part in parts.items():
            monkeypatch.setitem(sys.modules, name, part)
        core.VllmCore(core.arguments("folder", "float32", 100, 4, ()))

    monkeypatch.setattr(core, "prepare_environment", lambda: None)
    return begin


@pytest.mark.parametrize(("error", "modules"), [
    (ValueError("two\nlines"), (VLLM,)), (KeyError("layers.3.weight"), (VLLM,)), (RuntimeError("sizes"), (VLLM, LIBRARY)),
    (Exception("WorkerProc initialization failed"), (VLLM,)), (AssertionError("heads"), (VLLM, OURS, VLLM))])
def test_a_refusal_of_vllm_is_one_line(start, error, modules):
    with pytest.raises(UserError, match="engine: vLLM refuses 'folder': ") as raised:
        start(chain(error, *modules))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("error", "modules"), [
    (ValueError("ours"), (VLLM, OURS)), (RuntimeError("sizes"), (VLLM, OURS, LIBRARY)), (KeyError("ids"), (VLLM, OURS)),
    (AttributeError("of vLLM, which is no refusal"), (VLLM,)), (ZeroDivisionError(), (VLLM, LIBRARY))])
def test_a_fault_stays_what_it_is(start, error, modules):
    with pytest.raises(type(error)) as raised:
        start(chain(error, *modules))
    assert raised.value is error


def test_an_argument_that_vllm_has_not_is_our_fault(start):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        start(chain(ValueError("not reached"), VLLM), "model")


@pytest.mark.parametrize(("modules", "kind"), [((VLLM, OURS), ZeroDivisionError), ((VLLM, LIBRARY), UserError)])
def test_a_fault_in_a_step_ends_the_engine_too(monkeypatch, modules, kind):
    """A fault of the processor stays one. Anything else in a step, whatever its type, is one line."""
    made, closed = core.VllmCore.__new__(core.VllmCore), list[bool]()
    made._has_failed = False
    made._engine = SimpleNamespace(step=chain(ZeroDivisionError("by nothing"), *modules),
                                   engine_core=SimpleNamespace(shutdown=lambda: closed.append(True)))
    monkeypatch.setattr(core, "_shared", [made])
    with pytest.raises(kind):
        made.step()
    assert closed == [True]
    assert not core._shared
