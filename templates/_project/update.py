"""Merge in what has changed in the template since this project was made, or last updated: `make update`.

Your changes stay. Where both sides changed the same lines, both stand there between <<<<<<< and >>>>>>>. If the
template has moved, name its folder or git URL once: `make update SOURCE=../templates`. The project remembers it.
"""

import subprocess
import sys
from pathlib import Path

import copier
import yaml
from copier.errors import CopierError

PROJECT = Path(__file__).resolve().parent
ANSWERS = PROJECT / ".copier-answers.yml"


def fail(message: str) -> None:
    sys.exit(f"error: {message}")


def run_git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True)


def git(*arguments: str) -> str:
    answer = run_git(*arguments)
    if answer.returncode:
        fail(f"git {arguments[0]}: {answer.stderr.strip().splitlines()[-1]}")
    return answer.stdout.strip()


def answers() -> dict:
    return yaml.safe_load(ANSWERS.read_text("utf-8"))


def check_project() -> None:
    answer = run_git("status", "--porcelain")
    if "dubious ownership" in answer.stderr:
        fail(f"this project belongs to another user: git config --global --add safe.directory {PROJECT}")
    if answer.returncode:
        fail("not under git, so nothing can be merged: git init && git add . && git commit -m start")
    if answer.stdout:
        fail("there are changes that are not committed: commit them first, so that you can go back")
    if "_commit" not in answers():
        fail(".copier-answers.yml has no _commit: the template was no git repository, nothing to compare with")


def as_source(given: str) -> str:
    """Return a folder or a git URL as copier understands it: it tells a URL by `git+`."""
    folder = Path(given).expanduser()
    if folder.exists():
        return str(folder.resolve())
    return given if given.startswith("git+") else f"git+{given}"


def newest_commit(source: str) -> str:
    """Return the last commit of the template, whether it has a tag or not, and never what is not committed."""
    answer = run_git("ls-remote", source.removeprefix("git+"), "HEAD")
    cure = "make update SOURCE=FOLDER_OR_GIT_URL"
    if "dubious ownership" in answer.stderr:
        # The folder for copier, which asks whether it is one; .git for the transfer.
        trust = " && ".join(f"git config --global --add safe.directory '{source}{part}'" for part in ("", "/.git"))
        fail(f"the template {source} belongs to another user. If you trust it: {trust}. Or give another place: {cure}")
    if answer.returncode or not answer.stdout:
        reason = (answer.stderr.strip() or "it has no commit").splitlines()[0].removeprefix("fatal: ")
        fail(f"the template {source} cannot be read ({reason}). If it has moved, give its place: {cure}")
    return answer.stdout.split()[0]


def remember(source: str) -> None:
    """Commit the new place of the template: copier compares only against what is committed."""
    comment = ANSWERS.read_text("utf-8").splitlines()[0]
    ANSWERS.write_text(f"{comment}\n{yaml.safe_dump(answers() | {'_src_path': source}, allow_unicode=True)}", "utf-8")
    git("commit", "--quiet", "--message", f"The template is at {source}", ANSWERS.name)


def main(given: str | None = None) -> None:
    check_project()
    before = answers()
    source = as_source(given) if given else before["_src_path"]
    newest = newest_commit(source)
    is_new_source = source != before["_src_path"]
    if is_new_source:
        remember(source)
    try:
        copier.run_update(PROJECT, vcs_ref=newest, defaults=True, overwrite=True, quiet=True)
    except (CopierError, ValueError) as error:
        if is_new_source:
            git("reset", "--quiet", "--keep", "HEAD~1")
        if "Unknown revision" in str(error):
            fail(f"{source} has no commit {before['_commit']}, which this project stands on: is it the same template?")
        fail(str(error))
    changed = git("status", "--short")
    if not changed:
        print(f"nothing new since {before['_commit']}")
        return
    print(f"{before['_commit']} -> {answers()['_commit']}\n{git('diff', 'HEAD', '--stat')}")
    if conflicts := git("diff", "--name-only", "--diff-filter=U"):
        fail(f"both sides changed the same lines, choose there and git add: {' '.join(conflicts.split())}")
    print("Look at it (git diff), run make test, commit.")


if __name__ == "__main__":
    main(*sys.argv[1:])
