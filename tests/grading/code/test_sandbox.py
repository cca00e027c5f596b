"""The sandbox: what programs in it can do, detection of the walls that work, and the error if it cannot be set up."""

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dflash_mcmc.grading.code.inside import launch
from dflash_mcmc.grading.code.sandbox import WALLS, CannotRun, Limits, Sandbox, find_sandbox, working_walls
from tests.conftest import ROOT

LIMITS = Limits(seconds=20, memory_gib=0.5)


@pytest.fixture(scope="module")
def found() -> tuple[Sandbox, tuple[str, ...]]:
    return find_sandbox()


@pytest.fixture
def run(found):
    return lambda program, entry_point="f", limits=LIMITS, tests="": found[0].run(program, entry_point, limits, tests)


def needs(found, *walls: str) -> None:
    missing = set(walls) - set(found[1])
    if missing:
        pytest.skip(f"this machine does not allow the walls {missing}")


def test_as_root_with_namespaces_all_walls_work(found):
    if os.geteuid() != 0:
        pytest.skip("not root")
    needs(found, "network")
    assert found[1] == WALLS


def test_only_a_program_that_runs_to_its_end_passes(run):
    assert run("x = 1").passed
    assert run("print('passed')").passed
    for program, word in (
            ("import sys; sys.exit(0)", "raised"), ("raise SystemExit", "raised"), ("import os; os._exit(0)", "exited"),
            ("assert False", "failed_test"), ("1/0", "raised"), ("def f(:", "syntax_error"), ("f()", "missing_definition"),
            ("x = '\x00'", "syntax_error"), ("x = '\ud800'", "syntax_error"), ("(" * 3000, "syntax_error"),
            ("def f(): f()\nf()", "raised"), ("raise KeyboardInterrupt", "raised"), ("input()", "raised"),
            ("import ctypes; ctypes.string_at(0)", "killed")):
        ended = run(program)
        assert not ended.passed, program
        assert ended.word == word, (program, ended)


FAILING = "def f(x):\n    return 0\n{}\nassert f(1) == 2"


@pytest.mark.parametrize("patch", [
    "import __main__\n__main__.end = __main__.kind = lambda *given: 'raised'",
    "import os\nwrite = os.write\nos._exit = lambda code: None\n"
    "os.write = lambda place, word: 0 if word[:1] == b'!' else write(place, word)",
], ids=["__main__", "os"])
def test_a_program_cannot_pass_by_replacing_functions_of_the_runner(run, patch):
    assert not run(FAILING.format(patch)).passed


CHEATS = {
    "equal to everything": "class All:\n    __eq__ = lambda *given: True\nadd = lambda *given: All()",
    "a number equal to everything": "class All(int):\n    __eq__ = lambda *given: True\nadd = lambda *given: All(0)",
    "a class that is loaded": "import collections\nclass Counter(dict):\n    __eq__ = lambda *given: True\n"
                              "Counter.__module__ = 'collections'\ncollections.Counter = Counter\n"
                              "add = lambda *given: Counter()",
    "code in a pickle": "class Code:\n    def __reduce__(self):\n        return eval, ('exec(\"import os\")',)\n"
                        "import __main__\n__main__._Sender.reducer_override = lambda *given: NotImplemented\n"
                        "add = lambda *given: Code()",
    "a builtin": "import builtins\nbuiltins.abs = abs = lambda x: 0\nadd = lambda *given: 0",
    "a module": "import math\nmath.isclose = lambda *given: True\nadd = lambda *given: 0",
    "a class for a module": "class math:\n    isclose = lambda *given: True\nadd = lambda *given: 0",
    "a name of the tests": "check = lambda *given: None\nadd = lambda *given: 0",
    "an end": "import os\nadd = lambda *given: os._exit(0)",
    "the nonce in a frame": "import os, sys\nframe = sys._getframe()\nwhile frame:\n"
                            "    for value in frame.f_locals.values():\n        for place in range(3, 20):\n"
                            "            try:\n                os.write(place, str(value).encode())\n"
                            "            except OSError:\n                pass\n    frame = frame.f_back\nos._exit(0)",
    "an answer of its own": "import os, pickle\nfor place in range(3, 20):\n    try:\n        os.write(place, pickle.dumps("
                            "('done', ['add'], None)) + pickle.dumps(('done', None, None)) * 9)\n    except OSError:\n"
                            "        pass\nadd = lambda *given: 0",
}
"""Programs whose `add` is wrong and that try to pass nevertheless."""
TESTS = ("import math\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert abs(candidate(2, 2) - 4) < 1e-6\n"
         "    assert math.isclose(candidate(1.5, 2), 3.5)\ncheck(add)")


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_cheats_does_not_pass(run, cheat):
    assert not run(CHEATS[cheat], "add", LIMITS, TESTS).passed
    if "add = " in CHEATS[cheat]:  # each assertion by itself
        for assertion in ("add(1, 2) == 3", "abs(add(2, 2) - 4) < 1e-6", "math.isclose(add(1.5, 2), 3.5)",
                          "{3: add(1, 2)} == {3: 3}"):
            assert not run(CHEATS[cheat], "add", LIMITS, f"import math\nassert {assertion}").passed, assertion
    assert run("add = lambda one, other: one + other", "add", LIMITS, TESTS).passed


