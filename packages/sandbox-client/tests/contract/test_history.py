"""No trace of earlier or later commits is left where an agent works."""

from sandbox_client import Sandbox

REPOSITORY = """\
set -e
git() { command git -c user.name=a -c user.email=a@localhost "$@"; }
git init -q . && git init -q nested
echo the-repair >code && git add code && git commit -q -m later && git tag fixed && git branch next
echo broken >code && git add code && git commit -q -m task && git remote add origin /nowhere
echo stashed-repair >code && git stash -q
echo nested-repair >nested/x && cd nested && git add x && git commit -q -m n
"""
LOOK = """\
git log --all --reflog -p 2>&1 | head -50
git stash list; git tag; git branch -a; git remote
find . -path '*/.git/*' -name '*' -type f | grep -c /objects/ || true
for o in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do git show $o; done
"""


async def test_a_repository_is_left_with_one_commit_of_what_is_there(sandbox: Sandbox) -> None:
    assert (await sandbox.run(REPOSITORY)).exit_code == 0
    before = await sandbox.run(LOOK)
    assert "the-repair" in before.stdout
    await sandbox.forget_history()
    after = await sandbox.run(LOOK)
    assert "the-repair" not in after.stdout
    assert "stashed-repair" not in after.stdout
    assert "broken" in after.stdout
    told = await sandbox.run("git log --oneline | wc -l; git status --short; cat code nested/x")
    assert told.stdout.split() == ["1", "broken", "nested-repair"]


async def test_a_folder_without_a_repository_stays_without_one(sandbox: Sandbox) -> None:
    await sandbox.write("code", "x")
    await sandbox.forget_history()
    assert (await sandbox.run("test -e .git")).exit_code == 1
