"""A run of a `LogGrader`: its script made ready, and the judgement of its log. No I/O."""

import re
from collections.abc import Sequence

from swe_eval.core.verdict import Judgement, RunEnd, judge
from swe_eval.grading.parsers import (
    END_OF_TESTS,
    EXIT_CODE,
    PARSERS,
    START_OF_TESTS,
    graded_part,
    required_statuses,
    run_end,
)

LOG_FILE = "log"
RUN_LOGGED = f'exec /bin/bash "$0/eval.sh" >"$0/{LOG_FILE}" 2>&1'
"""Given to `bash -c` with the folder of `eval.sh`. The log goes to a file, for it may be long."""
MAX_LOG_BYTES = 16 * 1024 * 1024
"""What is read of a log; the tests of a longer one are missing."""


def with_nonce(script: str, nonce: str) -> str:
    """The script with a nonce in its markers, telling the exit code of its test command.

    The nonce keeps apart what the script and what the change under test bring into the log. The
    tested code, running beside the script, could find it out.
    """
    lines: list[str] = []
    for line in script.split("\n"):
        if END_OF_TESTS in line:
            told = f'echo "{EXIT_CODE}{nonce}: $tests_exit_code"'
            lines += ["tests_exit_code=$?", line.replace(END_OF_TESTS, END_OF_TESTS + nonce), told]
        else:
            lines.append(re.sub(f"{START_OF_TESTS}(?=\\W|$)", START_OF_TESTS + nonce, line))
    return "\n".join(lines)


def named_in_command(script: str) -> frozenset[str]:
    """Paths that the test command names: its runner, where the repository has one of its own."""
    words = re.findall(r"[\w./-]+", graded_part(script).text)
    return frozenset(word.removeprefix("./") for word in words if "/" in word or "." in word)


def judge_log(
    log: str, *, parser: str, required: Sequence[str], nonce: str = "", end: RunEnd
) -> tuple[Judgement, str]:
    """The verdict that a log supports, and how the run ended in words.

    Args:
        log: All that the script printed.
        parser: Name in `PARSERS`.
        required: Fail-to-pass and pass-to-pass tests; at least one.
        nonce: As given to `with_nonce`.
        end: FINISHED unless who ran the script knows better.
    """
    part = graded_part(log, nonce=nonce)
    parsed = PARSERS[parser](part.text)
    detail = part.detail
    if end is RunEnd.FINISHED:
        end = part.end
    if end is RunEnd.FINISHED:
        end, detail = run_end(parsed, exit_code=part.exit_code)
    statuses = {**parsed.statuses, **required_statuses(required, parsed.statuses)}
    return judge(required=required, statuses=statuses, end=end), detail
