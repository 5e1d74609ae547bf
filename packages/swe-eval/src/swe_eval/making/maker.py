"""Makes tasks from a repository: finds bugs that its tests notice and writes them down.

An interrupted making goes on where it was: the tasks that are there are counted, not made again.
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandbox_client import SandboxClient

from swe_eval.errors import RepositoryError
from swe_eval.generate.places import Place, find_places
from swe_eval.generate.plan import Candidate, Known, in_turn
from swe_eval.generate.repository_task import SuiteSetting
from swe_eval.making.box import MEMORY_BYTES, MIB, SuiteSandbox
from swe_eval.making.copies import Span, find_copies, find_copies_of_tests
from swe_eval.making.options import MakeOptions, Summary
from swe_eval.making.pipeline import Pipeline, Tell
from swe_eval.making.source_tree import SourceTree
from swe_eval.making.suite import Baseline, run_baseline
from swe_eval.making.words import ChatWriter
from swe_eval.tasks.harbor import find_tasks

__all__ = ["MakeOptions", "Summary", "make_tasks"]

logger = logging.getLogger(__name__)


async def make_tasks(
    tree: SourceTree,
    out: Path,
    options: MakeOptions,
    client: SandboxClient,
    *,
    python: str,
    requirements: Sequence[str],
    writer: ChatWriter | None = None,
    tell: Tell = lambda _: None,
) -> Summary:
    """Writes task directories below `out`, each whole or not at all.

    Args:
        tree: The repository; its tests have to pass.
        out: Folder of tasks; what is there stays.
        options: What to make.
        client: A sandbox service whose Python has what the tests need.
        python: That Python's version, `3.11`.
        requirements: Its packages, `name==version`.
        writer: Words the issues, instead of the template alone.
        tell: Is told of progress, a line each.

    Raises:
        RepositoryError: nothing can be made of this repository.
        ServiceError: the sandbox service fails.
    """
    known = known_tasks(out, source=tree.short_digest, seed=options.seed)
    places = await asyncio.to_thread(_find_places, tree, options)
    python_path = ["src"] if any(path.startswith("src/") for path in places) else []
    setting = SuiteSetting(
        python=python,
        requirements=requirements,
        python_path=python_path,
        timeout_s=options.timeout_s,
        memory_mb=MEMORY_BYTES // MIB,
    )
    env = {"PYTHONPATH": ":".join(f"/app/{folder}" for folder in python_path)}
    boxes = [SuiteSandbox(client, tree, env if python_path else {}) for _ in range(options.jobs)]
    try:
        tell(f"{tree.name}: running its tests")
        spans = {path: sorted({_span(place) for place in found}) for path, found in places.items()}
        baseline = await run_baseline(
            boxes[0], tree, spans=spans, exclude=options.exclude, timeout_s=options.timeout_s
        )
        candidates = in_turn(
            (
                Candidate(path, place, tests)
                for path, found in places.items()
                for place in found
                if (tests := baseline.reached[path].get(_span(place)))
            ),
            seed=f"{options.seed} {tree.name}",
        )
        if not candidates:
            raise RepositoryError(
                f"no test of {tree.name} reaches a function where a bug could go; see --include, "
                "--exclude and --kinds"
            )
        tell(
            f"{tree.name}: {len(baseline.required)} tests pass in {baseline.cpu_s:.1f} s, "
            f"{len(candidates)} bugs possible"
        )
        shown, shown_tests = await asyncio.to_thread(_find_copies, tree, baseline)
        if shown:
            (path, span), at = min(shown.items())
            tell(
                f"{tree.name}: {len(shown)} functions with no bug, for they stand elsewhere too: "
                f"{path}:{span[0]} in {at}"
            )
        pipeline = Pipeline(
            tree=tree,
            out=out,
            options=options,
            setting=setting,
            baseline=baseline,
            candidates=candidates,
            known=known,
            shown=shown.keys(),
            shown_tests=shown_tests,
            writer=writer,
            tell=tell,
        )
        await pipeline.run(boxes)
        return pipeline.summary()
    finally:
        await asyncio.gather(*(box.close() for box in boxes), return_exceptions=True)


def _find_places(tree: SourceTree, options: MakeOptions) -> dict[str, list[Place]]:
    found = {}
    for path in tree.sources(options.include, options.exclude):
        try:
            places = find_places(tree.texts[path], kinds=options.kinds)
        except ValueError as error:
            logger.info("%s: %s", path, error)
            continue
        if places:
            found[path] = places
    if not found:
        raise RepositoryError(
            f"{tree.name} has no source with a function where a bug could go; see --include, "
            "--exclude and --kinds"
        )
    return found


def _find_copies(
    tree: SourceTree, baseline: Baseline
) -> tuple[Mapping[tuple[str, Span], str], frozenset[str]]:
    reached = {path: list(spans) for path, spans in baseline.reached.items()}
    return (
        find_copies(tree.contents, tree.texts, reached),
        find_copies_of_tests(tree.contents, tree.texts, baseline.required),
    )


def _span(place: Place) -> tuple[int, int]:
    return place.first_line, place.last_line


def known_tasks(out: Path, *, source: str, seed: int) -> dict[str, Known]:
    """The tasks made from repositories below a folder, by fingerprint.

    Raises:
        RepositoryError: of one this can't be told.
    """
    known: dict[str, Known] = {}
    for folder in find_tasks(out) if out.is_dir() else ():
        try:
            values = tomllib.loads((folder / "task.toml").read_text("utf-8")).get("metadata", {})
        except (OSError, ValueError) as error:
            raise RepositoryError(
                f"{folder / 'task.toml'} can't be read, so that it is not known which task it is: "
                f"{error}; repair it, or remove {folder}"
            ) from error
        fingerprint = values.get("fingerprint")
        if isinstance(fingerprint, str):
            ours = values.get("source") == source and values.get("seed") == seed
            known[fingerprint] = Known(ours=ours, behaviour=str(values.get("behaviour", "")))
    return known
