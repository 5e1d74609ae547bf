from __future__ import annotations

import bz2
import gzip
import html
import io
import json
import lzma
import tarfile
import zipfile

import pytest
from swe_eval.making.copies import find_copies, find_copies_of_tests
from swe_eval.making.packed import Reader

SUMS = '''\
class Ledger:
    """Keeps entries."""

    def __init__(self, limit):
        self.limit = limit

    def total(self, name):
        """Of one."""
        result = 0
        for who, amount in self.entries:
            if who == name and amount < self.limit:
                result += amount
        return result


def twice(value):
    """Two times."""
    return value * 2
'''
SPANS = {"shop/sums.py": [(1, 13), (4, 5), (7, 13), (16, 18)]}
ALL = {(1, 13), (4, 5), (7, 13), (16, 18)}
TEST = "def test_total():\n    assert Ledger(3).total('a') == 2\n"


def zipped(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


def tarred(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def copied(path: str, content: bytes | str, source: str = SUMS) -> set[tuple[int, int]]:
    """The functions of the source that another file shows."""
    other = content.encode() if isinstance(content, str) else content
    files = {"shop/sums.py": source.encode(), path: other}
    found = find_copies(files, {"shop/sums.py": source}, SPANS)
    assert all(at.startswith(path.removesuffix(".gz")) for at in found.values())
    return {span for _, span in found}


def before(mark: str) -> str:
    return "".join(f"{mark}{line}\n" for line in SUMS.splitlines())


PLAIN = SUMS.encode()
TYPED = SUMS.replace("(self, name)", "(self, name: str) -> int")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("vendor/sums.py", SUMS),
        ("vendor/crlf.py", SUMS.replace("\n", "\r\n")),
        ("docs/deep.rst", before("        ")),
        ("docs/tabs.txt", SUMS.replace("    ", "\t")),
        ("first.patch", "+++ b/shop/sums.py\n@@ -0,0 +1,18 @@\n" + before("+")),
        ("mail.md", before("> ")),
        ("session.rst", before(">>> ")),
        ("listing.txt", "".join(f"{n:3} {t}\n" for n, t in enumerate(SUMS.split("\n"), 1))),
        ("api.html", f"<pre>{html.escape(SUMS)}</pre>"),
        (
            "_modules/sums.html",
            "\n".join(f'<span id="l">{html.escape(line)}</span>' for line in SUMS.split("\n")),
        ),
        ("demo.ipynb", json.dumps({"cells": [{"source": SUMS.splitlines(keepends=True)}]})),
        ("wide.txt", SUMS.encode("utf-16")),
        ("marked.txt", SUMS.encode("utf-8-sig")),
        ("wheels/shop-1-py3-none-any.whl", zipped({"shop/sums.py": PLAIN})),
        ("shop.pyz", b"#!/usr/bin/env python3\n" + zipped({"sums.py": PLAIN})),
        ("data.bin", zipped({"in.zip": zipped({"x": PLAIN})})),
        ("shop.tar", tarred("sums.py", PLAIN)),
        ("shop.tar.gz", gzip.compress(tarred("sums.py", PLAIN))),
        ("shop.tar.xz", lzma.compress(tarred("sums.py", PLAIN))),
        ("shop.tar.bz2", bz2.compress(tarred("sums.py", PLAIN))),
        ("wheels.tar.gz", gzip.compress(tarred("a.whl", zipped({"sums.py": PLAIN})))),
        ("sums.py.gz", gzip.compress(PLAIN)),
        ("shop.egg", zipped({"shop/sums.pyc": b"\xa7"})),
        ("eggs.zip", zipped({"shop/__pycache__/sums.cpython-311.pyc": b"\xa7"})),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value else "",
)
def test_a_copy_is_found_however_it_is_kept(path: str, content: bytes | str) -> None:
    assert copied(path, content) == ALL


def test_a_copy_with_other_names_types_or_docstrings_is_found_by_its_lines() -> None:
    assert (7, 13) in copied("shop/typed.py", TYPED)
    assert (7, 13) in copied("old.py", SUMS.replace("def total", "def _total"))
    bare = SUMS.replace('        """Of one."""\n', "").replace('    """Two times."""\n', "")
    assert {(7, 13), (16, 18)} <= copied("bare.py", bare)


def test_a_class_is_shown_by_a_method_of_it_and_a_short_body_is_nobodys_own() -> None:
    lines = SUMS.split("\n")
    assert copied("docs/total.txt", "\n".join(lines[6:13])) == {(1, 13), (7, 13)}
    assert copied("docs/init.txt", "\n".join(lines[3:5])) == {(4, 5)}
    assert copied("docs/twice.txt", "def double(value):\n    return value * 2\n") == set()


def test_what_only_looks_alike_is_no_copy() -> None:
    assert copied("vendor/sums.py", SUMS.replace("result += amount", "result -= amount")) == {
        (4, 5),
        (16, 18),
    }
    assert copied("notes.txt", "result = 0\nreturn result\n") == set()
    assert copied("other.egg", zipped({"shop/products.pyc": b"\xa7"})) == set()


@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8b damaged", b"PK\x03\x04" + b"\0" * 40, zipped({"a": b"x" * 99})[:-30], b"{"],
    # Archives hold the time of day, and two collections of these tests must have one set of names.
    ids=["gzip", "zip without content", "zip cut off", "json"],
)
def test_what_can_not_be_read_has_no_copies(content: bytes) -> None:
    assert copied("a.ipynb", content) == set()


def test_what_is_packed_beyond_the_limit_is_said_to_be_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bomb = zipped({"a.txt": b"\n" * 5_000_000, "b.txt": b"x"})
    views = list(Reader(max_bytes=1000).views("bomb.zip", bomb))
    assert sum(len(view.text) for view in views if view.path != "bomb.zip") <= 1000
    assert "bomb.zip: not all that is packed" in caplog.text


def test_tests_are_found_where_no_test_is() -> None:
    files = {"tests/test_a.py": TEST.encode(), "tests/test_b.py": TEST.encode()}
    texts = {path: content.decode() for path, content in files.items()}
    tests = ["tests/test_a.py::test_total[1]", "tests/test_b.py::test_total"]
    assert find_copies_of_tests(files, texts, tests) == frozenset()
    files["backup.zip"] = zipped({"tests/test_a.py": TEST.encode()})
    assert find_copies_of_tests(files, texts, tests) == frozenset(tests)
