"""Launcher of the sandbox: sets up the walls around one program and runs it. `python -I -S -B launch.py SETTINGS`

The program and its tests are on stdin, for the interpreter in the sandbox. SETTINGS is a JSON object:

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
_NEW_CALLS = 424
"""The lowest number of the calls that all processors share. The C library does without them if they are unknown (ENOSYS)."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, open 2 -, openat 257 56,
    creat 85 -, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, fcntl 72 25,
    flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, truncate 76 45, fallocate 285 47, fadvise64 221 223,
    sendfile 40 71, copy_file_range 326 285, memfd_create 319 279, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
    statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -,
    readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34,
    rmdir 84 -, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36,
    unlink 87 -, unlinkat 263 35, chmod 90 -, fchmod 91 52, fchmodat 268 53, umask 95 166, utimensat 280 88,
    brk 12 214, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, msync 26 227, futex 202 98,
    set_robust_list 273 99, rseq 334 293, arch_prctl 158 -, set_tid_address 218 96, restart_syscall 219 128,
    fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, kill 62 129,
    tkill 200 130, tgkill 234 131, getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155,
    getsid 124 156, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
    getgroups 115 158, getrlimit 97 163, setrlimit 160 164, prlimit64 302 261, getrusage 98 165, getpriority 140 141,
    sched_yield 24 124, sched_getaffinity 204 123, getcpu 309 168, times 100 153, uname 63 160, sysinfo 99 179,
    getrandom 318 278, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
    rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, alarm 37 -, pause 34 -, getitimer 36 102,
    setitimer 38 103, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114,
    gettimeofday 96 169, time 201 -, select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create1 291 20,
    epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, connect 42 203, bind 49 200, listen 50 201,
    accept 43 202, accept4 288 242, getsockname 51 204, getpeername 52 205, sendto 44 206, recvfrom 45 207, sendmsg 46 211,
    recvmsg 47 212, shutdown 48 210, setsockopt 54 208, getsockopt 55 209"""
"""The system calls that a program may make, each with its numbers on x86_64 and aarch64: what Python needs for files, memory,
threads, processes, time and sockets. All others are refused: keyrings, namespaces, tracing, System V objects (whose memory no
limit counts), io_uring, userfaultfd, bpf, perf events, and whatever a later kernel adds."""
_ALLOWED_WITH = """
    socket 41 198 0 1 2 10, socketpair 53 199 0 1, ioctl 16 29 1 0x5401 0x5413 0x5421 0x541B 0x5450 0x5451,
    prctl 157 167 0 4 15"""
"""As above, with the place of an argument and its allowed values: the families unix, inet and inet6; terminals' attributes
and sizes, blocking, bytes to read, and inheritance; dumpable and the name of a thread."""
_CLONE, _LEAVING = "clone 56 220", "setsid 112 157, setpgid 109 154"
_NEW_NAMESPACES = 0x7E020000
"""The flags of clone that create a namespace. In a namespace of its own the program could be root."""
_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1
_libc = ctypes.CDLL(None, use_errno=True)


def launch(settings):
    """Runs the program in the sandbox. Exits with its exit code, or with 128 plus the number of the signal that ended it."""
    own_namespaces = "network" in settings["walls"]
    try:
        _end_with(settings["parent"], signal.SIGTERM)
        if os.uname().machine in _KEYCTL:  # where the kernel refuses a new keyring, it has none or refuses all calls on keys
            _libc.syscall(_KEYCTL[os.uname().machine], _JOIN_SESSION_KEYRING, None)
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
    limits["NPROC"] += 2  # the second process, and the one that holds the tests
    if os.geteuid() != _OWN_USER:  # programs that share a user share one limit
        limits["NPROC"] *= settings["programs"]
    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _allow_calls(own_namespaces)
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


def _numbers(calls):
    """The numbers of system calls on this processor, each with the numbers that follow in the table."""
    place = list(_ARCHITECTURES).index(os.uname().machine)
    rows = [call.split()[1:] for call in calls.split(",")]
    return [(int(row[place]), [int(number, 0) for number in row[2:]]) for row in rows if row[place] != "-"]


def _allow_calls(own_namespaces):
    """Restricts the program to the system calls of the tables, by seccomp.

    Without a namespace of processes a program may not leave the group of processes, which is then the only handle on them. On
    another processor or a kernel without seccomp all calls stay allowed, which `sandbox.working_walls` detects.
    """
    if os.uname().machine not in _ARCHITECTURES:
        return
    yes, no, unknown = ((_RETURN, 0, 0, _ALLOW), *((_RETURN, 0, 0, _ERROR | code) for code in (errno.EPERM, errno.ENOSYS)))
    filters = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[os.uname().machine]), no,
               (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), no]
    for call, _ in _numbers(f"{_ALLOWED}, {_LEAVING}" if own_namespaces else _ALLOWED):
        filters += [(_EQUAL, 0, 1, call), yes]
    for call, (place, *values) in _numbers(_ALLOWED_WITH):
        tests = [instruction for value in values for instruction in ((_EQUAL, 0, 1, value), yes)]
        filters += [(_EQUAL, 0, len(tests) + 2, call), (_LOAD, 0, 0, 16 + 8 * place), *tests, no]
    ((clone, _),) = _numbers(_CLONE)
    filters += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, 16), (_ANY_OF, 0, 1, _NEW_NAMESPACES), no, yes,
                # A filter cannot read the flags of clone3, which are passed by pointer. The C library falls back to clone.
                (_AT_LEAST, 0, 1, _NEW_CALLS), unknown, no]
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
