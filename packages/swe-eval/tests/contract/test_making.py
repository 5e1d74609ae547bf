"""Tasks from a repository, made in real sandboxes and graded in real sandboxes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_client import SandboxClient
from service_kit.channel import ChannelConfig
from swe_eval import Grader, GradingConfig, ServiceHost, Task, Verdict, read_task
from swe_eval.errors import RepositoryError
from swe_eval.making import suite
from swe_eval.making.maker import MakeOptions, Summary, make_tasks
from swe_eval.making.source_tree import read_repository
from swe_eval.tasks.harbor import EnvironmentMode, HarborOptions, find_tasks

SHOP = "def f():\n    return 1 + 0\n"
TREE = HarborOptions(environment=EnvironmentMode.TREE)
KINDS = ("operator_change", "remove_assign")
FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q -x'\n",
    "README.md": "# shop\n",
    "src/shop/__init__.py": "from shop.sums import add, drain, total\n",
    "witness.py": "here = True\n",
    "tests/[old]/test_old.py": "import absent\n",
    "src/shop/sums.py": '''\ufeff\
def add(a, b):
    """Their sum."""
    return a + b


def total(items):
    result = 0
    for item in items:
        result += item
    return result


def drain(items):
    count = 0
    while items:
        last = items.pop()
        count = count + 1
    return count


def never_broken(a):
    return a + 2


def never_called(a):
    return a + 1


def shown_by_its_test(a):
    return a + 3
''',
    "docs/tests.txt": "def test_in_the_docs():\n    assert shown_by_its_test(1) == 4\n",
    "tests/base.py": """\
from shop import drain

SUMS = []


class Counted:
    def test_inherited(self):
        assert drain([1, 2, 3]) == 3


class Other:
    def test_other(self):
        pass
""",
    "tests/test_inherits.py": """\
from base import Counted


class TestCounted(Counted):
    pass
""",
    "docs/old.txt": "def never_broken(a):\n    return a + 2\n",
    "tests/conftest.py": (
        "import pytest\n\n\n@pytest.fixture\ndef items():\n    return [1, 2, 4]\n"
    ),
    "tests/test_sums.py": """\ufeff\
import os
import sys

import pytest
import witness

from shop import add, drain, total
from shop.sums import never_broken, shown_by_its_test

CLEAN = not os.path.exists("left behind")


SUMS = [(1, 2, 3), (5, 5, 10)]


@pytest.mark.parametrize("a, b, c", SUMS)
def test_add(a, b, c):
    assert add(a, b) == c


def test_total(items):
    # Stays behind whenever it fails.
    os.mkdir("work")
    open("/tmp/shop.lock", "x").close()
    assert total(items) == 7
    os.rmdir("work")
    os.unlink("/tmp/shop.lock")
    open("left behind", "w").close()


class TestDrain:
    def test_count(self):
        assert drain([1, 2]) == 2


def test_of_nothing():
    assert CLEAN  # what a run leaves behind is gone in the next
    assert total([]) == 0


def test_never_broken():
    assert never_broken(1) == 3


def test_in_the_docs():
    assert shown_by_its_test(1) == 4


def test_of_modes():
    os.umask(0o777)
    assert witness.here


def test_that_fails():
    assert add(1, 1) == 3


def test_of_hashes():
    assert hash("a") % 1000 == test_of_hashes.seen


test_of_hashes.seen = hash("a") % 1000


@pytest.mark.skip
def test_skipped():
    pass


def test_that_needs_to_be_before_the_last():
    sys.early = True


def test_last():
    assert sys.early
