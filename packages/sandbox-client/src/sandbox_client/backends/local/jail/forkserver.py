# ruff: noqa: PTH102, PTH103 -- keeps the fork-server small: no pathlib
"""The fork-server: makes sandboxes on request, ends them on request, says when one has ended.

It holds root's capabilities in its own mount namespace, runs no foreign code and talks to the
service alone. It dies with the service; every sandbox dies with it.
"""

import os
import resource
import select
import signal
import socket
from dataclasses import dataclass

from sandbox_client.backends.local.jail import kernel, template, wire
from sandbox_client.backends.local.jail.init import Init, PythonRun
from sandbox_client.backends.local.jail.rehearsal import rehearse
from sandbox_client.backends.local.jail.seccomp import Program, build_filter, is_supported

__all__ = ["ForkServer", "Settings"]


_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET
_REHEARSALS = 12


@dataclass(frozen=True)
class Settings:
    """What is the same for every sandbox."""

    uid: int
    gid: int
    python_path: str
    """The real interpreter, as sandboxes see it."""
    mounts: tuple[str, ...]
    """Writable folders beside the work folder."""
    seccomp: bool
    rehearsal_digest: str
    """A stored environment to practise with."""
    rlimits: tuple[tuple[int, int], ...]
    """(resource, limit) pairs, soft and hard alike."""


