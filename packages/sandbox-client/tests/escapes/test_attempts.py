"""Attempts that are one call: at rights, mounts, devices, the kernel and its settings."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from sandbox_client import EnvironmentTree, Sandbox
from sandbox_client.testing.attempts import each, inside, plainly, without
from sandbox_client.testing.backends import BackendUnderTest


@dataclass(frozen=True)
class Attempt:
    """One thing that a command must not be able to do.

    Args:
        protection: What keeps it from that.
        program: Tells "in", or the error that stopped it.
        held: What it may tell inside: the errors of the protections, the first one first.
        walls: The walls without which it gets in. With any one of them alone it does not.
        plainly: What it tells as root on this host, where no single wall can be left out; "ENOSYS"
            besides, where the kernel was built without the call.
        unsafe: Why it is not shown to succeed anywhere.
    """

    name: str
    protection: str
    program: str
    held: tuple[str, ...] = ("EPERM",)
    walls: tuple[str, ...] = ()
    plainly: str = ""
    unsafe: str = ""


def opens(path: str, mode: str) -> str:
    """Opens a file and does no more with it."""
    return f"tell(lambda: os.close(os.open({path!r}, os.{mode})))"


def root_calls(name: str, number: int, *arguments: str, plainly: str, unsafe: str = "") -> Attempt:
    """A system call for root alone, with arguments that the kernel refuses after the rights."""
    given = ", ".join((str(number), *arguments))
    return Attempt(
        f"the system call {name}",
        "seccomp, before that no capabilities",
        f"tell(lambda: syscall({given}))",
        plainly=plainly,
        unsafe=unsafe,
    )


def nobody_calls(name: str, program: str, held: str = "EPERM") -> Attempt:
    """A system call that the kernel offers to everybody."""
    return Attempt(f"the system call {name}", "seccomp", program, (held,), walls=("seccomp",))


MOUNTS = ("capabilities", "seccomp")

RIGHTS = [
    Attempt(
        "remount a read-only file system for writing",
        "no capabilities; seccomp",
        "tell(lambda: call(libc.mount(None, b'/usr', None, 32 | 4096, None)))",
        walls=MOUNTS,
    ),
    Attempt(
        "mount a file system",
        "no capabilities; seccomp",
        "tell(lambda: call(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)))",
        walls=MOUNTS,
    ),
    Attempt(
        "unmount /proc",
        "no capabilities; seccomp",
        "tell(lambda: call(libc.umount2(b'/proc', 2)))",
        walls=MOUNTS,
    ),
    Attempt(
        "open a file system by the newer calls",
        "no capabilities; seccomp",
        "tell(lambda: syscall(430, b'tmpfs', 0))",
        walls=MOUNTS,
    ),
    Attempt(
        "change the root folder",
        "no capabilities; seccomp",
        "tell(lambda: os.chroot('/tmp'))",
        walls=MOUNTS,
    ),
    Attempt(
        "make a mount namespace",
        "no capabilities; seccomp",
        "tell(lambda: call(libc.unshare(0x20000)))",
        walls=MOUNTS,
    ),
    Attempt(
        "join a namespace",
        "no capabilities; seccomp",
        "fd = os.open('/proc/self/ns/uts', os.O_RDONLY)\ntell(lambda: call(libc.setns(fd, 0)))",
        walls=MOUNTS,
    ),
    Attempt(
        "be root in a user namespace of its own",
        "seccomp",
        "tell(lambda: call(libc.unshare(0x10000000)))",
        walls=("seccomp",),
    ),
    Attempt(
        "be root in a user namespace, by clone",
        "seccomp",
        # A child that the kernel makes ends at once; the flag is what matters.
        "def clone():\n  if syscall(56, 0x10000000 | 17, 0, 0, 0, 0) == 0: os._exit(0)\n"
        "tell(clone)",
        walls=("seccomp",),
    ),
    Attempt(
        "make a device node for the host's disk",
        "no capabilities",
        "tell(lambda: os.mknod('/tmp/disk', 0o666 | stat.S_IFBLK, os.makedev(253, 0)))",
        walls=("capabilities",),
    ),
    Attempt(
        "open a device node that somebody made",
        "mounts without devices; no capabilities to make one",
        "def attempt():\n"
        "  os.mknod('/tmp/null', 0o666 | stat.S_IFCHR, os.makedev(1, 3))\n"
        "  os.open('/tmp/null', os.O_RDONLY)\n"
        "tell(attempt)",
        ("EPERM", "EACCES"),
        walls=("capabilities", "nodev"),
    ),
    Attempt(
        "become root through a setuid program",
        "no_new_privs; mounts without setuid",
        # It waits for a password; nothing is typed.
        "import subprocess\n"
        "su = subprocess.Popen(['/usr/bin/su', 'root'], stdin=subprocess.PIPE,\n"
        "                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "fields = ['?']\n"
        "for _ in range(200):\n"
        "  time.sleep(0.01)\n"
        "  status = dict(l.split(':', 1) for l in open(f'/proc/{su.pid}/status') if ':' in l)\n"
        "  if status['Name'].strip() == 'su': fields = status['Uid'].split(); break\n"
        "su.kill(); su.wait()\n"
        "print('in' if fields[1] == '0' else 'EPERM' if fields[1] == '65534' else fields)",
        # With seccomp comes no_new_privs.
        walls=("no_new_privs", "nosuid", "seccomp", "capabilities"),
    ),
    Attempt(
        "change to another user",
        "no capabilities",
        "tell(lambda: os.setresuid(1, 1, 1))",
        # In a user namespace there is no other user.
        ("EPERM", "EINVAL"),
        walls=("capabilities",),
    ),
    Attempt(
        "set the clock",
        "no capabilities; seccomp",
        "tell(lambda: time.clock_settime(time.CLOCK_REALTIME, -1.0))",
        plainly="EINVAL",
    ),
]

HOST = [
    Attempt(
        "read /etc/shadow",
        "a root of named folders",
        opens("/etc/shadow", "O_RDONLY"),
        ("ENOENT",),
        plainly="in",
    ),
    Attempt(
        "leave through the first process's root",
        "its memory and folders are closed: it is not dumpable",
        # The first process is the parent of what the service runs.
        "tell(lambda: os.listdir(f'/proc/{os.getppid()}/root'))",
        ("EACCES",),
        walls=("dumpable",),
    ),
    Attempt(
        "set the program that gets core dumps",
        "/proc/sys read-only; an unprivileged user",
        opens("/proc/sys/kernel/core_pattern", "O_WRONLY"),
        ("EROFS", "EACCES"),
        plainly="in",
    ),
    Attempt(
        "change a setting of the network",
        "/proc/sys read-only; an unprivileged user",
        opens("/proc/sys/net/ipv4/ip_forward", "O_WRONLY"),
        ("EROFS", "EACCES"),
        plainly="in",
    ),
    Attempt(
        "read the kernel's messages",
        "an unprivileged user, no capabilities",
        opens("/proc/kmsg", "O_RDONLY"),
        ("EACCES", "EPERM"),
        plainly="in",
    ),
    *(
        Attempt(
            f"open {path}", "an unprivileged user", opens(path, mode), ("EACCES",), plainly="in"
        )
        for path, mode in (("/proc/kcore", "O_RDONLY"), ("/proc/sysrq-trigger", "O_WRONLY"))
        if Path(path).exists()  # the kernel may be built without
    ),
    Attempt(
        "reach the kernel's objects in /sys",
        "a root of named folders",
        opens("/sys/kernel", "O_RDONLY"),
        ("ENOENT",),
        plainly="in",
    ),
    Attempt(
        "move to another cgroup",
        "a root of named folders",
        "import glob\n"
        "found = glob.glob('/sys/fs/cgroup/**/cgroup.procs', recursive=True)\n"
        "if not found: print('ENOENT')\n"
        "else: tell(lambda: os.close(os.open(found[0], os.O_WRONLY)))",
        ("ENOENT",),
        plainly="in",
    ),
    Attempt(
        "write to the host's programs",
        "a read-only root; an unprivileged user",
        "tell(lambda: os.close(os.open('/usr/bin/env', os.O_WRONLY | os.O_APPEND)))",
        ("EROFS", "EACCES"),
        # Opening a program for writing is all that is shown; it stays as it is.
        plainly="in",
    ),
    Attempt(
        "raise the odds that the first process is killed for memory",
        "/proc/1 belongs to root, or is read-only",
        opens("/proc/1/oom_score_adj", "O_WRONLY"),
        ("EACCES", "EROFS"),
        plainly="in",
    ),
]

TRACED_CHILD = """\
pid = os.fork()
if pid == 0:
  time.sleep(5)
  os._exit(0)