@pytest.mark.slow
def test_values_of_tests_and_programs_are_those_of_one_process(run):
    """Plain data is copied; functions, classes, instances and iterators are used where they are."""
    program = ("from collections import Counter, namedtuple\nfrom enum import IntEnum\n"
               "class Node:\n    def __init__(self, value):\n        self.value, self.left = value, None\n"
               "class Kind(IntEnum):\n    ONE = 1\nPoint = namedtuple('Point', 'x y')\n"
               "def depth(node):\n    return 0 if node is None else 1 + depth(node.left)\ndef same(x):\n    return x\n"
               "def counted(n):\n    yield from range(n)\ndef twice(f, x):\n    return f(f(x))\ndef fails():\n    {}['x']")
    for test in ("root = Node(1)\nroot.left = Node(2)\nassert depth(root) == 2 and root.left.value == 2\n"
                 "assert same(root) == root",
                 "assert list(counted(3)) == [0, 1, 2] and set(counted(2)) == {0, 1}",
                 "assert twice(lambda x: x + 1, 1) == 3", "assert Point(1, 2) == (1, 2) and Kind.ONE == 1",
                 "for x in (None, ..., 1.5, 2j, 'x', b'x', (1, [2]), {1: {2}}, frozenset([1]), 10 ** 50, '\\ud800', True):\n"
                 "    assert x is ... or (same(x) == x and type(same(x)) is type(x))",
                 "from collections import Counter, deque\nassert same(Counter('aab')) == Counter('aab')\n"
                 "assert same(deque([1])) == deque([1])",
                 "from datetime import date\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
                 "for x in (date(2020, 1, 2), Decimal('1.10'), Fraction(1, 3), range(3)):\n    assert same(x) == x",
                 "try:\n    fails()\nexcept KeyError:\n    pass\nelse:\n    assert False"):
        assert run(program, "same", LIMITS, test).passed, test
    assert run(program, "f", LIMITS, "fails()")[1:] == ("raised", "KeyError")
    assert run(program, "f", LIMITS, "f()")[1:] == ("missing_definition", "NameError")
    assert run(program, "f", LIMITS, "assert same(1) == 2")[1:] == ("failed_test", "AssertionError")


SEARCH = """
import os, re
found = []
for process in ("self", os.getppid()):
    try:
        with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
            for line in maps:
                first, last = (int(place, 16) for place in line.split()[0].split("-"))
                try:
                    memory.seek(first)
                    found.append(re.search(b"zq81[s]ecret", memory.read(min(last - first, 1 << 24))) is not None)
                except (OSError, OverflowError, ValueError):
                    pass
    except OSError:
        found.append("closed")
def look():
    return found.count(True), found.count("closed"), len(found) > 5
"""


def test_expected_outputs_are_not_in_the_memory_of_the_program(found):
    """Without the wall `files`, where a program can read its own memory."""
    needs(found, "processes")
    weak = Sandbox("/usr/bin/python3", "/usr", ("user", "limits", "network", "processes"))
    try:
        ended = weak.run(SEARCH, "look", LIMITS, "secret = 'zq81secret'\nassert look() == (0, 1, True), look()")
    except CannotRun:
        pytest.skip("the system has no interpreter")
    assert ended.passed, ended


def test_the_main_block_of_a_program_is_not_run(run):
    assert run("def f(x):\n    return x + 1\nif __name__ == '__main__':\n    raise SystemExit\nassert f(1) == 2").passed
    assert run("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
               "assert A(1) == A(1)").passed


def test_the_number_of_processes_is_limited(run):
    ended = run("import os, time\nfor number in range(9):\n    if os.fork() == 0:\n        time.sleep(30)")
    assert (ended.word, ended.detail) == ("raised", "BlockingIOError")


