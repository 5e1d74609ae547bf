r"""Isolated sandboxes for coding agents, behind one gRPC contract.

A service makes sandboxes (`python -m sandbox_client serve`, as root), this client uses them::

    from service_kit.channel import ChannelConfig
    from sandbox_client import EnvironmentTree, SandboxClient

    tree = EnvironmentTree({"shop.py": b"def add(a, b):\n    return a - b\n"})
    async with SandboxClient(ChannelConfig(target="127.0.0.1:7101")) as client:
        async with await client.create(tree) as sandbox:
            await sandbox.run("sed -i 's/a - b/a + b/' shop.py")
            result = await sandbox.run("python -c 'import shop; print(shop.add(1, 2))'")
            print(result.stdout, (await sandbox.diff()).decode())
"""

from sandbox_client.client import OutputEvent, Sandbox, SandboxClient, Snapshot
from sandbox_client.environments import EnvironmentTree
from sandbox_client.errors import (
    EnvironmentUnknown,
    IdempotencyConflict,
    InjectedFault,
    IsolationUnavailable,
    PatchRejected,
    QuotaExhausted,
    SandboxGone,
    SandboxUnavailable,
    ServiceError,
    TooLarge,
    WrongRequest,
    is_infrastructure,
)
from sandbox_client.types import (
    Command,
    EnvironmentRef,
    ExecResult,
    FileContent,
    ImageStage,
    ImageStatus,
    LimiterStatus,
    SandboxInfo,
    SandboxLimits,
    ServiceStatus,
)

__version__ = "0.1.0"

__all__ = [
    "Command",
    "EnvironmentRef",
    "EnvironmentTree",
    "EnvironmentUnknown",
    "ExecResult",
    "FileContent",
    "IdempotencyConflict",
    "ImageStage",
    "ImageStatus",
    "InjectedFault",
    "IsolationUnavailable",
    "LimiterStatus",
    "OutputEvent",
    "PatchRejected",
    "QuotaExhausted",
    "Sandbox",
    "SandboxClient",
    "SandboxGone",
    "SandboxInfo",
    "SandboxLimits",
    "SandboxUnavailable",
    "ServiceError",
    "ServiceStatus",
    "Snapshot",
    "TooLarge",
    "WrongRequest",
    "__version__",
    "is_infrastructure",
]
