import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client.core.commands import direct_argv


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("grep -rn 'def add' .", ("grep", "-rn", "def add", ".")),
        ("  ls  -la ", ("ls", "-la")),
        (r"sed -i '4c\    return a + b' shop.py", ("sed", "-i", r"4c\    return a + b", "shop.py")),
        ("python -c \"print('a b')\"", ("python", "-c", "print('a b')")),
        (r"cat a\ b", ("cat", "a b")),
        ('x""y', ("xy",)),
        ("x ''", ("x", "")),
    ],
)
def test_a_plain_command_needs_no_shell(command: str, argv: tuple[str, ...]) -> None:
    assert direct_argv(command) == argv


@pytest.mark.parametrize(
    "command",
    [
        "",
        "   ",
        "a | b",
        "a; b",
        "a && b",
        "a > f",
        "echo $HOME",
        "echo `id`",
        'python "$x"',
        "ls *.py",
        "ls ~",
        "cd src",
        "X=1 python a.py",
        "if true",
        "a\nb",
        "echo 'open",
        'echo "open',
        "{ a",
        "a # b",
        "echo !x",
        "[ -f x ]",
        "''",
    ],
)
def test_what_a_shell_would_treat_specially_goes_to_the_shell(command: str) -> None:
    assert direct_argv(command) is None


words = st.text(
    alphabet=st.sampled_from("ab1-_./ '\"\\$`*?[]{}()<>|&;#~=!\n\té"), min_size=1, max_size=12
)


@given(st.lists(words, min_size=1, max_size=4))
def test_any_quoted_argument_arrives_as_it_is(arguments: list[str]) -> None:
    command = "printit " + " ".join(shlex.quote(word) for word in arguments)
    assert direct_argv(command) == ("printit", *arguments)


_SHOW = "import sys; print(ascii(sys.argv[1:]))"


@pytest.mark.parametrize(
    "line",
    [
        r'"a\"b" c\d "e\f" g',
        "plain 'two words' \"three more words\"",
        r"'single\n' back\slash",
        "a--b=c d@e x:y,z %1 +2 ^3",
    ],
)
def test_the_split_is_the_shells_own(line: str) -> None:
    argv = direct_argv(f"prog {line}")
    assert argv is not None
    shell = subprocess.run(
        ["/bin/sh", "-c", f'python3 -c "{_SHOW}" {line}'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout.strip() == ascii(list(argv[1:]))
