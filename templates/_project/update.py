"""Merge in what has changed in the template since this project was made, or last updated: `make update`.

Your changes stay. Where both sides changed the same lines, both stand there between <<<<<<< and >>>>>>>.
"""

import subprocess
import sys
from pathlib import Path

import copier
import yaml
from copier.errors import CopierError

PROJECT = Path(__file__).resolve().parent


def git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"error: git {arguments[0]}: {answer.stderr.strip().splitlines()[-1]}")
    return answer.stdout.strip()


def answers() -> dict:
    return yaml.safe_load((PROJECT / ".copier-answers.yml").read_text("utf-8"))


def main() -> None:
    if subprocess.run(["git", "rev-parse", "--git-dir"], cwd=PROJECT, capture_output=True).returncode:
        sys.exit("error: not under git, so nothing can be merged: git init && git add . && git commit -m start")
    if git("status", "--porcelain"):
        sys.exit("error: there are changes that are not committed: commit them first, so that you can go back")
    before = answers()
    if "_commit" not in before:
        sys.exit(
            "error: .copier-answers.yml has no _commit: the template was no git repository, nothing to compare with"
        )
    # The last commit there, whether it has a tag or not, and never what is not committed.
    newest = git("ls-remote", before["_src_path"], "HEAD").split()[0]
    try:
        copier.run_update(PROJECT, vcs_ref=newest, defaults=True, overwrite=True, quiet=True)
    except (CopierError, ValueError) as error:
        sys.exit(f"error: {error}")
    changed = git("status", "--short")
    if not changed:
        print(f"nothing new since {before['_commit']}")
        return
    print(f"{before['_commit']} -> {answers()['_commit']}\n{git('diff', 'HEAD', '--stat')}")
    if conflicts := git("diff", "--name-only", "--diff-filter=U"):
        sys.exit(f"error: both sides changed the same lines, choose there and git add: {' '.join(conflicts.split())}")
    print("Look at it (git diff), run make test, commit.")


if __name__ == "__main__":
    main()
