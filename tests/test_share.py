"""`make push` and push_to_hub, against a stand-in of the hub on this machine: what arrives, and what goes wrong."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from conftest import TEMPLATES
from kit.model_card import TIMM, TORCH, transformers_call, write_card
from kit.share import hub_card

TOKEN = "hf_of_nobody"


class Hub(ThreadingHTTPServer):
    """A stand-in of the hub: one user, who is called me and may write to `team`; what arrives stays in memory."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.refused, self.is_slow, self.is_public, self.role = None, False, False, "write"
        self.files, self.objects, self.created, self.asked = {}, {}, [], []
        self.address = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args) -> None:
        pass

    def answer(self, content=None, code: int = 200) -> None:
        body = json.dumps({} if content is None else content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def handle_any(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        body = self.read_body()
        hub.asked.append(path)
        if hub.is_slow:
            time.sleep(30)
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}" and "/objects/" not in path:
            self.answer({"error": "Invalid username or password."}, 401)
        elif hub.refused and hub.refused in path:
            self.answer({"error": "You don't have the rights to do that"}, 403)
        elif path == "/api/whoami-v2":
            auth = {"accessToken": {"role": hub.role}}
            orgs = [{"name": "team", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]
            self.answer({"name": "me", "orgs": orgs, "auth": auth})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            hub.created.append(asked)
            self.answer({"url": f"{hub.address}/{asked.get('organization') or 'me'}/{asked['name']}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self.answer({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            uploads = [{"upload": {"href": f"{hub.address}/objects/{item['oid']}"}} for item in asked]
            objects = [{**item, "actions": upload} for item, upload in zip(asked, uploads, strict=True)]
            self.answer({"transfer": "basic", "objects": objects})
        elif path.startswith("/objects/"):
            hub.objects[path.rsplit("/", 1)[1]] = body
            self.answer()
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            self.answer({"commitUrl": f"{hub.address}/me/run/commit/1", "commitOid": "1", "success": True})
        elif path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/")
            self.answer({"id": name, "private": not hub.is_public, "siblings": [], "tags": []})
        else:
            self.answer({"error": f"the stand-in does not know {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


@pytest.fixture
def hub():
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path) -> Path:
    """What a finished run leaves of what is uploaded, and a checkpoint, which is not."""
    folder = tmp_path / "a_run"
    (folder / "best" / "more").mkdir(parents=True)
    (folder / "best" / "model.safetensors").write_bytes(os.urandom(3000))
    (folder / "best" / "config.json").write_text("{}")
    (folder / "best" / "more" / "vocab.txt").write_text("schön")
    (folder / "checkpoints" / "step_00000003").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000003" / "manifest.json").write_text("{}")
    (folder / "report.html").write_text("<p>report")
    (folder / "run.json").write_text('{"status": "done"}')
    (folder / "settings.yaml").write_text(yaml.safe_dump({"hub_model_id": "team/model", "hub_private_repo": True}))
    card_of(folder / "README.md", transformers_call(1, 32))
    return folder


def card_of(path: Path, call: str) -> str:
    facts = {"data": {"rows": {"train": 9}}, "world": {"summary": "1 process"}, "seconds": 3.0}
    write_card(path, SimpleNamespace(train_file="x.csv"), {"test_accuracy": 0.5}, "text-classification", call, facts)
    return path.read_text("utf-8")


def share(hub: Hub, *arguments, token: str | None = TOKEN, code: str | None = None, **variables: str):
    """Run kit.share (or other code) as a person would, with the stand-in as its hub."""
    dropped = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"HF_ENDPOINT": hub.address, "PYTHONPATH": str(TEMPLATES), **variables}
    environment["HF_HUB_DISABLE_XET"] = "1"  # large files go the way that the stand-in knows: Git LFS
    if token:
        environment["HF_TOKEN"] = token
    program = ["-c", code] if code else ["-m", "kit.share"]
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=40, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def hash_of(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


def test_what_arrives_is_the_best_model_at_the_root_its_card_and_its_report(hub, run):
    before = hash_of(run)
    answer = share(hub, run)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines() == [
        f"uploading  {run} to team/model (private)",
        f"uploaded   {hub.address}/team/model",
    ]
    assert [(asked["organization"], asked["name"]) for asked in hub.created] == [("team", "model")]
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    best = {name: (run / "best" / name).read_bytes() for name in ("model.safetensors", "config.json", "more/vocab.txt")}
    card = hub.files.pop("README.md").decode()
    assert hub.files == best | {"report.html": b"<p>report"}
    assert len(hub.objects) == 1  # the weights, as large files go
    assert 'pipeline("text-classification", "team/model")' in card
    assert hash_of(run) == before

    answer = share(hub, run, "--hub_model_id", "other", "--hub_private_repo", "false")
    assert answer.returncode == 0, answer.stderr
    assert "to other (public)" in answer.stdout
    assert 'pipeline("text-classification", "me/other")' in hub.files["README.md"].decode()  # with its owner


def test_each_card_names_only_what_is_on_the_hub(tmp_path):
    import ast

    for call, words in (
        (transformers_call(2, 8), 'pipeline("text-classification", "me/it")'),
        (TIMM, 'timm.create_model("hf-hub:me/it", pretrained=True)'),
        (TORCH, 'load_model(model, hf_hub_download("me/it", "model.safetensors"))'),
    ):
        card = hub_card(card_of(tmp_path / "README.md", call), "me/it")
        assert words in card
        for absent in ("best", "settings.yaml", "run.json", "metrics.jsonl"):
            assert absent not in card
        code = ast.parse(card.partition("```python\n")[2].partition("```")[0])
        imported = {name.name for node in ast.walk(code) if isinstance(node, ast.ImportFrom) for name in node.names}
        assert ("hf_hub_download" in imported) == ("hf_hub_download" in words)


def test_a_refused_upload_is_one_line_and_says_how_to_repeat_it(hub, run):
    before = hash_of(run)
    for refused in ("/preupload/", "/commit/"):
        hub.refused = refused
        answer = share(hub, run)
        assert answer.returncode == 2, answer.stdout + answer.stderr
        (line,) = answer.stderr.splitlines()
        assert "error: team/model: the hub refuses" in line and "You don't have the rights" in line
        assert line.endswith(f"Nothing is lost: `make push RUN={run}` repeats the upload")
    assert not hub.files
    hub.refused, hub.is_public = None, True
    answer = share(hub, run)
    assert (answer.returncode, answer.stderr) == (
        2,
        "error: team/model is public: give another --hub_model_id, or --hub_private_repo false\n",
    )
    assert not hub.files and hash_of(run) == before


def test_what_cannot_be_uploaded_is_refused_before_the_hub_is_asked(hub, run):
    answer = share(hub, run, token=None)
    assert answer.returncode == 2 and "needs a token of the hub: `hf auth login`" in answer.stderr
    answer = share(hub, run, HF_HUB_OFFLINE="1")
    assert answer.returncode == 2 and "HF_HUB_OFFLINE is set" in answer.stderr
    answer = share(hub, run, "--hub_model_id", "a/b/c")
    assert answer.returncode == 2 and "'a/b/c' is no name for a repository" in answer.stderr
    (run / "run.json").write_text('{"status": "stopped"}')
    answer = share(hub, run)
    assert answer.returncode == 2 and "its status is stopped: only a finished run is uploaded" in answer.stderr
    assert not hub.asked


def test_a_hub_that_never_answers_ends_the_upload_in_time_and_the_run_all_the_same(hub, run):
    hub.is_slow = True
    code = (
        "import sys, kit.share as share; share.UPLOAD_TIMEOUT = 3.0;"
        "share.exit_codes().__enter__(); share.main(sys.argv[1:])"
    )
    began = time.monotonic()
    answer = share(hub, run, code=code)
    assert answer.returncode == 1 and time.monotonic() - began < 25
    assert f"error: the upload takes longer than 3 s. Nothing is lost: `make push RUN={run}`" in answer.stderr


CHECK = """
import sys
from types import SimpleNamespace
import kit.share as share
share.ANSWER_TIMEOUT = 2.0
with share.exit_codes():
    for name in sys.argv[1:]:
        print(share.check_sharing(SimpleNamespace(push_to_hub=True, hub_model_id=name or None, output_dir="/x/a_run")))
"""


def test_the_start_of_a_run_finds_what_would_be_refused_at_its_end_and_never_waits(hub):
    assert share(hub, "", "me/model", "team/model", code=CHECK).stdout.split() == ["None"] * 3
    for name, token, words in (
        ("someone/model", TOKEN, "may not write to someone, but to: me, team"),
        ("readers/model", TOKEN, "may not write to readers"),
        ("model", "hf_wrong", "the hub refuses the token (401)"),
        ("model", None, "needs a token"),
    ):
        answer = share(hub, name, token=token, code=CHECK)
        assert answer.returncode == 2 and words in answer.stderr, answer.stderr
        assert len(answer.stderr.splitlines()) == 1
    hub.role = "read"
    assert "may only read" in share(hub, "model", code=CHECK).stderr
    hub.is_slow = True
    began = time.monotonic()
    answer = share(hub, "model", code=CHECK)
    assert answer.returncode == 0 and time.monotonic() - began < 25
    assert "the hub does not answer (ReadTimeout" in answer.stdout


def test_a_run_uploads_in_a_process_of_its_own_and_outlives_a_refusal(hub, run):
    code = (
        "import sys; from types import SimpleNamespace; from kit.share import push_after_training;"
        "push_after_training(SimpleNamespace(output_dir=sys.argv[1])); print('goes on')"
    )
    world = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(run / "error")}
    answer = share(hub, run, code=code, **world)
    assert answer.returncode == 0 and answer.stdout.splitlines()[-1] == "goes on"
    assert "report.html" in hub.files
    hub.refused = "/commit/"
    answer = share(hub, run, code=code, **world)
    assert answer.returncode == 0 and answer.stdout.splitlines()[-1] == "goes on"
    assert "make push" in answer.stderr and not (run / "error").exists()
