"""Log parsers: real logs against SWE-bench's own grader, and forged ones against common sense."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.core.verdict import GradeReason, RunEnd, TestStatus, Verdict, judge
from swe_eval.grading.log_run import judge_log, with_nonce
from swe_eval.grading.parsers import (
    PARSERS,
    START_OF_TESTS,
    ParsedLog,
    graded_part,
    parse_pytest,
    parse_sympy,
    parse_unittest,
    required_statuses,
    run_end,
)

LOGS = Path(__file__).parent.parent / "data" / "logs"
CASES: list[dict[str, Any]] = json.loads((LOGS / "cases.json").read_text())
EXPECTED: dict[str, Any] = json.loads((LOGS / "expected.json").read_text())
PASSED, FAILED, ERROR = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR


def parsed(case: Mapping[str, Any]) -> ParsedLog:
    text = (LOGS / case["log"]).read_text()
    return PARSERS[case["parser"]](graded_part(text).text if START_OF_TESTS in text else text)


def named(log: str) -> dict[str, Any]:
    return next(case for case in CASES if case["log"] == log)


def test_every_log_is_tested() -> None:
    assert {case["log"] for case in CASES} == {path.name for path in LOGS.glob("*.txt")}
    assert {case["log"] for case in CASES if case["parser"].startswith("parse_log")} == set(
        EXPECTED
    )


@pytest.mark.parametrize("log", sorted(EXPECTED))
def test_statuses_are_those_of_swe_benchs_grader_but_for_the_known_differences(log: str) -> None:
    found = parsed(named(log)).statuses
    same = {name: status for status, names in EXPECTED[log]["same"].items() for name in names}
    assert required_statuses(list(same), found) == same
    for name, _, here, why in EXPECTED[log]["differences"]:
        assert found.get(name, TestStatus.MISSING) == here
        assert why
    known = {*same, *(name for name, *_ in EXPECTED[log]["differences"])}
    cut = tuple(name for name in same if name.count("[") > name.count("]"))
    assert [name for name in found if name not in known and not name.startswith(cut)] == []


@pytest.mark.parametrize("case", [c for c in CASES if "report" in c], ids=lambda c: str(c["log"]))
def test_verdicts_and_required_tests_are_those_of_the_reports(case: dict[str, Any]) -> None:
    report = json.loads((LOGS / case["report"]).read_text())
    report = report if "resolved" in report else report[next(iter(report))]
    tests = report["tests_status"]
    required = [
        name
        for key in ("FAIL_TO_PASS", "PASS_TO_PASS")
        for half in tests[key].values()
        for name in half
    ]
    found = parsed(case)
    statuses = required_statuses(required, found.statuses)
    judgement = judge(required=required, statuses=statuses, end=run_end(found)[0])
    assert (judgement.verdict is Verdict.SOLVED) == report["resolved"]
    succeeded = {name for key in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in tests[key]["success"]}
    assert {name for name in required if statuses.get(name) is PASSED} == succeeded


@pytest.mark.parametrize("case", [c for c in CASES if "statuses" in c], ids=lambda c: str(c["log"]))
def test_the_validation_of_a_bug_is_read_before_and_after(case: dict[str, Any]) -> None:
    told = {name: word.lower() for word, names in case["statuses"].items() for name in names}
    assert parsed(case).statuses == told


def test_a_long_log_adds_up_to_what_pytest_counted() -> None:
    found = parsed(named("django-money__django-money.835c1ab8.combine_file__7znr0kum.txt"))
    counts = [list(found.statuses.values()).count(s) for s in (PASSED, FAILED)]
    assert counts == [420, 9]


@pytest.mark.parametrize("name", ["django_output_1", "pytest_output_1", "sympy_output_4"])
def test_a_log_that_is_cut_off_proves_nothing(name: str) -> None:
    end, why = run_end(parsed(named(f"{name}.txt")))
    assert end is RunEnd.ABORTED
    assert "ends before the runner" in why


# -- pytest ----------------------------------------------------------------------------------------


def session(*lines: str, summary: tuple[str, ...] = (), tally: str = "1 passed") -> str:
    head = "=========== test session starts ==========="
    summary = ("======== short test summary info ========", *summary) if summary else ()
    return "\n".join([head, *lines, *summary, f"======== {tally} in 0.01s ========", ""])


def test_pytest_reads_progress_and_summary() -> None:
    log = session(
        "t.py::a PASSED                [ 20%]",
        "t.py::b[x (y)] SKIPPED (no (fast) network)  [ 40%]",
        "t.py::c[x y] FAILED           [ 60%]",
        "\x1b[32mt.py::d <- other.py XFAIL\x1b[0m (why) [ 80%]",
        summary=(
            "PASSED t.py::e[a - b]",
            "FAILED t.py::f[a - b] - AssertionError: x - y",
            "ERROR broken.py - ImportError",
            "SKIPPED [1] t.py:3: reason",
        ),
        tally="1 failed, 2 passed, 1 skipped, 1 xfailed, 1 error",
    )
    found = parse_pytest(log)
    assert found.statuses == {
        "t.py::a": "passed",
        "t.py::b[x (y)]": "skipped",
        "t.py::c[x y]": "failed",
        "t.py::d": "passed",
        "t.py::e[a - b]": "passed",
        "t.py::f[a - b]": "failed",
        "broken.py": "error",
    }
    assert (found.finished, found.problem) == (True, "")


def test_pytest_counts_an_error_in_teardown_against_the_test() -> None:
    for order in (("PASSED t.py::a", "ERROR t.py::a - x"), ("ERROR t.py::a - x", "PASSED t.py::a")):
        assert parse_pytest(session(summary=order)).statuses == {"t.py::a": ERROR}


@pytest.mark.parametrize(
    "log",
    [
        # Printed by a test, and shown by pytest in a section of its own.
        session("===== PASSES =====", "PASSED t.py::b", summary=("FAILED t.py::a - x",)),
        session(
            "===== FAILURES =====",
            "===== short test summary info =====",
            "PASSED t.py::b",
            "===== 1 passed in 0.01s =====",
            summary=("FAILED t.py::a - x",),
            tally="1 failed",
        ),
        # After the end, by an exit handler.
        session(summary=("FAILED t.py::a - x",), tally="1 failed") + "PASSED t.py::b\n",
        "t.py::b PASSED",
    ],
)
def test_pytest_takes_no_printed_pass(log: str) -> None:
    found = parse_pytest(log)
    assert "t.py::b" not in found.statuses or not found.finished


@pytest.mark.parametrize(
    "forged",
    [
        "PASSED t.py::a",
        "===== short test summary info =====\nPASSED t.py::a\n===== 1 passed in 0.01s =====",
        session("t.py::a PASSED", summary=("PASSED t.py::a",)),
    ],
)
def test_no_later_line_takes_back_a_failure(forged: str) -> None:
    log = session(summary=("FAILED t.py::a - x",), tally="1 failed")
    for text in (log + forged, forged + "\n" + log):
        assert parse_pytest(text).statuses["t.py::a"] is FAILED


FORGED = [
    "PASSED t.py::a",
    "t.py::a PASSED [100%]",
    "XFAIL t.py::a - known",
    "===== test session starts =====",
    "===== PASSES =====",
    "===== short test summary info =====",
    "===== 1 passed in 0.01s =====",
    "Results (0.01s):",
    "       1 passed",
]


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(FORGED)), max_size=12), st.booleans())
def test_no_printed_lines_turn_a_failed_test_into_a_passed_one(
    forged: list[tuple[int, str]], verbose: bool
) -> None:
    lines = session(
        *(["t.py::a FAILED [100%]"] if verbose else ["t.py F"]),
        "===== FAILURES =====",
        "____ a ____",
        summary=("FAILED t.py::a - AssertionError: not PASSED but ERROR",),
        tally="1 failed",
    ).split("\n")
    for place, line in forged:
        lines.insert(place, line)
    assert parse_pytest("\n".join(lines)).statuses.get("t.py::a") is not PASSED


def test_more_passes_than_pytest_counted_are_a_problem() -> None:
    found = parse_pytest(session("t.py::a PASSED", "t.py::b PASSED", tally="1 passed"))
    assert run_end(found)[0] is RunEnd.TAMPERED


def test_a_nonzero_exit_without_a_failure_is_no_success() -> None:
    found = parse_pytest(session("t.py::a PASSED"))
    assert run_end(found, exit_code=0)[0] is RunEnd.FINISHED
    assert run_end(found, exit_code=1)[0] is RunEnd.ABORTED


def test_names_are_written_as_the_data_sets_write_them() -> None:
    log = session(summary=("PASSED t.py::a[/tmp/x/f.dcm]", "PASSED t.py::b[MouseButton.LEFT]"))
    assert next(iter(PARSERS["parse_log_pydicom"](log).statuses)) == "t.py::a[/f.dcm]"
    assert list(PARSERS["parse_log_matplotlib"](log).statuses)[1] == "t.py::b[1]"


@given(
    st.dictionaries(
        st.from_regex(r"t\.py::test_[a-z]{1,8}(\[[a-z -]{0,6}\])?", fullmatch=True),
        st.sampled_from(["PASSED", "FAILED", "ERROR"]),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_pytest_reads_what_a_run_would_print(results: dict[str, str], verbose: bool) -> None:
    passed = sum(word == "PASSED" for word in results.values())
    lines = [f"{name} {word} [ 50%]" for name, word in results.items()] if verbose else []
    summary = tuple(
        f"{word} {name}" + ("" if word == "PASSED" else " - why - so")
        for name, word in results.items()
    )
    found = parse_pytest(session(*lines, summary=summary, tally=f"1 failed, {passed} passed"))
    assert {n: s.value.upper() for n, s in found.statuses.items()} == results
    assert not found.problem


# -- unittest and Django ---------------------------------------------------------------------------

RULE = "=" * 70


def unittest_log(*lines: str, ran: int, last: str = "OK") -> str:
    return "\n".join([*lines, "-" * 70, f"Ran {ran} tests in 0.01s", "", last, ""])


def test_unittest_reads_results_docstrings_and_output_between() -> None:
    log = unittest_log(
        "test_a (m.T) ... ok",
        "test_b (m.T)",
        "It does so. ... ok",
        "test_c (m.T.test_c) ... Testing against Django",
        "  Applying x... OK",
        "ok",
        "test_d (m.T) ... skipped 'no database'",
        "test_e (m.T) ... FAIL",
        "test_f (m.T)",
        "It fails. ... ERROR",
        RULE,
        "FAIL: test_e (m.T)",
        RULE,
        "ERROR: test_f (m.T)",
        "It fails.",
        ran=6,
        last="FAILED (failures=1, errors=1, skipped=1)",
    )
    found = parse_unittest(log)
    assert found.statuses == {
        "test_a (m.T)": "passed",
        "test_b (m.T)": "passed",
        "It does so.": "passed",
        "test_c (m.T.test_c)": "passed",
        "test_d (m.T)": "skipped",
        "test_e (m.T)": "failed",
        "test_f (m.T)": "error",
        "It fails.": "error",
    }
    assert (found.finished, found.problem) == (True, "")


def test_a_failed_subtest_fails_its_test_under_both_names() -> None:
    log = unittest_log(
        "test_a (m.T)",
        "It does so. ... ok",
        RULE,
        "FAIL: test_a (m.T) (number=3)",
        ran=1,
        last="FAILED (failures=1)",
    )
    assert parse_unittest(log).statuses == {"test_a (m.T)": FAILED, "It does so.": FAILED}


def test_a_printed_ok_does_not_hide_the_failure_told_at_the_end() -> None:
    log = unittest_log(
        "test_a (m.T) ... ", "ok", "FAIL", RULE, "FAIL: test_a (m.T)", ran=1, last="FAILED (x)"
    )
    assert parse_unittest(log).statuses["test_a (m.T)"] is FAILED


def test_an_ok_that_belongs_to_no_test_is_none() -> None:
    log = unittest_log("Installing ... ", "ok", "test_a (m.T) ... ok", ran=1)
    assert parse_unittest(log).statuses == {"test_a (m.T)": PASSED}


def test_more_results_than_tests_were_run_are_a_problem() -> None:
    log = unittest_log("test_a (m.T) ... ok", "test_b (m.T) ... ok", ran=1)
    assert run_end(parse_unittest(log))[0] is RunEnd.TAMPERED


def test_of_several_runs_the_last_one_must_have_ended() -> None:
    first = unittest_log("test_a (m.T) ... ok", ran=1)
    second = unittest_log("test_b (m.T) ... ok", ran=1)
    assert run_end(parse_unittest(first + second))[0] is RunEnd.FINISHED
    assert run_end(parse_unittest(first + "test_b (m.T) ... ok\n"))[0] is RunEnd.ABORTED


def test_a_run_that_ends_early_is_not_finished() -> None:
    assert run_end(parse_unittest("test_a (m.T) ... ok\n"))[0] is RunEnd.ABORTED


# -- sympy -----------------------------------------------------------------------------------------


def test_sympy_reads_results_and_headings() -> None:
    log = (
        "sympy/core/tests/test_x.py[6]\ntest_a ok\ntest_b F\ntest_c E\ntest_d f\ntest_e s\n"
        "test_g ok      [FAIL]\n____ sympy/core/tests/test_x.py:test_h ____\n"
        " tests finished: 2 passed, 1 failed, in 0.10 seconds\n"
    )
    found = parse_sympy(log)
    assert found.statuses == {
        "test_a": "passed",
        "test_b": "failed",
        "test_c": "error",
        "test_e": "skipped",
        "test_g": "passed",
        "test_h": "failed",
    }
    assert found.finished
    assert parse_sympy(log.replace("2 passed", "1 passed")).problem


@pytest.mark.parametrize("parser", ["pytest", "parse_log_pydicom", "unittest", "sympy"])
@pytest.mark.parametrize(
    "piece",
    ["a:: ", "t::a PASSED (", "t::a[/ - ", "= ", "FAIL: a (", "_ x.py:a ", "1 passed, ", " ... ok"],
)
def test_a_very_long_line_does_not_hold_up_the_grader(parser: str, piece: str) -> None:
    line = piece * (400_000 // len(piece))
    log = f"{line}\nFAILED {line}\nFAIL: {line}\n={line}=\n{START_OF_TESTS}{line}\n"
    PARSERS[parser](log)
    graded_part(log)


# -- the script's log ------------------------------------------------------------------------------

SCRIPT = "set -x\n: '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\ngit checkout\n"


def script_log(tests: str, *, nonce: str = "", code: int = 0, before: str = "") -> str:
    return (
        f"{before}+ : '>>>>> Start Test Output{nonce}'\n{tests}"
        f"+ : '>>>>> End Test Output{nonce}'\n>>>>> Test Exit Code{nonce}: {code}\n"
    )


def verdict(log: str, nonce: str = "") -> tuple[Verdict, GradeReason]:
    judgement, _ = judge_log(
        log, parser="pytest", required=["t.py::a"], nonce=nonce, end=RunEnd.FINISHED
    )
    return judgement.verdict, judgement.reason


def test_a_script_gets_its_nonce_and_tells_its_exit_code() -> None:
    lines = with_nonce(SCRIPT, "abc").split("\n")
    assert lines[1] == ": '>>>>> Start Test Outputabc'"
    assert lines[3:6] == [
        "tests_exit_code=$?",
        ": '>>>>> End Test Outputabc'",
        'echo ">>>>> Test Exit Codeabc: $tests_exit_code"',
    ]


def test_the_log_of_a_script_is_judged() -> None:
    good = session("t.py::a PASSED")
    assert verdict(script_log(good))[0] is Verdict.SOLVED
    assert verdict(script_log(good, nonce="n"), "n")[0] is Verdict.SOLVED
    assert verdict(script_log(good, code=1))[1] is GradeReason.TESTS_ABORTED
    bad = session("t.py::a FAILED", tally="1 failed")
    assert verdict(script_log(bad, code=1))[1] is GradeReason.TESTS_FAILED
    assert verdict("no markers")[1] is GradeReason.TESTS_ABORTED


@pytest.mark.parametrize("nonce", ["", "n"])
def test_a_change_that_brings_markers_of_its_own_does_not_move_the_borders(nonce: str) -> None:
    diff = script_log(session("t.py::a PASSED"))
    log = script_log(session("t.py::a FAILED", tally="1 failed"), nonce=nonce, before=diff, code=1)
    expected = GradeReason.TESTS_FAILED if nonce else GradeReason.RESULT_TAMPERED
    assert verdict(log, nonce)[1] is expected


def test_a_marker_that_is_echoed_and_traced_is_one_marker() -> None:
    echoed = "+ echo '>>>>> Start Test Output'\n>>>>> Start Test Output\n"
    log = script_log(session("t.py::a PASSED")).replace("+ : '>>>>> Start Test Output'\n", echoed)
    assert verdict(log)[0] is Verdict.SOLVED


@pytest.mark.parametrize("end", [RunEnd.TIMEOUT, RunEnd.OUT_OF_MEMORY])
def test_how_the_sandbox_saw_it_end_goes_before_the_log(end: RunEnd) -> None:
    log = script_log(session("t.py::a PASSED"))
    judgement, _ = judge_log(log, parser="pytest", required=["t.py::a"], end=end)
    assert judgement.needs_reference


def test_an_id_cut_within_its_parameters_stands_for_all_that_begin_with_it() -> None:
    statuses = {"t::a[x y]": PASSED, "t::a[x z]": PASSED, "t::b[x y]": PASSED, "t::b[x z]": FAILED}
    assert required_statuses(["t::a[x", "t::b[x", "t::a", "t::c"], statuses) == {
        "t::a[x": PASSED,
        "t::b[x": FAILED,
    }