class ForkServer:
    """The loop of the fork-server. `serve` returns only in a process that is to run Python code."""

    def __init__(self, control: socket.socket, settings: Settings) -> None:
        self._control = control
        self._settings = settings
        self._ids: dict[int, str] = {}
        self._own_pid_namespace = -1
        self._filter: Program | None = None
        self._mount_points: set[str] = set()

    def prepare(self) -> None:
        """Does once what every sandbox inherits."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.unshare(kernel.CLONE_NEWUTS)
        kernel.set_hostname("sandbox")
        kernel.clear_inheritable_capabilities()
        kernel.drop_bounding_set()
        os.umask(0o022)
        if self._settings.seccomp and is_supported(os.uname().machine):
            self._filter = Program(build_filter(os.uname().machine))
        rehearse(self._settings.python_path, dict(os.environ))
        kernel.mount("proc", "/proc", "proc")
        self._own_pid_namespace = _own_namespace("pid")
        self._rehearse_setup()
        kernel.umount("/proc")

    def _rehearse_setup(self) -> None:
        """Sets sandboxes up without a process in them, for the reason that `rehearsal` gives."""
        own = [_own_namespace(kind) for kind in ("net", "ipc", "uts", "mnt")]
        message: wire.Message = {
            "digest": self._settings.rehearsal_digest,
            "workdir": "/workspace",
            "disk_bytes": 1 << 20,
            "inodes": 256,
        }
        self._make_mount_points("/workspace")
        for _ in range(_REHEARSALS):
            self._make_namespaces()
            for fd in self._mount(message):
                os.close(fd)
            for fd in own:
                kernel.setns(fd)
        for fd in own:
            os.close(fd)

    def serve(self) -> PythonRun | None:
        """Works until the service goes away. Returns a program to run in a sandbox's process."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        wire.send(self._control, {"op": "serving", "pid": os.getpid()})
        while True:
            ready = dict(poll.poll())
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._control.fileno() in ready:
                received = wire.receive(self._control, max_fds=8)
                if received is None:
                    return None
                message, fds = received
                if message["op"] == "create":
                    init = self._create(message, fds)
                    if init is not None:
                        # In the child: the fork-server's own things end here.
                        self._control.close()
                        os.close(wake_read)
                        os.close(wake_write)
                        return init.serve()
                elif message["op"] == "kill":
                    self._kill(str(message["id"]))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            sandbox_id = self._ids.pop(pid, None)
            if sandbox_id is not None:
                wire.send(self._control, {"op": "exited", "id": sandbox_id, "status": status})

    def _kill(self, sandbox_id: str) -> None:
        for pid, known in self._ids.items():
            if known == sandbox_id:
                # Ours and not reaped yet, so the number cannot mean anyone else.
                os.kill(pid, signal.SIGKILL)

    def _create(self, message: wire.Message, fds: list[int]) -> Init | None:
        sandbox_id = str(message["id"])
        try:
            self._make_mount_points(message["workdir"])
            kernel.unshare(kernel.CLONE_NEWPID)
            try:
                pid = kernel.fork()
            finally:
                # In the child this would fail and is not needed: it is in its own namespace.
                if os.getpid() != 1:
                    kernel.setns(self._own_pid_namespace)
        except OSError as error:
            wire.send(
                self._control,
                {"op": "failed", "id": sandbox_id, "error": f"fork: {error.strerror}"},
            )
            pid = -1
        if pid == 0:
            return self._become_init(message, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._ids[pid] = sandbox_id
        return None

    def _make_mount_points(self, workdir: str) -> None:
        """The root's file system is shared, so a folder is made once for all sandboxes."""
        for target in (workdir, *self._settings.mounts):
            if target not in self._mount_points:
                os.makedirs(target, mode=0o755, exist_ok=True)
                self._mount_points.add(target)

    def _become_init(self, message: wire.Message, fds: list[int]) -> Init:
        channel = socket.socket(fileno=fds[0])
        step = "start"
        try:
            step = "join cgroups"
            for fd in fds[1:]:
                os.write(fd, b"0")
                os.close(fd)
            step = "make namespaces"
            self._make_namespaces()
            step = "mount"
            root_fd, upper_fd = self._mount(message)
            oom_fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
            step = "drop privileges"
            os.close(self._own_pid_namespace)
            self._drop_privileges()
            init = Init(channel, self._settings.python_path, oom_fd)
            init.listen()
            wire.send(channel, {"op": "ready"}, [root_fd, upper_fd])
            os.close(root_fd)
            os.close(upper_fd)
        except BaseException as error:  # the parent only sees an exit status
            wire.send(channel, {"op": "failed", "step": step, "error": str(error) or repr(error)})
            os._exit(1)
        return init

    def _make_namespaces(self) -> None:
        kernel.unshare(_NAMESPACES)
        kernel.loopback_up()

    def _mount(self, message: wire.Message) -> tuple[int, int]:
        """Sets up the file systems; returns descriptors of the root and of the overlay's upper."""
        workdir, staging = str(message["workdir"]), template.STAGING
        uid, gid = self._settings.uid, self._settings.gid
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        size = f"size={message['disk_bytes']},nr_inodes={message['inodes']},mode=700"
        kernel.mount("tmpfs", staging, "tmpfs", flags, size)
        for name in ("upper", "work", *(f"mount{n}" for n in range(len(self._settings.mounts)))):
            os.mkdir(f"{staging}/{name}", 0o755)
            os.chown(f"{staging}/{name}", uid, gid)
        kernel.mount(
            "overlay",
            workdir,
            "overlay",
            flags,
            f"lowerdir={template.ENVIRONMENTS}/{message['digest']}/tree,"
            f"upperdir={staging}/upper,workdir={staging}/work,"
            "index=off,metacopy=off,redirect_dir=off,xino=off",
        )
        for number, target in enumerate(self._settings.mounts):
            kernel.mount(f"{staging}/mount{number}", target, flags=kernel.MS_BIND)
        upper_fd = os.open(f"{staging}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        kernel.umount(staging)
        kernel.umount(template.ENVIRONMENTS)
        kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
        root = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID
        kernel.mount("none", "/", flags=root)
        root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return root_fd, upper_fd

    def _drop_privileges(self) -> None:
        for kind, limit in self._settings.rlimits:
            _, hard = resource.getrlimit(kind)
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
        uid, gid = self._settings.uid, self._settings.gid
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        # Commands run as the same user: this keeps them out of the first process's memory.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        # Changing the uid has cleared it.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._filter is not None:
            self._filter.install()


def _own_namespace(kind: str) -> int:
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def _ignore(number: int, frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""
