"""Compares the log parsers of swe-eval with SWE-bench's own grader, on real logs.

    python3 -m venv ORACLE && ORACLE/bin/pip install --no-deps swebench==5.0.2 unidiff
    uv run python tools/check_parsers.py --oracle ORACLE/bin/python [--write]

The oracle stays in an environment of its own. `--write` keeps what it says as the expectation that
the unit tests compare with, so that they need no oracle. The table printed is the one in
`docs/results.md`; the exit code is 1 when a verdict differs, or a status without a known reason.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swe_eval.core.verdict import TestStatus, Verdict, judge
from swe_eval.grading.parsers import (
    PARSERS,
    START_OF_TESTS,
    ParsedLog,
    graded_part,
    required_statuses,
    run_end,
)

LOGS = Path(__file__).parent.parent / "packages/swe-eval/tests/data/logs"
EXPECTED = "expected.json"
ORACLE = """
import importlib.util, json, pathlib, sys, types
folder = pathlib.Path(importlib.util.find_spec("swebench").submodule_search_locations[0])
# The package imports docker and datasets, which its pure modules don't need.
package = types.ModuleType("swebench.harness")
package.__path__ = [str(folder / "harness")]
sys.modules["swebench.harness"] = package
from swebench.harness import grading
from swebench.types import TestSpec
answers = {}
for case in json.load(sys.stdin):
    if case["parser"] not in grading.PARSER_REGISTRY:
        continue
    report = case["report"]
    spec = TestSpec(instance_id=case["log"], image="", eval_script_list=[], repo="", version="",
        FAIL_TO_PASS=report.get("FAIL_TO_PASS", []), PASS_TO_PASS=report.get("PASS_TO_PASS", []),
        log_parser=case["parser"], eval_type="pass_and_fail")
    statuses = grading.PARSER_REGISTRY[case["parser"]](case["text"], spec)
    answer = {"statuses": {}}
    for name, status in statuses.items():
        answer["statuses"].setdefault(status, []).append(name)
    if report:
        prediction = {"instance_id": case["log"], "model_patch": "x"}
        found = grading.get_eval_report(spec, prediction, case["path"], True)[case["log"]]
        answer["resolved"] = found["resolved"]
    answers[case["log"]] = answer
json.dump(answers, sys.stdout)
"""
THEIRS = {
    "PASSED": TestStatus.PASSED,
    "XFAIL": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "ERROR": TestStatus.ERROR,
    "SKIPPED": TestStatus.SKIPPED,
}


def read_cases(folder: Path) -> list[dict[str, Any]]:
    """The logs with their parsers' names and, where there is a report, the required tests."""
    cases: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text())
    for case in cases:
        path = folder / case["log"]
        text = path.read_text()
        case["path"] = str(path)
        case["text"] = graded_part(text).text if START_OF_TESTS in text else text
        case["report"] = required_of(folder / case["report"]) if "report" in case else {}
    return cases


def required_of(report: Path) -> dict[str, list[str]]:
    """FAIL_TO_PASS and PASS_TO_PASS of an evaluation's report."""
    values = json.loads(report.read_text())
    tests = values.get("tests_status") or next(iter(values.values()))["tests_status"]
    return {
        key: tests[key]["success"] + tests[key]["failure"]
        for key in ("FAIL_TO_PASS", "PASS_TO_PASS")
    }


