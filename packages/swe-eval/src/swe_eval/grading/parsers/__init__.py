"""The repository's own runner, read through its log: text to the status of each test.

A log is the weakest evidence there is. The tested code runs in the process that writes it, so what
it prints looks like what the runner prints. The parsers take the strict reading wherever two are
possible: any failure of a test outweighs any pass of it, results count only where the runner puts
them, and a log that says of itself that it is cut off or that more tests passed than were run is
no proof. What none of them can see is code that prints a whole plausible log and then ends the
process before the runner has its say: no test fails in such a log. Where it matters, tests run
under `grading.runner`, whose results don't travel in a log.
"""

import functools
from collections.abc import Mapping

from swe_eval.grading.parsers.log import (
    END_OF_TESTS,
    EXIT_CODE,
    START_OF_TESTS,
    LogParser,
    ParsedLog,
    graded_part,
    required_statuses,
    run_end,
)
from swe_eval.grading.parsers.pytest_log import parse_pytest
from swe_eval.grading.parsers.sympy_log import parse_sympy
from swe_eval.grading.parsers.unittest_log import parse_unittest

_WITH_PATHS = functools.partial(parse_pytest, short_paths=True)
_WITH_BUTTONS = functools.partial(parse_pytest, plain_buttons=True)

PARSERS: Mapping[str, LogParser] = {
    "pytest": parse_pytest,
    "unittest": parse_unittest,
    "django": parse_unittest,
    "sympy": parse_sympy,
    # As the column log_parser of SWE-bench 5 names them.
    **dict.fromkeys(
        [
            f"parse_log_{name}"
            for name in (
                "pytest",
                "pytest_v2",
                "astroid",
                "astropy",
                "flask",
                "marshmallow",
                "pvlib",
                "pyvista",
                "scikit",
                "seaborn",
                "sphinx",
                "sqlfluff",
                "xarray",
            )
        ],
        parse_pytest,
    ),
    **dict.fromkeys(
        [f"parse_log_{name}" for name in ("pytest_options", "pydicom", "pylint", "requests")],
        _WITH_PATHS,
    ),
    "parse_log_matplotlib": _WITH_BUTTONS,
    "parse_log_django": parse_unittest,
    "parse_log_sympy": parse_sympy,
}
"""Parsers by name."""

__all__ = [
    "END_OF_TESTS",
    "EXIT_CODE",
    "PARSERS",
    "START_OF_TESTS",
    "LogParser",
    "ParsedLog",
    "graded_part",
    "parse_pytest",
    "parse_sympy",
    "parse_unittest",
    "required_statuses",
    "run_end",
]
