"""What a sandbox says of test runs, which the tested code can write to."""

import json

import pytest
from swe_eval.making.box import results_in

RESULTS = [{"id": 0, "end": "finished"}, {"id": 1, "end": "timeout"}]
LINES = "".join(f"{json.dumps(result)}\n" for result in RESULTS)


@pytest.mark.parametrize(
    "rest", ["", '{"id": 2, "end', "no json\n", "[]\n", '{"id": 2}\n', "\x00\n" + LINES]
)
def test_what_is_no_result_ends_them(rest: str) -> None:
    assert results_in(LINES + rest) == RESULTS