def ask_oracle(python: str, cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What SWE-bench's grader says of each log."""
    done = subprocess.run(
        [python, "-c", ORACLE], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{python} can't run SWE-bench's grader:\n{done.stderr}")
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def compare(parsed: ParsedLog, answer: dict[str, Any]) -> dict[str, Any]:
    """What is the same, and each difference with its reason; an empty reason explains nothing."""
    theirs = {name: THEIRS.get(w) for w, names in answer["statuses"].items() for name in names}
    ours = required_statuses(list(theirs), parsed.statuses)
    same: dict[str, list[str]] = {}
    differences = []
    for name, status in theirs.items():
        if ours.get(name) is status is not None:
            same.setdefault(str(status), []).append(name)
            continue
        here = ours.get(name, TestStatus.MISSING)
        there = str(status or "no status")
        differences.append([name, there, str(here), why_not_here(name, parsed)])
    cut = [name for name in theirs if name.count("[") > name.count("]")]
    for name, status in parsed.statuses.items():
        if name not in theirs and not name.startswith(tuple(cut)):
            differences.append([name, "missing", str(status), why_not_there(name, parsed)])
    return {"same": same, "differences": differences}


def why_not_here(name: str, parsed: ParsedLog) -> str:
    """Why SWE-bench has a test, or its status, that we have not."""
    whole = [n for n in parsed.statuses if n.startswith(f"{name} (") or name.endswith(f":{n}")]
    if any(parsed.statuses[n] in (TestStatus.FAILED, TestStatus.ERROR) for n in whole):
        return "a failure that they name by a part of a heading, and we by the test's own name"
    if (name.startswith("test_") and ".py" in name) or " " not in name:
        return "text that a test printed, of a run of pytest inside of it"
    return ""


def why_not_there(name: str, parsed: ParsedLog) -> str:
    """Why we have a test that SWE-bench has not."""
    if re.fullmatch(r"\w+ \([\w.]+\)", name):
        return "a test with a docstring, which we name by its id too"
    if parsed.statuses[name] is TestStatus.ERROR:
        return "a test with a docstring that is broken off by output; its result stands below"
    if re.fullmatch(r"test_\w+", name):
        return "the last test of a file, whose line ends with the file's result"
    if parsed.statuses[name] is TestStatus.PASSED and "::" in name:
        return "an expected failure, which their parser for this repository leaves out"
    return ""


def verdict_of(parsed: ParsedLog, required: dict[str, list[str]]) -> bool:
    """Whether we call it solved."""
    tests = [*required["FAIL_TO_PASS"], *required["PASS_TO_PASS"]]
    end, _ = run_end(parsed)
    statuses = required_statuses(tests, parsed.statuses)
    return judge(required=tests, statuses=statuses, end=end).verdict is Verdict.SOLVED


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--oracle", required=True, help="a Python that has swebench 5")
    arguments.add_argument("--logs", type=Path, default=LOGS, help="folder with a cases.json")
    arguments.add_argument("--write", action="store_true", help=f"keep its answers in {EXPECTED}")
    options = arguments.parse_args()
    cases = read_cases(options.logs)
    answers = ask_oracle(options.oracle, cases)
    cases = [case for case in cases if case["log"] in answers]
    kept: dict[str, Any] = {}
    print("| log | parser | tests | same | differ | unexplained | resolved there | solved here |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    wrong = 0
    for case in cases:
        parsed = PARSERS[case["parser"]](case["text"])
        answer = answers[case["log"]]
        found = kept[case["log"]] = compare(parsed, answer)
        theirs = answer.get("resolved", "-")
        ours = verdict_of(parsed, case["report"]) if case["report"] else "-"
        same = sum(map(len, found["same"].values()))
        unexplained = [entry for entry in found["differences"] if not entry[3]]
        wrong += (theirs != ours) + len(unexplained)
        tests = sum(map(len, answer["statuses"].values()))
        name = case["parser"].removeprefix("parse_log_")
        print(
            f"| {case['log']} | {name} | {tests} | {same} | {len(found['differences'])} "
            f"| {len(unexplained)} | {theirs} | {ours} |"
        )
    reasons = Counter(entry[3] for found in kept.values() for entry in found["differences"])
    print()
    for reason, number in reasons.most_common():
        print(f"{number} times: {reason}")
    if options.write:
        text = json.dumps(kept, indent=1, sort_keys=True)
        (options.logs / EXPECTED).write_text(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