def test_the_time_limit_ends_a_program_that_ignores_signals(run):
    stubborn = ("import signal\nfor number in range(1, 65):\n    try:\n        signal.signal(number, signal.SIG_IGN)\n"
                "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass")
    started = time.perf_counter()
    assert run(stubborn, limits=Limits(1, 0.5)).word == "timeout"
    assert time.perf_counter() - started < 5


def test_memory_is_limited(run):
    ended = run("x = bytearray(2 << 30)")
    assert (ended.word, ended.detail) == ("raised", "MemoryError")


CALL = "import ctypes\nassert ctypes.CDLL(None).{} < 0"
REFUSED = ("shmget(0, 4096, 0o1600)", "semget(0, 1, 0o1600)", "msgget(0, 0o1600)")
NAMESPACES = ("unshare(0x10000000)", "unshare(0x50000000)", "syscall(435, ctypes.create_string_buffer(88), 88)")


CLOSED = {"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "ptrace": (101, 117), "bpf": (321, 280),
          "process_vm_readv": (310, 270), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
          "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "pidfd_getfd": (438, 438),
          "memfd_secret": (447, 447), "setns": (308, 268), "mount": (165, 40),
          "personality": (135, 92), "io_setup": (206, 0), "inotify_init1": (294, 26), "kcmp": (312, 272)}
"""Numbers on x86_64 and aarch64 of some system calls that no program needs."""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="seccomp is set up for other processors")
def test_other_system_calls_and_families_of_sockets_are_closed(run):
    place = ("x86_64", "aarch64").index(os.uname().machine)
    call = ("import ctypes, errno\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
            "assert library.syscall({}, 0, 0, 0, 0, 0) < 0\n"
            "assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS), ctypes.get_errno()")
    for name, numbers in CLOSED.items():
        assert run(call.format(numbers[place])).passed, name
    for family in (16, 17, 21, 29, 31, 38, 40, 44):  # netlink, packet, rds, can, bluetooth, alg, vsock, xdp
        assert run(f"import socket\nsocket.socket({family}, 3)").detail == "PermissionError", family
    assert run("import socket\none, other = socket.socketpair()\none.send(b'x')\nassert other.recv(1) == b'x'").passed


