"""Every check, with the host it looks at made up."""

from __future__ import annotations

import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sandbox_client import doctor as sandbox_doctor
from sandbox_client.config import SandboxServiceConfig
from tailrace_cli.doctor import compute, disk, examine, memory, ports, sandbox, ulimits, weights
from tailrace_cli.doctor.base import Finding, Status
from tailrace_cli.stack.files import LOCAL_STACK
from tailrace_cli.stack.health import free_ports
from tailrace_cli.stack.spec import StackSpec, load_stack, parse_stack

GIB = 2**30


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def sandbox_stack(**config: Any) -> StackSpec:
    process = {"name": "boxes", "module": "sandbox_client", "address": "grpc://127.0.0.1:7000"}
    return parse_stack({"processes": [process | {"config": config}]}, source="t")


def test_whatever_is_not_ok_has_to_come_with_a_fix() -> None:
    with pytest.raises(ValueError, match="must say how to mend it"):
        Finding("a", Status.WARNING, "b")


def meminfo(folder: Path, available_kib: int) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    return file


def test_too_little_memory_is_a_warning_and_enough_is_not(tmp_path: Path) -> None:
    short = only(memory.check(meminfo(tmp_path, 3 * 2**20)))
    assert (short.status, short.found) == (
        Status.WARNING,
        "3.0 GiB available, the demo needs 6",
    )
    assert only(memory.check(meminfo(tmp_path, 7 * 2**20))).status is Status.OK


def test_a_meminfo_without_the_line_is_an_error_not_a_guess(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(ValueError, match="MemAvailable"):
        memory.check(tmp_path / "meminfo")


@pytest.mark.parametrize(
    ("soft", "status", "found"),
    [
        (resource.RLIM_INFINITY, Status.OK, "unlimited, 4096 needed"),
        (4096, Status.OK, "4096, 4096 needed"),
        (1024, Status.WARNING, "1024, 4096 needed"),
    ],
)
def test_soft_limits_are_held_against_the_need(soft: int, status: Status, found: str) -> None:
    finding = ulimits.judge("open files", soft, 4096)
    assert (finding.status, finding.found) == (status, found)
    assert finding.fix == ("" if status is Status.OK else "ulimit -n 4096")


def test_the_soft_limits_of_this_process_are_the_ones_that_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 128))
    assert [(f.check, f.status) for f in ulimits.check()] == [
        ("ulimit: open files", Status.WARNING),
        ("ulimit: processes", Status.WARNING),
    ]


def test_a_full_disk_is_a_problem_and_so_is_missing_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: Mapping[Path, int] = {tmp_path: GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    runs, shared = disk.check(tmp_path, tmp_path / "none")
    assert (runs.status, runs.found) == (Status.PROBLEM, "1.0 GiB free, 2.00 needed")
    assert "--out" in runs.fix
    assert (shared.status, shared.found) == (Status.PROBLEM, "does not exist")


def test_room_enough_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9 * GIB))
    assert {f.status for f in disk.check(tmp_path, tmp_path)} == {Status.OK}


@pytest.mark.parametrize(
    ("cores", "found", "statuses"),
    [
        ({0, 1}, True, [Status.OK, Status.OK, Status.OK]),
        ({0}, True, [Status.OK, Status.WARNING, Status.OK]),
        ({0, 1}, False, [Status.OK, Status.OK, Status.WARNING]),
    ],
)
def test_cores_and_model_libraries(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], found: bool, statuses: list[Status]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if found else None)
    findings = compute.check()
    assert [f.status for f in findings] == statuses
    if not found:
        assert findings[-1].found == "no torch, transformers"
        assert "pip install" in findings[-1].fix


def test_a_taken_port_is_named_with_what_to_do() -> None:
    port = free_ports(1)[0]
    stack = parse_stack(
        {"processes": [{"name": "a", "module": "m", "address": f"grpc://127.0.0.1:{port}"}]},
        source="t",
    )
    assert only(ports.check(stack)).status is Status.OK
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        finding = only(ports.check(stack))
    assert (finding.check, finding.status) == ("port: a", Status.WARNING)
    assert finding.found == f"127.0.0.1:{port} is taken"


