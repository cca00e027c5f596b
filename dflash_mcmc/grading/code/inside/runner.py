"""Runs a program and its tests in the interpreter of the sandbox and reports to the grader how they ended.

The command is `python -I -S -B -c SOURCE DESCRIPTOR ENTRY_POINT`, where SOURCE is this file. On stdin is a pickle of a nonce,
the program and its tests. If both run to their end, the nonce is written to DESCRIPTOR. Otherwise a `!`, the kind of failure
and the name of the exception are written.

There are two processes. The program's process is forked first, before stdin is read. The other one then reads stdin, sends the
program, executes the tests, and calls the functions of the program by messages. The program therefore finds neither the nonce
nor an expected output in its memory, and its results are copies of plain data, which equal only what they are.
"""

import builtins
import io
import os
import sys
from _pickle import Pickler, Unpickler  # `pickle` and `signal` take longer to import than Python takes to start
from _signal import SIG_DFL, SIGCHLD, signal  # type: ignore[import-not-found]

_DATA = {
    "builtins": ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice",
                 "str", "tuple"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"), "decimal": ("Decimal",), "fractions": ("Fraction",)}
"""Classes, by module, whose values are copied to the other process. It gets a `Remote` for every other value."""
_PLAIN: tuple = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_DUMPABLE = 4
_held: dict = {}
"""Values by number that the other process may name."""
_operations: dict = {}
"""What the other process may ask for."""
_pipes: list = []
"""The pipes to read and to write."""
_reserve = [bytearray(1 << 22)]
"""Freed for the report if the program has used up the memory."""


class Remote:
    """A value of the other process: a function, or a class of the program or an instance of it."""

    def __init__(self, number):
        self.__dict__["_number"] = number

    def __call__(self, *values, **named):
        return _ask("call", self, values, named)

    def __getattr__(self, name):
        return _ask("get", self, name)

    def __setattr__(self, name, value):
        _ask("set", self, name, value)

    def __eq__(self, other):  # no data equals it, whatever its class says
        return _ask("equal", self, other) if isinstance(other, Remote) else NotImplemented

    def __iter__(self):
        return _ask("get", self, "__iter__")()

    def __next__(self):
        return _ask("get", self, "__next__")()

    def __len__(self):
        try:
            return _ask("get", self, "__len__")()
        except AttributeError:
            raise TypeError("it has no len()") from None  # as `list` expects of an iterator

    def __getitem__(self, place):
        return _ask("get", self, "__getitem__")(place)


def _returned(number):
    """The value that the other process knows by this number."""
    return _held[number]


class _Sender(Pickler):
    def reducer_override(self, value):
        kind = value if isinstance(value, type) else type(value)
        if value is Remote or value is _returned or kind.__name__ in _DATA.get(kind.__module__, ()):
            return NotImplemented
        if kind is Remote:
            return _returned, (value._number,)
        for base in _PLAIN:  # an instance of a subclass is sent as what it contains
            if isinstance(value, base):
                return base, (str.__str__(value) if base is str else base(value),)
        _held[id(value)] = value
        return Remote, (id(value),)


class _Receiver(Unpickler):
    def find_class(self, module, name):
        if module == "__main__" and name in ("Remote", "_returned"):
            return globals()[name]
        if name in _DATA.get(module, ()):
            return getattr(__import__(module), name)
        raise TypeError(name)


def _send(*message):
    buffer = io.BytesIO()
    _Sender(buffer, -1).dump(message)
    _pipes[1].write(buffer.getbuffer())
    _pipes[1].flush()


def _ask(operation, *values):
    """The result of an operation in the other process. Raises an exception of the name that it raised there."""
    _send("do", operation, values)
    while True:
        message, first, second = _Receiver(_pipes[0]).load()
        if message == "done":
            return first
        if message != "do":
            raise _named(str(first), str(second))
        _answer(first, second)


def _answer(operation, values):
    process, message = os.getpid(), "done"
    try:
        first, second = _operations[operation](*values), None
    except BaseException as error:
        _reserve.clear()
        message, first, second = "failed", getattr(error, "word", None) or kind(error, ""), type(error).__name__[:60]
    if os.getpid() != process:  # a child of the program has come to the program's end
        os._exit(0)
    try:
        _send(message, first, second)
    except BaseException as error:  # a result that cannot be copied
        _send("failed", "raised", type(error).__name__[:60])


def _named(word, name):
    """An exception with this name, whose kind of failure is `word`."""
    found = getattr(builtins, name, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        found = type(name, (Exception,), {})
    error = found.__new__(found)  # type: ignore[call-overload]
    error.word = word
    return error


def _load(program, entry_point):
    """Executes the program and returns the names that it defines."""
    names: dict = {}
    try:
        code = compile(program, "program", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise _named("syntax_error", type(error).__name__) from None
    try:
        exec(code, names)  # as in HumanEval, `__name__` is not "__main__", so that a main block is not run
    except BaseException as error:
        raise _named(kind(error, entry_point), type(error).__name__[:60]) from None
    _operations["value"] = names.__getitem__
    return [name for name in names if name != "__builtins__"]


def _report(program, tests, entry_point):
    """Runs the program and its tests. Returns the kind of failure and the name of the exception, or None if all tests pass.

    Other names of the program that the tests use, such as a class, are the program's, but not those of Python and its library.
    """
    try:
        names = [name for name in _ask("load", program, entry_point) if name in tests]
        space = {name: _ask("value", name) for name in names if name == entry_point or name not in vars(builtins)}
        space |= {name: __import__(name) for name, value in space.items()
                  if isinstance(value, Remote) and name != entry_point and name in sys.stdlib_module_names}
        code = compile(tests, "tests", "exec")
        exec(code, space)
    except BaseException as error:
        if isinstance(error, EOFError | BrokenPipeError) and not hasattr(error, "word"):
            signal(SIGCHLD, SIG_DFL)
            _end_as_the_program()
        return (getattr(error, "word", None) or kind(error, entry_point)) + " " + type(error).__name__[:60]
    return None


def _end_as_the_program(*received):
    process, status = os.waitpid(-1, os.WNOHANG if received else 0)
    if process:
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def run(descriptor, entry_point):
    """Runs the program with its tests and exits the process."""
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    requests, answers = os.pipe(), os.pipe()
    signal(SIGCHLD, _end_as_the_program)
    if os.fork() == 0:
        signal(SIGCHLD, SIG_DFL)
        os.dup2(silence, 0)
        for place in (descriptor, requests[1], answers[0]):
            os.close(place)
        _pipes.extend((os.fdopen(requests[0], "rb"), os.fdopen(answers[1], "wb")))
        _operations.update(load=_load, call=lambda function, values, named: function(*values, **named), get=getattr,
                           set=setattr, equal=lambda one, other: bool(one == other))
        while True:
            _answer(*_Receiver(_pipes[0]).load()[1:])
    for place in (requests[0], answers[1]):
        os.close(place)
    _pipes.extend((os.fdopen(answers[0], "rb"), os.fdopen(requests[1], "wb")))
    _operations["call"] = lambda function, values, named: function(*values, **named)
    if os.path.exists("/proc/self/mem"):
        import ctypes

        ctypes.CDLL(None).prctl(_DUMPABLE, 0, 0, 0, 0)  # the program cannot open this process's memory
    nonce, program, tests = Unpickler(sys.stdin.buffer).load()
    failure = _report(program, tests, entry_point)
    os.write(descriptor, nonce.encode() if failure is None else ("!" + failure).encode("utf-8", "replace"))
    os._exit(0 if failure is None else 1)


def kind(error, entry_point):
    """`failed_test` for an AssertionError, `missing_definition` if the tests do not find the function, otherwise `raised`."""
    if isinstance(error, AssertionError):
        return "failed_test"
    outermost = error.__traceback__.tb_next
    if isinstance(error, NameError) and error.name == entry_point and (outermost is None or outermost.tb_next is None):
        return "missing_definition"
    return "raised"


run(int(sys.argv[1]), sys.argv[2])
