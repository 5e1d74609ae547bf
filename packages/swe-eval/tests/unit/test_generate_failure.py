from __future__ import annotations

import random

import pytest
from swe_eval.generate.failure import Failure, chat_messages, leaks, stable, write_report

PATCH = """\
diff --git a/m.py b/m.py
--- a/m.py
+++ b/m.py
@@ -1,2 +1,2 @@
 def add(first, second):
-    return first - second
+    return first + second
"""
COMPARED = Failure(test="t.py::test_add", form="compared", call="add(2, 3)", got="-1", want="5")


def report(*failures: Failure, seed: int = 0, patch: str = PATCH) -> str:
    return write_report(
        random.Random(seed),
        function="Shop.add",
        failures=failures,
        failing=["t.py::TestShop::test_sums_of_two[1-2]"],
        patch=patch,
    )


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (COMPARED, "`add(2, 3)` gives `-1`, expected `5`."),
        (
            Failure(test="t", form="compared", call="f(x)", got="1", want="2", given={"x": "[3]"}),
            "With `x = [3]`, `f(x)` gives `1`, expected `2`.",
        ),
        (
            Failure(test="t", form="raised", error="KeyError", message="'a'", call="f()"),
            "`f()` raises `KeyError: 'a'`.",
        ),
        (
            Failure(test="t", form="raised", error="TypeError", call="f()", want="3"),
            "`f()` raises `TypeError`, expected `3`.",
        ),
        (
            Failure(test="t", form="raised", error="TypeError", call="f()", want="raises KeyError"),
            "`f()` raises `TypeError`, expected `KeyError`.",
        ),
        (
            Failure(test="t", form="not_raised", error="Failed", call="f()", want="KeyError"),
            "`f()` should raise `KeyError`, but raises nothing.",
        ),
        (
            Failure(test="t", form="truth", call="f()", got="[]"),
            "`f()` gives `[]`, which should count as true.",
        ),
        (
            Failure(test="a/t.py::T::test_odd_ones[x]", error="KeyError", message="3"),
            "This no longer works: odd ones. It ends with `KeyError: 3`.",
        ),
        (
            Failure(test="t.py::test_odd", error="AssertionError", message="assert secret"),
            "This no longer works: odd.",
        ),
    ],
)
def test_sentence_says_what_was_called_seen_and_expected(failure: Failure, sentence: str) -> None:
    assert failure.sentence() == sentence


def test_report_is_titled_by_what_was_called() -> None:
    nested = Failure(test="t", form="raised", error="KeyError", call="sorted(take(2, x))")
    assert "`add`" in report(COMPARED).partition("\n\n")[0]
    assert "take" in report(nested).partition("\n\n")[0]
    assert "KeyError" in report(nested).partition("\n\n")[0]


def test_report_about_the_tests_own_function_is_titled_by_what_that_calls() -> None:
    own = Failure(
        test="t",
        form="compared",
        call="f(s)",
        got="1",
        want="2",
        given={"f": "lambda s: shop.add(s, 1)", "s": "1"},
    )
    assert "`shop.add`" in report(own).partition("\n\n")[0]


def test_report_without_a_telling_failure_has_the_tests_words() -> None:
    title, body = report().split("\n\n")
    assert "`add`" in title
    assert body == "This no longer works: sums of two."


def test_report_shows_two_failures_at_most_and_the_same_for_a_seed() -> None:
    more = [
        Failure(test=f"t{n}", form="compared", call=f"f({n})", got="1", want="2") for n in "abc"
    ]
    text = report(COMPARED, *more, seed=7)
    assert text.count("expected") == 2
    assert text == report(COMPARED, *more, seed=7)


def test_no_line_of_the_repair_shows() -> None:
    leak = Failure(test="t", form="compared", call="return first+second", got="1", want="2")
    assert "first+second" not in report(leak)
    assert leaks("so: return  first\n+ second", ["    return first + second"])
    assert not leaks("it is 1", ["", "x = 1"])  # too short to tell anything


def test_only_what_two_runs_saw_alike_is_shown_the_most_telling_first() -> None:
    vague = Failure(test="v", error="KeyError")
    moody = Failure(test="m", form="compared", call="now()", got="1", want="2")
    other = Failure(test="m", form="compared", call="now()", got="3", want="2")
    assert stable([[vague, moody, COMPARED], [other, COMPARED, vague]]) == [COMPARED, vague]


def test_what_the_sandbox_says_is_text_whatever_it_is() -> None:
    read = Failure.read({"test": "t", "form": 3, "call": None, "given": ["x"], "got": {"a": 1}})
    assert read == Failure(test="t", form="other", got="{'a': 1}")
    assert read.sentence().startswith("This no longer works")
    assert stable([[read]]) == [read]


def test_the_prompt_holds_the_report_and_nothing_else_of_the_task() -> None:
    messages = chat_messages("`add(2, 3)` gives `-1`", repository="shop")
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"] == "Package: shop\n\n`add(2, 3)` gives `-1`"


def test_paths_of_the_making_show_in_no_issue() -> None:
    path = "PosixPath('/tmp/make/scratch/tmp/x')"
    values = {"test": "t.py::test_files", "form": "raised", "error": "OSError", "call": "f(x)"}
    for more in ({"given": {"x": path}}, {"message": path}, {"got": path}, {"want": path}):
        failure = Failure.read({**values, **more})
        assert not failure.is_telling
        assert failure.sentence() == "This no longer works: files. It ends with `OSError`."
    assert Failure.read(values).is_telling
