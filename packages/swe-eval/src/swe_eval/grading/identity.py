"""The identity of the code that judges, so that a judgement by another is told from its own."""

import functools
import hashlib
import importlib.resources
from collections.abc import Iterator
from importlib.resources.abc import Traversable

__all__ = ["judge_digest"]

_JUDGES = ("grading", "core/verdict.py", "core/selftest.py")


@functools.cache
def judge_digest() -> str:
    """SHA-256, in hexadecimal, over the sources that grade tasks and decide about a self-test."""
    found = hashlib.sha256()
    package = importlib.resources.files("swe_eval")
    for source in (s for name in _JUDGES for s in _sources(package.joinpath(name))):
        found.update(hashlib.sha256(source.read_bytes()).digest())
    return found.hexdigest()


def _sources(place: Traversable) -> Iterator[Traversable]:
    if place.is_dir():
        for inner in sorted(place.iterdir(), key=lambda inner: inner.name):
            yield from _sources(inner)
    elif place.name.endswith(".py"):
        yield place