def test_sandbox_findings_are_those_of_its_own_doctor_for_the_stack_s_settings() -> None:
    seen: list[SandboxServiceConfig] = []

    def look(config: SandboxServiceConfig) -> list[sandbox_doctor.Finding]:
        seen.append(config)
        return [
            sandbox_doctor.Finding("isolation", sandbox_doctor.Level.OK, "all there"),
            sandbox_doctor.Finding("memory", sandbox_doctor.Level.WARNING, "little", "buy some"),
        ]

    def trial(config: SandboxServiceConfig) -> sandbox_doctor.Finding:
        return sandbox_doctor.Finding("a sandbox", sandbox_doctor.Level.OK, "starts")

    findings = sandbox.check(sandbox_stack(limits={"sandboxes": 7}), look, trial)
    assert seen[0].limits.sandboxes == 7
    assert findings == [
        Finding("sandbox: isolation", Status.OK, "all there"),
        Finding("sandbox: memory", Status.WARNING, "little", "buy some"),
        Finding("sandbox: a sandbox", Status.OK, "starts"),
    ]


def test_no_sandbox_is_tried_where_none_can_be_made() -> None:
    def look(config: SandboxServiceConfig) -> list[sandbox_doctor.Finding]:
        return [
            sandbox_doctor.Finding(
                "isolation", sandbox_doctor.Level.PROBLEM, "no namespaces", "run as root"
            )
        ]

    def trial(config: SandboxServiceConfig) -> sandbox_doctor.Finding:
        raise AssertionError

    finding = only(sandbox.check(sandbox_stack(), look, trial))
    assert (finding.status, finding.fix) == (Status.PROBLEM, "run as root")


def test_only_sandboxes_of_this_host_are_tried() -> None:
    def look(config: SandboxServiceConfig) -> list[sandbox_doctor.Finding]:
        return [sandbox_doctor.Finding("daemon", sandbox_doctor.Level.OK, "answers")]

    def trial(config: SandboxServiceConfig) -> sandbox_doctor.Finding:
        raise AssertionError("this would pull an image, or cost money")

    for backend in ("docker", "e2b"):
        finding = only(sandbox.check(sandbox_stack(backend=backend), look, trial))
        assert finding.check == "sandbox: daemon"


def test_wrong_sandbox_settings_are_a_finding() -> None:
    finding = only(sandbox.check(sandbox_stack(limits={"sandboxes": 0, "colour": 1})))
    assert finding.status is Status.PROBLEM
    assert "limits.sandboxes" in finding.found
    assert "limits.colour" in finding.found


def test_a_stack_without_sandboxes_has_none_to_check() -> None:
    process = {"name": "a", "module": "swe_eval", "address": "grpc://127.0.0.1:7000"}
    assert sandbox.check(parse_stack({"processes": [process]}, source="t")) == []


def test_this_host_is_examined_from_python_to_ports() -> None:
    checks = [f.check for f in examine(load_stack(LOCAL_STACK))]
    areas = list(dict.fromkeys(check.split(":")[0] for check in checks))
    assert areas == [
        "python",
        "cores",
        "embedded engine",
        "memory",
        "disk",
        "ulimit",
        "sandbox",
        "port",
    ]


def weights_stack(**receiver: Any) -> StackSpec:
    process = {"name": "w", "module": "weight_sync", "address": "grpc://127.0.0.1:7000"}
    return parse_stack({"processes": [process | {"config": {"receiver": receiver}}]}, source="t")


def interface(folder: Path, name: str, state: str) -> None:
    (folder / name).mkdir()
    (folder / name / "operstate").write_text(f"{state}\n")


def test_broadcasts_need_their_interface_and_torch(tmp_path: Path) -> None:
    for name, state in {"lo": "unknown", "ib0": "up", "eth0": "down"}.items():
        interface(tmp_path, name, state)

    def found(name: str, torch: object = "there") -> list[tuple[Status, str]]:
        stack = weights_stack(transports=["store", "collective"], collective={"interface": name})
        findings = weights.check(stack, tmp_path, lambda _: torch)
        return [(finding.status, finding.found) for finding in findings]

    for name in ("lo", "ib0"):
        assert [status for status, _ in found(name)] == [Status.OK, Status.OK]
    assert found("eth0")[0] == (Status.PROBLEM, "eth0 is down")
    assert found("ib7")[0] == (Status.PROBLEM, "there is no interface 'ib7'")
    assert found("lo", torch=None)[1] == (Status.PROBLEM, "collectives need torch")


def test_without_broadcasts_no_interface_is_asked_for(tmp_path: Path) -> None:
    assert weights.check(weights_stack(), tmp_path / "none", lambda _: None) == []
    distributed = weights_stack(sglang_load="distributed")
    interface(tmp_path, "lo", "unknown")
    assert len(weights.check(distributed, tmp_path, lambda _: "there")) == 2


def test_wrong_settings_of_weight_sync_are_said(tmp_path: Path) -> None:
    found = only(weights.check(weights_stack(transports=["pigeon"]), tmp_path))
    assert found.status is Status.PROBLEM
    assert "receiver.transports" in found.found
