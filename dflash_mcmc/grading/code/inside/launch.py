"""Launcher of the sandbox: sets up the walls around one program and runs it. `python -I -S -B launch.py SETTINGS`

The program is on stdin, for the interpreter in the sandbox. SETTINGS is a JSON object:

- `walls`: the walls to set up (names as in `sandbox.WALLS`);
- `limits`: limits by the names of the `resource` module, without `RLIMIT_`;
- `python`, `base`: the interpreter, and the folder that contains it;
- `runner`, `arguments`: source code that the interpreter executes, and its arguments;
- `scratch_bytes`: size of the writable folder;
- `programs`: how many programs run at the same time;
- `parent`: process id of the grader;
- `verdict`: descriptor to which the result is written;
- `name`: a secret prefix of messages from the launcher itself.

There are three processes. The first one creates the namespaces, which needs privileges, and waits. The second one is process
1 of its namespace and only reaps: when it ends, the kernel ends every process of the namespace, whatever session, group or
parent the process has chosen. The third one becomes the interpreter. SIGTERM ends the second process, and the first one waits
until the namespace is empty. Without namespaces all processes are one group, which seccomp lets none of them leave; SIGTERM
ends the group. If the walls cannot be set up, the launcher writes the reason after `name` to
`verdict`, and the program is not run.
"""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys

NOBODY = 65534
_OWN_USER = 0x70000000 + os.getpid()
"""A user id that no system assigns (https://systemd.io/UIDS-GIDS). It is computed here, from this process's id, because inside
the namespace the process id is always 1."""
CANNOT = 125
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", *_DEVICES)
_SECCOMP, _FILTER, _ERROR, _ALLOW = 22, 2, 0x50000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_X32 = 0x40000000
"""The lowest number of an x32 system call. x32 is a second set of system calls on x86_64."""
_CLONE3 = 435
_CALLS = {"x86_64": (0xC000003E, 56, (29, 64, 68, 272, 308), (109, 112)),
          "aarch64": (0xC00000B7, 220, (194, 190, 186, 97, 268), (154, 157))}
"""Per processor: (audit architecture, number of clone, numbers of (shmget, semget, msgget, unshare, setns), numbers of
(setpgid, setsid))."""
_libc = ctypes.CDLL(None, use_errno=True)


def launch(settings):
    """Runs the program in the sandbox. Exits with its exit code, or with 128 plus the number of the signal that ended it."""
    own_namespaces = "network" in settings["walls"]
    try:
        _end_with(settings["parent"], signal.SIGTERM)
        if own_namespaces:
            _own_namespaces()
            _end_with(settings["parent"], signal.SIGTERM)  # the kernel resets this setting when the user changes
    except OSError as error:
        _report_failure(settings, error)
    reading, writing = os.pipe()
    reaper = os.fork()
    if reaper == 0:
        try:
            os.close(writing)
            _reap(settings, reading, own_namespaces)
        except BaseException as error:
            _report_failure(settings, error)
    if own_namespaces:
        signal.signal(signal.SIGTERM, lambda *received: os.kill(reaper, signal.SIGKILL))
    else:
        signal.signal(signal.SIGTERM, lambda *received: os.killpg(0, signal.SIGKILL))
    os._exit(_code(os.waitpid(reaper, 0)[1]))  # the reaper has ended only when its namespace is empty