def test_numbers_of_system_calls_are_those_of_the_kernel():
    headers = [Path(f"/usr/include/{name}") for name in ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")]
    if not all(header.exists() for header in headers):
        pytest.skip("the headers of the kernel are not installed")
    number = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", re.MULTILINE)
    defined = [dict(number.findall(header.read_text())) for header in headers]
    defined[1]["newfstatat"] = defined[1]["fstatat"]
    table = ", ".join([launch._ALLOWED, launch._ALLOWED_WITH, launch._CLONE, launch._LEAVING])
    for name, *numbers in (row.split()[:3] for row in table.split(",")):
        assert numbers == [numbered.get(name, "-") for numbered in defined], name


KEYS = """
import ctypes
library = ctypes.CDLL(None)
assert library.syscall({keyctl}, 10, -3, b"user", {name!r}, 0) < 0  # search the session keyring
"""


def test_the_session_keyring_of_the_grader_is_out_of_reach(found, run, monkeypatch, tmp_path):
    """Closed by the list of calls, and a keyring of its own where that does not work."""
    add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
    name = f"key_{os.getpid()}".encode()
    if ctypes.CDLL(None).syscall(add, b"user", name, b"secret", 6, -3) < 0:
        pytest.skip("this kernel has no keys")
    program = KEYS.format(keyctl=keyctl, name=name)
    subprocess.run([sys.executable, "-c", program.replace(" < 0 ", " > 0 ")], check=True)
    assert run(program).passed
    without_filter(monkeypatch, tmp_path)
    assert run(program).passed


def without_filter(monkeypatch, folder) -> None:
    """Makes sandboxes without seccomp, as on a kernel that lacks it."""
    inside = ROOT / "dflash_mcmc/grading/code/inside"
    source = (inside / "launch.py").read_text()
    assert source.count("    _allow_calls(own_namespaces)\n") == 1
    (folder / "launch.py").write_text(source.replace("    _allow_calls(own_namespaces)\n", ""))
    shutil.copy(inside / "runner.py", folder)
    monkeypatch.setattr("dflash_mcmc.grading.code.sandbox._INSIDE", folder)


def test_shared_memory_is_refused(found, run):
    needs(found, "limits")
    for call in REFUSED:
        assert run(f"import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\nassert library.{call} < 0\n"
                   "assert ctypes.get_errno() == 1").passed, call  # EPERM


def test_no_user_namespace_can_be_created(found, run):
    needs(found, "user")
    for call in NAMESPACES:
        assert run(CALL.format(call)).passed, call
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    assert run(f"import ctypes, os\nchild = ctypes.CDLL(None).syscall({clone}, 0x10000011, 0, 0, 0, 0)\n"
               "if child == 0:\n    os._exit(0)\nassert child < 0").passed


def test_threads_and_child_processes_are_allowed(run):
    assert run("import os, threading\ndone = []\nthread = threading.Thread(target=done.append, args=(1,))\nthread.start()\n"
               "thread.join()\nassert done == [1]\nchild = os.fork()\nif child == 0:\n    os._exit(3)\n"
               "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3").passed


def test_without_seccomp_two_walls_are_reported_as_missing(found, monkeypatch, tmp_path):
    """The walls `user` and `limits` must not be reported."""
    needs(found, "user", "limits")
    without_filter(monkeypatch, tmp_path)
    assert set(working_walls(found[0])) == set(found[1]) - {"user", "limits"}


def test_there_is_no_network(found, run):
    needs(found, "network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        assert run(program).detail == "OSError"
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_files_outside_the_sandbox_cannot_be_read_or_written(found, run, tmp_path):
    needs(found, "files")
    (tmp_path / "secret").write_text("token")
    tmp_path.chmod(0o777)
    for path in (tmp_path / "secret", "/etc/passwd", "/proc/self/environ", f"{os.path.expanduser('~')}/.netrc"):
        assert run(f"open({str(path)!r})").word == "raised", path
    for path in (tmp_path / "new", "/usr/new", "/var/tmp/new", "/dev/shm/new"):
        assert run(f"open({str(path)!r}, 'w')").word == "raised", path
    assert list(tmp_path.iterdir()) == [tmp_path / "secret"]
    assert run("open('own', 'w').write('x'); assert open('own').read() == 'x'").passed
    assert not run("for n in range(100):\n    open(f'f{n}', 'wb').write(b'x' * (1 << 19))").passed  # too large


def test_other_processes_are_invisible_and_own_ones_end_with_the_program(found, run, tmp_path):
    needs(found, "processes")
    assert run(f"import os\nos.kill({os.getpid()}, 0)").detail == "ProcessLookupError"
    assert run("import os\nassert os.getpid() != 1").passed
    assert not run("import os\nwhile True:\n    os.fork()", limits=Limits(1, 0.5)).passed
    stays = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\n"
    name = f"own_{os.getpid()}"  # unique, because other tests may run programs at the same time
    assert run(stays, name).passed
    assert not [place for place in os.listdir("/proc") if place.isdigit() and name.encode() in _command(place)]


def test_a_signal_to_the_programs_group_reaches_nothing_outside_its_namespace(found, run):
    """A group or session of outside would have the number 0. The first process has the same user where that is not root."""
    needs(found, "processes")
    assert run("import os\nassert os.getpgrp() == os.getsid(0) == 1").passed
    assert run("import os\nos.killpg(0, 9)").word == "killed"


ESCAPES = {
    "setsid": "c.prctl(1, 0, 0, 0, 0)\ntry_to(os.setsid)",
    "setpgid": "c.prctl(1, 0, 0, 0, 0)\ntry_to(lambda: os.setpgid(0, 0))",
    "double fork": "for _ in range(2):\n    if os.fork():\n        os._exit(0)\n"
                   "    try_to(os.setsid)\n    c.prctl(1, 0, 0, 0, 0)",
    "fork bomb": "while True:\n    try:\n        os.fork()\n        try_to(os.setsid)\n    except OSError:\n        pass",
    "comet": "while True:\n    try:\n        if os.fork():\n            os._exit(0)\n        try_to(os.setsid)\n"
             "    except OSError:\n        pass",
    "signals": "try_to(lambda: os.kill(0, 19))\ntry_to(lambda: os.kill(os.getppid(), 19))\ntry_to(lambda: os.kill(1, 9))",
    "tracing": "c.ptrace(16, os.getppid(), 0, 0)\nc.prctl(1, 0, 0, 0, 0)\ntry_to(os.setsid)",
}
"""Programs that try to outlive their time limit."""
_TRYING = ("import ctypes, os, time\nc = ctypes.CDLL(None)\ndef try_to(do):\n    try:\n        do()\n    except OSError:\n"
           "        pass\n{}\nwhile True:\n    time.sleep(1)\n")
_LEFT = """
import json, os, sys
from sandbox import Limits, Sandbox
walls, name, programs = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
left = {}
for number, (escape, program) in enumerate(programs.items()):
    mark = f"{name}_{number}_"
    ended = Sandbox("/usr/bin/python3", "/usr", tuple(walls)).run(program, mark, Limits(1, 0.5))
    commands = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            commands.append(open(f"/proc/{process}/cmdline", "rb").read())
        except OSError:
            pass
    left[escape] = sum(mark.encode() in command for command in commands)
    assert ended.word in ("timeout", "exited", "killed"), ended
print(json.dumps(left))
"""
"""Prints how many processes are left when each escape has run."""


@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the system has no interpreter")
@pytest.mark.parametrize(("walls", "user"), [
    pytest.param(("user", "limits", "network", "processes"), None, id="namespaces-own user"),
    pytest.param(("user", "limits"), 65534, id="no namespaces-ordinary user", marks=pytest.mark.slow),
    pytest.param(("user", "limits", "network", "processes"), 65534, id="namespaces-ordinary user", marks=pytest.mark.slow),
    pytest.param(("user", "limits"), None, id="no namespaces-own user", marks=pytest.mark.slow)])
def test_no_process_outlives_a_program_that_tries_to_escape(found, walls, user):
    needs(found, *walls)
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as folder:  # that the other user can read
        os.chmod(folder, 0o755)
        shutil.copy(ROOT / "dflash_mcmc/grading/code/sandbox.py", folder)
        shutil.copytree(ROOT / "dflash_mcmc/grading/code/inside", f"{folder}/inside")
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        programs = {name: _TRYING.format(code) for name, code in ESCAPES.items()}
        command = ["/usr/bin/python3", "-c", _LEFT, json.dumps(walls), f"escape_{os.getpid()}_{len(walls)}_{user}",
                   json.dumps(programs)]
        done = subprocess.run(command, user=user, extra_groups=None if user is None else [], cwd="/", check=False,
                              capture_output=True, text=True, env={"PYTHONPATH": folder})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(ESCAPES, 0)


def _command(process: str) -> bytes:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_a_program_is_not_root_and_cannot_become_root(found, run):
    needs(found, "user")
    assert run("import os\nassert os.getuid() != 0 and set(os.environ) <= {'LC_CTYPE'}").passed  # Python itself sets LC_CTYPE
    assert run("import os\nos.setuid(0)").detail == "PermissionError"


def test_all_walls_work_where_the_grader_is_process_1(found):
    """As in a container, whose first process starts the run."""
    needs(found, "processes")
    if os.geteuid() != 0:
        pytest.skip("only root can create a namespace of processes")
    code = "import os\nfrom dflash_mcmc.grading.code.sandbox import find_sandbox\nprint(os.getpid(), *find_sandbox()[1])"
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code], cwd=ROOT, check=False,
                          capture_output=True, text=True)
    assert done.stdout.split() == ["1", *found[1]], done.stderr


