import pytest
from swe_eval.tasks.dockerfile import read_as_tree
from swe_eval.tasks.task import TreeFile

CONTEXT = {
    "Dockerfile": TreeFile(b"FROM x"),
    "repo/shop.py": TreeFile(b"shop"),
    "repo/pkg/a.py": TreeFile(b"a"),
    "run.sh": TreeFile(b"run", executable=True),
}


def paths(dockerfile: str, **options: str) -> list[str]:
    return sorted(read_as_tree(dockerfile, CONTEXT, **options).files)


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        ("COPY repo/ /app/", ["pkg/a.py", "shop.py"]),
        ("COPY repo .", ["pkg/a.py", "shop.py"]),
        ("COPY ./repo/shop.py ./lib/", ["lib/shop.py"]),
        ("COPY repo/shop.py lib/other.py", ["lib/other.py"]),
        ("ADD run.sh repo/shop.py bin/", ["bin/run.sh", "bin/shop.py"]),
        ('COPY ["run.sh", "start.sh"]', ["start.sh"]),
        ("COPY . .", ["repo/pkg/a.py", "repo/shop.py", "run.sh"]),
        ("COPY --chown=me:me repo/ /app", ["pkg/a.py", "shop.py"]),
    ],
)
def test_copies_land_where_docker_puts_them(copy: str, expected: list[str]) -> None:
    image = read_as_tree(f"FROM x\nWORKDIR /app\n{copy}\n", CONTEXT)
    assert sorted(image.files) == expected
    assert image.skipped == ()
    assert image.workdir == "/app"


def test_modes_survive() -> None:
    assert read_as_tree("WORKDIR /a\nCOPY run.sh .", CONTEXT).files["run.sh"].executable


def test_work_folders_are_relative_to_the_one_before_and_can_be_overridden() -> None:
    text = "WORKDIR /srv\nWORKDIR app\nCOPY repo/ /srv/app/\n"
    assert read_as_tree(text, CONTEXT).workdir == "/srv/app"
    assert paths(text, workdir="/srv") == ["app/pkg/a.py", "app/shop.py"]


def test_without_a_work_folder_there_is_the_default_one() -> None:
    assert read_as_tree("FROM ubuntu", {}).workdir == "/workspace"


def test_variables_are_set_in_both_forms_and_used() -> None:
    text = "ENV A=1 B='two words'\nENV C three four\nENV HOME_=/app\nWORKDIR ${HOME_}/x\n"
    image = read_as_tree(text, CONTEXT)
    assert image.env == {"A": "1", "B": "two words", "C": "three four", "HOME_": "/app"}
    assert image.workdir == "/app/x"


@pytest.mark.parametrize(
    "line",
    [
        "RUN pip install flask",
        "RUN mkdir /x && rm -rf /y",
        "COPY --from=build /out /app",
        "COPY missing.txt /app/",
        "ADD https://example.com/x.tar /app/",
        "COPY repo/shop.py /usr/lib/",
        "USER agent",
        'ENTRYPOINT ["/run.sh"]',
    ],
)
def test_what_a_tree_can_not_express_is_reported(line: str) -> None:
    image = read_as_tree(f"FROM x\nWORKDIR /app\n{line}\n", CONTEXT)
    assert image.skipped == (line,)


def test_harmless_lines_comments_and_continuations_are_read() -> None:
    text = "# escape\nFROM x AS y\nLABEL a=b\nEXPOSE 80\nRUN mkdir -p /app \\\n  # why\n  /app/b\n"
    assert read_as_tree(text, CONTEXT).skipped == ()