def _reap(settings, launcher, own_namespaces):
    """Runs the program in a child process and waits for it, in the second process. `launcher` ends when the first one ends."""
    if own_namespaces:
        os.setsid()  # no signal to a group reaches the first process
    walls = settings["walls"]
    if "files" in walls:
        _own_root(settings["base"], settings["scratch_bytes"])
    if "user" in walls and os.geteuid() == 0:
        _drop_rights()
    _check(_libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if select.select([launcher], [], [], 0)[0]:
        os._exit(CANNOT)
    _libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # no other process of this user can trace this one
    program = os.fork()
    if program == 0:
        try:
            _become_program(settings, own_namespaces)
        except BaseException as error:
            _report_failure(settings, error)
    os.close(settings["verdict"])
    while True:
        ended, status = os.wait()
        if ended == program:
            os._exit(_code(status))


def _become_program(settings, own_namespaces):
    limits = dict(settings["limits"])
    limits["NPROC"] += 1  # the second process
    if os.geteuid() != _OWN_USER:  # programs that share a user share one limit
        limits["NPROC"] *= settings["programs"]
    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _refuse_calls(own_namespaces)
    os.execve(settings["python"], [settings["python"], "-I", "-S", "-B", "-c", settings["runner"], *settings["arguments"]], {})


def _code(status):
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _report_failure(settings, error):
    os.write(settings["verdict"], f"{settings['name']} {type(error).__name__}: {error}"[:200].encode())
    os._exit(CANNOT)


def _end_with(parent, by):
    """Makes the kernel send the signal `by` to this process when its parent ends. Exits if it has already ended."""
    _check(_libc.prctl(_PDEATHSIG, by, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(CANNOT)


def _check(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), what + ": " + os.strerror(ctypes.get_errno()))


def _drop_rights():
    """Switches to a user id that nothing else uses, because the kernel limits the number of processes per user.

    Falls back to the user `nobody` in a container that does not map such a large user id.
    """
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    try:
        os.setresuid(_OWN_USER, _OWN_USER, _OWN_USER)
    except OSError:
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _refuse_calls(own_namespaces):
    """Forbids some system calls by seccomp: System V objects, whose memory no limit counts, and new namespaces.

    Without a namespace of processes it also forbids to leave the group of processes, which is then the only handle on them.
    In a new namespace the program could be root. On another processor or a kernel without seccomp the calls stay allowed,
    which `sandbox.working_walls` detects.
    """
    if os.uname().machine not in _CALLS:
        return
    architecture, clone, refused, leaving = _CALLS[os.uname().machine]
    no = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    filters = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), no, (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), no]
    for call in refused if own_namespaces else refused + leaving:
        filters += [(_EQUAL, 0, 1, call), no]
    # A filter cannot read the flags of clone3, which are passed by pointer. With ENOSYS the C library falls back to clone.
    filters += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | errno.ENOSYS), (_EQUAL, 0, 3, clone), (_LOAD, 0, 0, 16),
                (_ANY_OF, 0, 1, _NEWUSER), no, (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in filters)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(filters), ctypes.addressof(held))
    _libc.prctl(_SECCOMP, _FILTER, program, 0, 0)


def _own_namespaces():
    """Creates new namespaces for network, processes, mounts, IPC and host name.

    Without the privilege to do so, it creates a user namespace first, which grants the privilege.
    """
    flags = _NEWNET | _NEWPID | _NEWIPC | _NEWUTS | _NEWNS
    if os.geteuid() == 0:
        if _libc.unshare(flags) == 0:
            return
        _drop_rights()
        _libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # otherwise /proc/self belongs to root and the id maps cannot be written
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEWUSER | flags), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)


def _own_root(base, scratch_bytes):
    """Switches to a new root. It has the system's libraries and the interpreter, read-only, an empty /tmp, and no /proc."""
    _check(_libc.mount(None, b"/", None, _REC | _PRIVATE, None), "mount /")
    root = next(folder for folder in ("/tmp", "/mnt", "/var/tmp") if os.path.isdir(folder) and not base.startswith(folder))
    _check(_libc.mount(b"tmpfs", root.encode(), b"tmpfs", _NOSUID, f"size={scratch_bytes},mode=755".encode()), "mount tmpfs")
    for path in (*_SYSTEM, base):
        _bind(path, root)
    os.mkdir(root + "/old")
    if not os.path.isdir(root + "/tmp"):
        os.mkdir(root + "/tmp")
    os.chmod(root + "/tmp", 0o777)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], root.encode(), (root + "/old").encode()), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", _DETACH), "umount")
    os.rmdir("/old")
    os.chdir("/tmp")


def _bind(path, root):
    """Mounts a path of the machine below the new root; read-only, except for devices."""
    target = root + path
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    if not os.path.exists(path) or os.path.exists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _check(_libc.mount(path.encode(), target.encode(), None, _BIND | _REC, None), "mount " + path)
    if path not in _DEVICES:
        read_only = _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV
        _check(_libc.mount(None, target.encode(), None, read_only, None), "remount " + path)


if __name__ == "__main__":
    launch(json.loads(sys.argv[1]))
