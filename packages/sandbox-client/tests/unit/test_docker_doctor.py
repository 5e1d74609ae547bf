"""What the doctor makes of what a container daemon tells."""

from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_client import doctor
from sandbox_client.backends.docker import doctor as docker_doctor
from sandbox_client.backends.docker.engine import EngineInfo
from sandbox_client.config import DockerConfig, SandboxServiceConfig
from sandbox_client.core.images import DiskUse
from sandbox_client.findings import Finding, Level

INFO = EngineInfo("Docker 20.10", Path("/var/lib/docker"), (), "v1.41", "cgroupfs", 1)


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    (tmp_path / "freezer").mkdir()
    return tmp_path


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.controllers").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("v1.41", Level.OK),
        ("1.52", Level.OK),
        ("v2.0", Level.OK),
        ("v1.40", Level.WARNING),
        ("v1.9", Level.WARNING),
        ("", Level.WARNING),
    ],
)
def test_an_api_older_than_what_was_tried_is_a_warning(version: str, level: Level) -> None:
    finding = docker_doctor.judge_api(version)
    assert finding.level is level
    assert bool(finding.fix) == (level is not Level.OK)


@pytest.mark.parametrize("driver", ["cgroupfs", "systemd"])
def test_cgroups_that_both_see_are_fine(driver: str, v1: Path) -> None:
    finding = docker_doctor.judge_cgroups(replace(INFO, cgroup_driver=driver), v1)
    assert (finding.level, finding.found) == (Level.OK, f"version 1, driver {driver}")


def test_version_2_is_enough_without_a_freezer_of_its_own(v2: Path) -> None:
    assert docker_doctor.judge_cgroups(replace(INFO, cgroup_version=2), v2).level is Level.OK


def test_a_daemon_without_cgroups_limits_nothing(v1: Path) -> None:
    finding = docker_doctor.judge_cgroups(replace(INFO, cgroup_driver="none"), v1)
    assert finding.level is Level.PROBLEM
    assert "nothing is limited" in finding.found


def test_cgroups_of_another_host_or_version_are_a_problem(v2: Path) -> None:
    assert docker_doctor.judge_cgroups(INFO, v2).level is Level.PROBLEM


def test_cgroups_that_are_not_mounted_here_are_a_problem(tmp_path: Path) -> None:
    finding = docker_doctor.judge_cgroups(INFO, tmp_path)
    assert finding.level is Level.PROBLEM
    assert "cgroup namespace" in finding.fix


def test_every_missing_protection_is_a_warning() -> None:
    found = docker_doctor.judge_missing(["no seccomp filter: the daemon has none", "no pids"])
    assert [(f.level, f.found.split(":")[0]) for f in found] == [
        (Level.WARNING, "no seccomp filter"),
        (Level.WARNING, "no pids"),
    ]
    (ok,) = docker_doctor.judge_missing([])
    assert ok.level is Level.OK


@pytest.mark.parametrize(("free", "level"), [(15, Level.OK), (14, Level.PROBLEM)])
def test_a_disk_above_the_watermark_refuses_creates(free: int, level: Level) -> None:
    finding = docker_doctor.judge_disk(DiskUse(100, free), 0.85, Path("/var/lib/docker"))
    assert finding.level is level


def test_an_absent_base_image_is_pulled_by_the_first_sandbox() -> None:
    assert docker_doctor.judge_image("base:1", present=True).level is Level.OK
    finding = docker_doctor.judge_image("base:1", present=False)
    assert (finding.level, "docker pull base:1" in finding.fix) == (Level.WARNING, True)


def test_a_daemon_that_does_not_answer_is_the_only_finding_about_it(tmp_path: Path) -> None:
    config = DockerConfig(socket=tmp_path / "none.sock")
    (finding,) = docker_doctor.examine(config)
    assert finding.level is Level.PROBLEM
    assert str(config.socket) in finding.found
    assert "dockerd" in finding.fix


def test_only_the_configured_back_end_is_examined(tmp_path: Path) -> None:
    def checks(config: SandboxServiceConfig) -> dict[str, Finding]:
        return {finding.check: finding for finding in doctor.examine(config)}

    docker = DockerConfig(socket=tmp_path / "none.sock")
    found = checks(SandboxServiceConfig(backend="docker", docker=docker))
    assert found["the container daemon"].level is Level.PROBLEM
    assert "isolation" not in found
    assert "the container daemon" not in checks(SandboxServiceConfig(docker=docker))
    e2b = checks(SandboxServiceConfig(backend="e2b"))
    assert e2b.keys() == {"the back-end's library", "open files"}


def test_what_keeps_a_service_from_containers_comes_with_its_fix() -> None:
    lacking = doctor.judge_root(["CAP_SYS_ADMIN"])
    extra = doctor.judge_extra("docker", "aiodocker")
    assert [lacking.level, extra.level] == [Level.PROBLEM] * 2
    assert "sandbox-client[docker]" in extra.fix
    assert [doctor.judge_root([]).level, doctor.judge_extra("e2b").level] == [Level.OK] * 2
