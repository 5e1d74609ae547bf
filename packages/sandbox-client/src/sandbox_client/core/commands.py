"""Recognising shell commands that need no shell.

Most commands of an agent are one program with quoted arguments. Running the program directly
saves a process each time. Anything that a POSIX shell might treat specially goes to the shell.
"""

__all__ = ["direct_argv"]

# Characters that mean nothing to a shell wherever they stand in a word.
_PLAIN = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./,:@+%^="
)  # fmt: skip

# Names that the shell handles itself: reserved words, and builtins, some of which differ from the
# program of the same name.
_SHELL_WORDS = frozenset(
    [
        ".",
        ":",
        "[",
        "alias",
        "bg",
        "break",
        "builtin",
        "caller",
        "case",
        "cd",
        "command",
        "compgen",
        "complete",
        "continue",
        "coproc",
        "declare",
        "dirs",
        "disown",
        "do",
        "done",
        "echo",
        "elif",
        "else",
        "enable",
        "esac",
        "eval",
        "exec",
        "exit",
        "export",
        "false",
        "fc",
        "fg",
        "fi",
        "for",
        "function",
        "getopts",
        "hash",
        "help",
        "history",
        "if",
        "in",
        "jobs",
        "kill",
        "let",
        "local",
        "logout",
        "mapfile",
        "popd",
        "printf",
        "pushd",
        "pwd",
        "read",
        "readarray",
        "readonly",
        "return",
        "select",
        "set",
        "shift",
        "shopt",
        "source",
        "suspend",
        "test",
        "then",
        "time",
        "times",
        "trap",
        "true",
        "type",
        "typeset",
        "ulimit",
        "umask",
        "unalias",
        "unset",
        "until",
        "wait",
        "while",
    ]
)


def direct_argv(command: str) -> tuple[str, ...] | None:
    """The argument vector of a command that needs no shell, else None.

    >>> direct_argv("grep -rn 'def add' .")
    ('grep', '-rn', 'def add', '.')
    >>> direct_argv("cat a.txt | head") is None
    True
    """
    words = _split(command.strip(" \t\n"))
    if not words or words[0] in _SHELL_WORDS or "=" in words[0] or not words[0]:
        return None
    return tuple(words)


def _split(text: str) -> list[str] | None:
    words: list[str] = []
    word: list[str] | None = None
    at = 0
    while at < len(text):
        char = text[at]
        if char in " \t":
            if word is not None:
                words.append("".join(word))
                word = None
            at += 1
            continue
        word = [] if word is None else word
        if char == "'":
            end = text.find("'", at + 1)
            if end < 0:
                return None
            word.append(text[at + 1 : end])
            at = end + 1
        elif char == '"':
            quoted = _double_quoted(text, at + 1)
            if quoted is None:
                return None
            part, at = quoted
            word.append(part)
        elif char == "\\" and at + 1 < len(text) and text[at + 1] != "\n":
            word.append(text[at + 1])
            at += 2
        elif char in _PLAIN or ord(char) > 0x9F:
            word.append(char)
            at += 1
        else:
            return None
    if word is not None:
        words.append("".join(word))
    return words


def _double_quoted(text: str, at: int) -> tuple[str, int] | None:
    """The value of a double-quoted string that starts at `at`, and where the text goes on."""
    out: list[str] = []
    while at < len(text):
        char = text[at]
        if char == '"':
            return "".join(out), at + 1
        if char in "$`!":
            return None
        if char == "\\":
            following = text[at + 1 : at + 2]
            if following in ("", "\n"):
                return None
            out.append(following if following in '$`"\\' else "\\" + following)
            at += 2
        else:
            out.append(char)
            at += 1
    return None