""",
}


def write(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(sandbox_target: str) -> AsyncIterator[SandboxClient]:
    config = ChannelConfig(target=sandbox_target)
    async with SandboxClient(config, owner="make", call_timeout_s=60.0) as client:
        yield client


async def make(client: SandboxClient, repository: Path, out: Path, **options: object) -> Summary:
    chosen = {"count": 100, "per_function": 0, "timeout_s": 12.0, "kinds": KINDS, **options}
    return await make_tasks(
        read_repository(repository),
        out,
        MakeOptions(**chosen),  # type: ignore[arg-type]
        client,
        python="3.11",
        requirements=("pytest==9.0.0",),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(
    client: SandboxClient, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Summary]:
    """The repository, all tasks that can be made of it, and what became of the candidates."""
    folder = tmp_path_factory.mktemp("made")
    repository = write(folder / "shop")
    out = folder / "tasks"
    return repository, out, await make(client, repository, out, jobs=1)


Made = tuple[Path, Path, Summary]


@pytest.mark.asyncio(loop_scope="module")
async def test_tests_that_are_no_proof_are_left_out(made: Made) -> None:
    _, out, summary = made
    # test_last and its like end one way in order and another in reverse.
    assert summary.tests_left_out == {"failing": 1, "skipped": 1, "unsteady": 1}
    required = {t for folder in find_tasks(out) for t in graded(folder).grader.required}  # type: ignore[union-attr]
    names = {test.rpartition("::")[2].partition("[")[0] for test in required}
    assert not names & {"test_that_fails", "test_skipped", "test_last"}
    assert {"test_add", "test_total", "test_count"} <= names


def graded(folder: Path) -> Task:
    return read_task(folder, TREE)


@pytest.mark.asyncio(loop_scope="module")
async def test_every_bug_is_noticed_within_time_and_where_a_test_reaches(made: Made) -> None:
    _, out, summary = made
    tasks = [graded(folder) for folder in find_tasks(out)]
    assert summary.kept == summary.new == len(tasks) >= 7
    # Of a function that is in the docs, too, and of one whose test is.
    assert summary.outcomes["shown"] == 4
    assert summary.outcomes["timeout"] >= 1  # `items.pop()` taken out
    assert sum(summary.outcomes.values()) == summary.tried == summary.candidates
    assert {task.columns["function"] for task in tasks} == {"add", "total", "drain"}
    assert len({task.columns["fingerprint"] for task in tasks}) == len(tasks)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_one_bugs_run_leaves_behind_fails_no_test_of_another(made: Made) -> None:
    _, out, _ = made
    failing: dict[str, set[str]] = {"add": set(), "total": set(), "drain": set()}
    for task in map(graded, find_tasks(out)):
        for test in task.grader.fail_to_pass:  # type: ignore[union-attr]
            failing[str(task.columns["function"])].add(test.rpartition("::")[2].partition("[")[0])
    assert failing == {
        "add": {"test_add"},
        "total": {"test_total", "test_of_nothing"},
        "drain": {"test_count", "test_inherited"},
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_the_agent_sees_the_bug_and_not_the_tests_that_notice_it(made: Made) -> None:
    repository, out, _ = made
    for folder in find_tasks(out):
        task = graded(folder)
        files = {path: file.content.decode() for path, file in task.environment.files.items()}
        assert files["src/shop/sums.py"] != FILES["src/shop/sums.py"]
        for test in task.grader.fail_to_pass:  # type: ignore[union-attr]
            name = test.rpartition("::")[2].partition("[")[0]
            assert f"def {name}(" not in files["tests/test_sums.py"]
            # The other file that has one of its own does not import this.
            assert ("SUMS" in files["tests/test_sums.py"]) == (task.columns["function"] != "add")
        assert task.environment.env == {"PYTHONPATH": "/app/src"}
        if task.columns["function"] == "drain":
            assert "tests/test_inherits.py" not in files
            assert "test_inherited" not in files["tests/base.py"]
            assert "class Other" in files["tests/base.py"]
    one = next(f for f in find_tasks(out) if graded(f).columns["function"] == "add")
    assert "`add(a, b)`" in graded(one).instruction
    assert contents(repository) == {path: text.encode() for path, text in sorted(FILES.items())}


@pytest.mark.asyncio(loop_scope="module")
async def test_gold_solves_and_nothing_does_not_whatever_the_bug(
    made: Made, client: SandboxClient
) -> None:
    _, out, _ = made
    grader = Grader(ServiceHost(client, start_timeout_s=30.0), GradingConfig(concurrency=2))
    kinds = {graded(folder).kind: graded(folder) for folder in find_tasks(out)}
    assert set(kinds) == set(KINDS)

    async def prove(task: Task) -> None:
        untouched = await grader.grade_untouched(task, attempt="empty")
        gold = await grader.grade_reference(task, attempt="gold")
        assert (untouched.verdict, gold.verdict) == (Verdict.UNSOLVED, Verdict.SOLVED), task.task_id
        failed = {test.name for test in untouched.tests if test.status != "passed"}
        assert failed == set(task.grader.fail_to_pass)  # type: ignore[union-attr]

    await asyncio.gather(*(prove(task) for task in kinds.values()))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_same_tasks_to_the_byte_with_other_workers_and_after_an_interruption(
    made: Made, client: SandboxClient, tmp_path: Path
) -> None:
    repository, all_tasks, _ = made
    several, stopped = tmp_path / "several", tmp_path / "stopped"
    await make(client, repository, several, jobs=2, count=4)
    assert len(find_tasks(several)) == 4
    everything = contents(all_tasks)
    assert all(everything[path] == content for path, content in contents(several).items())
    # As a kill leaves it: some tasks are there, one was being written.
    for folder in find_tasks(several)[::2]:
        shutil.copytree(folder, stopped / folder.name)
    shutil.copytree(find_tasks(several)[1], stopped / f".{find_tasks(several)[1].name}.partial")
    summary = await make(client, repository, stopped, jobs=1, count=4)
    assert (summary.kept, summary.new) == (4, 2)
    assert contents(stopped) == contents(several)
    # Another seed adds, and repeats none.
    before = contents(stopped)
    summary = await make(client, repository, stopped, jobs=1, count=2, seed=1)
    assert (summary.kept, summary.new) == (2, 2)
    tasks = [graded(folder) for folder in find_tasks(stopped)]
    assert len({task.columns["fingerprint"] for task in tasks}) == 6
    assert before.items() <= contents(stopped).items()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_task_folder_that_tells_not_what_it_is_is_named(
    made: Made, client: SandboxClient, tmp_path: Path
) -> None:
    repository, out, _ = made
    one = find_tasks(out)[0].name
    (tmp_path / one).mkdir()
    (tmp_path / one / "task.toml").write_text("[metadata")
    with pytest.raises(RepositoryError, match=f"{one}/task.toml can't be read"):
        await make(client, repository, tmp_path)
    (tmp_path / one / "task.toml").unlink()
    with pytest.raises(ExceptionGroup) as raised:
        await make(client, repository, tmp_path)
    assert raised.group_contains(RepositoryError, match=f"{one} is where a task should go")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"shop.py": SHOP}, "has no tests"),
        ({"test_a.py": "def test_a():\n    pass\n"}, "no source with a function"),
        (
            {
                "shop.py": SHOP,
                "test_a.py": "from shop import f\n\n\ndef test_a():\n    assert f() == 2\n",
            },
            "no test of shop passes .1 failing",
        ),
        (
            {"shop.py": SHOP, "test_a.py": "import absent\n"},
            "No module named 'absent'",
        ),
        (
            {
                "shop.py": SHOP,
                "test_a.py": "",
                "pytest.ini": "[pytest]\naddopts = --cov=shop -n 2\n",
            },
            "unrecognized arguments: --cov=shop -n.*from addopts",
        ),
        (
            {
                "shop.py": SHOP,
                "test_a.py": "import pytest\n\npytest.skip(allow_module_level=True)\n",
            },
            "finds no test that it can run: 1 skipped",
        ),
        (
            {
                "shop.py": SHOP,
                "test_a.py": "def test_a():\n    while True:\n        pass\n",
            },
            "take longer than 1 s",
        ),
        (
            {
                "shop.py": SHOP,
                "test_a.py": "import time\n\n\ndef test_a():\n    time.sleep(1.2)\n",
            },
            "of them on a processor",
        ),
        (
            {
                "shop.py": SHOP,
                "test_a.py": "def test_a():\n    pass\n",
            },
            "no test of shop reaches",
        ),
    ],
    ids=[
        "no tests",
        "no source",
        "failing",
        "missing package",
        "plug-in's options",
        "skipped",
        "endless",
        "waiting",
        "not reached",
    ],
)
async def test_a_repository_that_gives_nothing_is_refused_with_the_reason(
    client: SandboxClient, tmp_path: Path, files: dict[str, str], words: str
) -> None:
    tests = files.get("test_a.py", "")
    timeout_s = 1.0 if "while" in tests or "sleep" in tests else 12.0
    repository = write(tmp_path / "shop", files)
    with pytest.raises(RepositoryError, match=words):
        await make(client, repository, tmp_path / "out", timeout_s=timeout_s)


@pytest.mark.asyncio(loop_scope="module")
async def test_more_tests_than_a_task_may_have_are_refused_before_any_task_is_made(
    client: SandboxClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "MAX_TESTS", 1)
    tests = "from shop import f\n\n\ndef test_a():\n    assert f() == 1\n\n\ntest_b = test_a\n"
    repository = write(tmp_path / "shop", {"shop.py": SHOP, "test_a.py": tests})
    with pytest.raises(RepositoryError, match="2 tests of shop pass; a task has at most 1"):
        await make(client, repository, tmp_path / "out")
