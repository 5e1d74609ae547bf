import pytest
from sandbox_client import doctor
from sandbox_client.backends.local.host import isolation_problems
from sandbox_client.doctor import Finding, Level


def test_a_host_without_problems_is_isolated() -> None:
    (finding,) = doctor.judge_isolation({})
    assert finding.level is Level.OK


def test_every_problem_comes_with_its_fix() -> None:
    findings = doctor.judge_isolation({"no root": "use sudo", "no overlay": "modprobe overlay"})
    assert [(f.level, f.found, f.fix) for f in findings] == [
        (Level.PROBLEM, "no root", "use sudo"),
        (Level.PROBLEM, "no overlay", "modprobe overlay"),
    ]


def test_missing_controllers_are_warnings_that_say_what_is_lost() -> None:
    findings = doctor.judge_cgroups(2, {"pids"}, {"memory": "read-only", "cpu": "not there"})
    levels = {finding.check.split()[-1]: finding.level for finding in findings}
    assert levels == {"memory": Level.WARNING, "pids": Level.OK, "cpu": Level.WARNING}
    memory = next(finding for finding in findings if "memory" in finding.check)
    assert "read-only" in memory.found
    assert memory.fix


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (doctor.judge_seccomp("x86_64", enabled=True), Level.OK),
        (doctor.judge_seccomp("x86_64", enabled=False), Level.WARNING),
        (doctor.judge_seccomp("riscv64", enabled=True), Level.WARNING),
        (doctor.judge_compiler("/usr/bin/cc", wanted=True), Level.OK),
        (doctor.judge_compiler(None, wanted=True), Level.WARNING),
        (doctor.judge_compiler(None, wanted=False), Level.OK),
        (doctor.judge_open_files(1024, 384, 256), Level.WARNING),
        (doctor.judge_open_files(65536, 384, 256), Level.OK),
        (doctor.judge_open_files(-1, 384, 256), Level.OK),
        (doctor.judge_memory(1 << 30, 384, 2 << 20), Level.WARNING),
        (doctor.judge_memory(8 << 30, 384, 2 << 20), Level.OK),
    ],
)
def test_judgements(finding: Finding, level: Level) -> None:
    assert finding.level is level
    assert bool(finding.fix) == (level is not Level.OK)


def test_examining_this_host_says_something_about_everything() -> None:
    checks = {finding.check for finding in doctor.examine()}
    assert {"isolation", "system calls", "open files", "memory for sandboxes"} <= checks


def test_a_trial_sandbox_runs_where_isolation_is_possible() -> None:
    finding = doctor.try_sandbox()
    expected = Level.PROBLEM if isolation_problems() else Level.OK
    assert finding.level is expected, finding