def test_a_user_without_root_gets_the_same_walls(found):
    needs(found, "files")
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = "from dflash_mcmc.grading.code.sandbox import find_sandbox; print(*find_sandbox()[1])"
    done = subprocess.run(["/usr/bin/python3", "-c", code], user=65534, group=65534, extra_groups=[], cwd="/", check=False,
                          capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("this checkout cannot be read by others")
    assert tuple(done.stdout.split()) == WALLS, done.stderr


def test_a_program_cannot_fake_a_message_of_the_launcher(run):
    """Such a message says that the sandbox does not work, and would stop the whole run."""
    spray = "import os\nfor place in range(3, 64):\n    try:\n        os.write(place, b'!launcher: no memory')\n"
    assert run(spray + "    except OSError:\n        pass\nos._exit(125)").word in ("exited", "raised")
    assert run("import os; os._exit(200)").detail == "code 200"


def test_walls_that_do_not_work_are_not_reported(found):
    """Without namespaces, the walls network, processes and files do not work, and the test programs must find that."""
    weak = Sandbox("/usr/bin/python3", "/usr", ("user", "limits"))
    try:
        walls = working_walls(weak)
    except CannotRun:
        pytest.skip("the system has no interpreter")
    assert "limits" in walls
    assert not {"network", "processes", "files"} & set(walls)


def test_a_missing_interpreter_is_an_error(found):
    with pytest.raises(CannotRun, match="No such file"):
        found[0]._replace(python="/no/such/python").run("x = 1", "f", LIMITS)