try:
  tell(lambda: syscall(101, 16, pid, 0, 0))
finally:
  os.kill(pid, 9)
"""
MEMORY = """\
text = ctypes.create_string_buffer(b'secret')
into = ctypes.create_string_buffer(8)
iovec = lambda b: (ctypes.c_size_t * 2)(ctypes.addressof(b), 6)
local, remote = iovec(into), iovec(text)
tell(lambda: syscall(NUMBER, os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
"""

# Numbers of x86_64.
CALLS = [
    nobody_calls("ptrace", TRACED_CHILD),
    nobody_calls("process_vm_readv", MEMORY.replace("NUMBER", "310")),
    nobody_calls("process_vm_writev", MEMORY.replace("NUMBER", "311")),
    nobody_calls("kcmp", "me = os.getpid()\ntell(lambda: syscall(312, me, me, 0, 0, 0))"),
    nobody_calls(
        "pidfd_getfd",
        "fd = os.pidfd_open(os.getpid())\ntell(lambda: os.close(syscall(438, fd, 1, 0)))",
    ),
    nobody_calls("keyctl", "tell(lambda: syscall(250, 0, -3, 1))"),
    nobody_calls("add_key", "tell(lambda: syscall(248, b'user', b'name', b'x', 1, -2))"),
    nobody_calls(
        "io_uring_setup",
        "space = ctypes.create_string_buffer(120)\ntell(lambda: syscall(425, 1, space))",
    ),
    nobody_calls("userfaultfd", "tell(lambda: os.close(syscall(323, 1)))"),
    nobody_calls(
        "name_to_handle_at",
        "handle = (ctypes.c_uint * 40)(128)\nmount = ctypes.c_int()\n"
        "tell(lambda: syscall(303, -100, b'/usr', handle, ctypes.byref(mount), 0))",
    ),
    nobody_calls(
        "prlimit64, for the first process",
        "import resource\ntell(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64)))",
    ),
    nobody_calls(
        "setpriority, for the first process", "tell(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))"
    ),
    nobody_calls(
        "setpriority, for all of the user's processes",
        "tell(lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))",
    ),
    nobody_calls(
        "sched_setscheduler, for the first process",
        "tell(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))",
    ),
    nobody_calls(
        "sched_setaffinity, for the first process", "tell(lambda: os.sched_setaffinity(1, {0}))"
    ),
    nobody_calls("personality", "tell(lambda: syscall(135, 0x0040000))"),
    nobody_calls("move_pages", "tell(lambda: syscall(279, 0, 0, None, None, None, 0))"),
    nobody_calls("mbind", "tell(lambda: syscall(237, 0, 0, 0, None, 0, 0))"),
    Attempt(
        "the system call socket, for raw packets",
        "seccomp; no capabilities",
        "tell(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
        ("EAFNOSUPPORT", "EPERM"),
        walls=("seccomp", "capabilities"),
    ),
    nobody_calls(
        "socket, for a netlink protocol beside routes",
        "tell(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4))",
        "EPROTONOSUPPORT",
    ),
    root_calls("bpf", 321, "-1", "0", "0", plainly="EINVAL"),
    # Opens an event of the kernel's own, which a paranoid kernel keeps for root.
    root_calls("perf_event_open", 298, "0", "-1", "-1", "-1", "0", plainly="EFAULT"),
    root_calls("kexec_load", 246, "0", "0", "0", "0xffff", plainly="EINVAL"),
    root_calls("kexec_file_load", 320, "-1", "-1", "0", "0", "0xffff", plainly="EINVAL"),
    root_calls("finit_module", 313, "-1", "b''", "0xffff", plainly="EINVAL"),
    root_calls("delete_module", 176, "b'no such module'", "0", plainly="ENOENT"),
    root_calls("open_by_handle_at", 304, "-1", "0", "0", plainly="EFAULT"),
    root_calls("reboot", 169, "0", "0", "0", "0", plainly="EINVAL"),
    root_calls("swapon", 167, "b'/nowhere'", "0", plainly="ENOENT"),
    root_calls("acct", 163, "b'/nowhere'", plainly="ENOENT"),
    root_calls("quotactl", 179, "-1", "b'/nowhere'", "0", "0", plainly="EINVAL"),
    root_calls("pivot_root", 155, "b'/nowhere'", "b'/nowhere'", plainly="ENOENT"),
    root_calls("syslog", 103, "10", "0", "0", plainly="in"),
    root_calls("sethostname", 170, "b''", "-1", plainly="EINVAL"),
    root_calls("vhangup", 153, plainly="", unsafe="it would hang up the terminal of the tests"),
]

on_x86_64 = os.uname().machine == "x86_64"
x86_64 = pytest.mark.skipif(not on_x86_64, reason="numbers of x86_64")
ATTEMPTS = [
    *(pytest.param(a, id=a.name) for a in (*RIGHTS, *HOST)),
    *(pytest.param(a, id=a.name, marks=x86_64) for a in CALLS),
]


@functools.cache
def control(tried: Attempt) -> str:
    """What it tells without the protection.

    Attempts at single system calls share a control's process; the others change what they run in.
    """
    alike = [tried]
    if tried not in RIGHTS:
        alike = [a for a in (*HOST, *CALLS) if a.walls == tried.walls and not a.unsafe]
    program = each(a.program for a in alike)
    told = without(*tried.walls, program=program) if tried.walls else plainly(program)
    return told.splitlines()[alike.index(tried)]


@pytest.mark.parametrize("tried", ATTEMPTS)
async def test_it_is_held_inside_and_succeeds_without_the_protection(
    tried: Attempt,
    sandbox: Sandbox,
) -> None:
    assert await inside(sandbox, tried.program) in tried.held
    if tried.walls:
        assert control(tried) == "in"
    elif not tried.unsafe:
        assert control(tried) in (tried.plainly, "ENOSYS")
        assert tried.plainly not in tried.held


def test_secrets_of_the_host_are_closed_even_where_they_can_be_seen() -> None:
    """Protection: an unprivileged user. Root without a single capability still owns such files."""
    program = opens("/etc/shadow", "O_RDONLY")
    assert without(program=program) == "EACCES"
    assert without("user", program=program) == "in"


async def test_an_ordinary_users_sandboxes_hold_them_all(
    ordinary: BackendUnderTest, open_folder: Path, repository: EnvironmentTree
) -> None:
    """By namespaces of its own. The controls are those above; the long form runs all escapes."""
    programs = [a for a in (*RIGHTS, *HOST, *CALLS) if a not in CALLS or on_x86_64]
    running = ordinary.service(open_folder, "local.compile_shim=false")
    running.start()
    try:
        async with running.client() as client, await client.create(repository) as sandbox:
            told = {a.name: await inside(sandbox, a.program) for a in programs}
    finally:
        assert running.stop() == 0, running.log.read_text()
    assert {name: said for name, said in told.items() if said == "in"} == {}
    assert [a.name for a in programs if told[a.name] not in a.held] == []


DEEP = [a for a in RIGHTS if len(a.walls) > 1 and "no_new_privs" not in a.walls]


@pytest.mark.parametrize("tried", [pytest.param(a, id=a.name) for a in DEEP])
def test_each_wall_holds_it_alone(tried: Attempt) -> None:
    for kept in tried.walls:
        others = [wall for wall in tried.walls if wall != kept]
        assert without(*others, program=tried.program) in tried.held, kept
