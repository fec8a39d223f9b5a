"""Upload the model of a finished run to the hub, with its card and report.

    python -m kit.share outputs/a [--hub_model_id NAME] [--hub_private_repo false]

Never asks anything, and ends after a time that depends on the size of the model. What it cannot upload stays where it
is: the same command repeats it.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from kit.errors import MachineError, UserError, exit_codes, one_line

ANSWER_TIMEOUT = 10.0  # seconds that the hub has to say who the user is
UPLOAD_TIMEOUT = 600.0  # seconds for an upload, and one more for each
BYTES_PER_SECOND = 1_000_000


def repo_name(hub_model_id: str | None, output_dir: str) -> str:
    """Return the name of the repository: hub_model_id, else that of the run directory. Raises `UserError`."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = hub_model_id or Path(output_dir).resolve().name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(
            f"hub_model_id {name!r} is no name for a repository ({one_line(error)}): give --hub_model_id OWNER/NAME"
        ) from None
    return name


def require_token() -> None:
    """Raise `UserError` if there is no way to upload: no token, or the hub is switched off."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError("the upload needs the hub, but HF_HUB_OFFLINE is set: unset it, or push_to_hub false")
    if get_token() is None:
        raise UserError("the upload needs a token of the hub: `hf auth login`, or the variable HF_TOKEN")


def check_sharing(settings) -> str | None:
    """Refuse at the start of a run what would be refused at its end: no token, or one that may not write there.

    Returns a note if the hub cannot be asked. Waits seconds at most.
    """
    if not settings.push_to_hub:
        return None
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    name = repo_name(settings.hub_model_id, settings.output_dir)
    require_token()
    try:
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        answer = get_session().get(url, headers=build_hf_headers(), timeout=ANSWER_TIMEOUT)
    except Exception as error:  # no network, a name that is not known, too slow: the run can do without
        return (
            f"the hub does not answer ({type(error).__name__}: {one_line(error)[:150]}): the upload at the end may fail"
        )
    if answer.status_code in (401, 403):
        raise UserError(f"the hub refuses the token ({answer.status_code}): log in again with `hf auth login`")
    if answer.status_code != 200:
        return f"the hub answers {answer.status_code}: the upload at the end may fail"
    who = answer.json()
    if ((who.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise UserError("the hub's token may only read: make one that may write, and log in with `hf auth login`")
    owner = name.partition("/")[0] if "/" in name else who["name"]
    writable = [org["name"] for org in who.get("orgs") or [] if org.get("roleInOrg") != "read"]
    if owner not in (who["name"], *writable):
        mine = ", ".join([who["name"], *writable])
        raise UserError(f"hub_model_id {name}: the token may not write to {owner}, but to: {mine}")
    return None


def hub_card(card: str, repo_id: str) -> str:
    """Return a run's model card as it has to read on the hub: the model is at the root of the repository."""
    load_own = f'load_model(model, hf_hub_download("{repo_id}", "model.safetensors"))'
    card = card.replace('load_model(model, "best/model.safetensors")', load_own)
    if load_own in card:
        card = card.replace(
            "from safetensors.torch", "from huggingface_hub import hf_hub_download\nfrom safetensors.torch"
        )
    card = card.replace('"local-dir:best"', f'"hf-hub:{repo_id}"').replace('"best"', f'"{repo_id}"')
    there = "Settings: settings.yaml. What else is known about the run: report.html, run.json, metrics.jsonl."
    return card.replace(there, "What else is known about the run: report.html.")


def files_of(run_dir: Path) -> dict[str, Path]:
    """Return the files of a finished run that go to the hub, by their name there. Raises `UserError` if it has none."""
    try:
        status = json.loads((run_dir / "run.json").read_text("utf-8"))["status"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"{run_dir} contains no run: run.json cannot be read") from None
    best = run_dir / "best"
    if status != "done" or not best.is_dir():
        raise UserError(f"{run_dir} is not done, its status is {status}: only a finished run is uploaded")
    files = {path.relative_to(best).as_posix(): path for path in sorted(best.rglob("*")) if path.is_file()}
    return files | {name: run_dir / name for name in ("README.md", "report.html") if (run_dir / name).is_file()}


def push(run_dir: Path, repo_id: str, private: bool) -> str:
    """Upload the best model, card and report of a run in one commit; return the address.

    The repository is made if it is not there. Raises `UserError` for what the hub refuses, `MachineError` where it does
    not answer.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    files = files_of(run_dir)
    require_token()
    disable_progress_bars()
    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        repo_id = url.repo_id  # with the owner
        if private and not api.repo_info(repo_id).private:
            raise UserError(f"{repo_id} is public: give another --hub_model_id, or --hub_private_repo false")
        operations = []
        for name, path in files.items():
            is_card = path == run_dir / "README.md"
            content = hub_card(path.read_text("utf-8"), repo_id).encode() if is_card else path
            operations.append(CommitOperationAdd(name, content))
        api.create_commit(repo_id, operations, commit_message="Upload the model, its card and report")
    except HfHubHTTPError as error:
        kind = UserError if error.response.status_code in (400, 401, 403, 404, 409) else MachineError
        raise kind(f"{repo_id}: the hub refuses ({one_line(error)[:300]}). {_again(run_dir)}") from error
    except OSError as error:
        raise MachineError(f"{repo_id}: {one_line(error)[:300]}. {_again(run_dir)}") from error
    return str(url)


def _again(run_dir: Path) -> str:
    return f"Nothing is lost: `make push RUN={run_dir}` repeats the upload"


def push_after_training(settings) -> None:
    """Upload a run that has just ended, in a process of its own, which says what became of it. Never raises."""
    own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"}  # of the training process
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-m", "kit.share", settings.output_dir], env=environment, check=False)


def end_in_time(run_dir: Path) -> None:
    """End this process if it is still there when the upload should long be done: a library may wait for ever."""
    size = sum(path.stat().st_size for path in files_of(run_dir).values())
    limit = UPLOAD_TIMEOUT + size / BYTES_PER_SECOND

    def give_up() -> None:
        print(f"error: the upload takes longer than {limit:.0f} s. {_again(run_dir)}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(limit, give_up)
    timer.daemon = True
    timer.start()


def main(arguments: list[str]) -> None:
    import yaml

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--hub_model_id", help="OWNER/NAME; unset: as in the run's settings, else the folder's name")
    parser.add_argument("--hub_private_repo", choices=["true", "false"], help="unset: as in the run's settings")
    options = parser.parse_args(arguments)
    run_dir = options.run.expanduser()
    files_of(run_dir)
    try:
        settings = yaml.safe_load((run_dir / "settings.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        settings = {}
    name = repo_name(options.hub_model_id or settings.get("hub_model_id"), str(run_dir))
    private = settings.get("hub_private_repo", True)
    if options.hub_private_repo:
        private = options.hub_private_repo == "true"
    end_in_time(run_dir)
    print(f"uploading  {run_dir} to {name} ({'private' if private else 'public'})", flush=True)
    print(f"uploaded   {push(run_dir, name, private)}", flush=True)


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
