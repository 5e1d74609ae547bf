import pytest
from sandbox_client import Sandbox, WrongRequest

BACKENDS = ("local", "docker")


async def test_a_command_runs_as_the_sandboxes_user_and_no_other(sandbox: Sandbox) -> None:
    for user in ("", "agent", "65534"):
        assert (await sandbox.run("id -un", user=user)).stdout == "agent\n"
    with pytest.raises(WrongRequest, match="root"):
        await sandbox.run("id", user="root")
