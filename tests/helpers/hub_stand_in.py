"""A stand-in for the Hugging Face hub on this machine: as much of its HTTP API as
huggingface_hub uses to publish a model and to fetch it again, over a folder.

    python -m tests.helpers.hub_stand_in FOLDER port=8123 &
    export HF_ENDPOINT=http://127.0.0.1:8123 HF_TOKEN=write-me HF_HUB_DISABLE_XET=1
    outrider push runs/eagle3 me/eagle3 license=apache-2.0
    outrider evaluate 'drafters=[none,hub:me/eagle3]' out=reports/eagle3

It prints its address when it listens, and keeps what was pushed in FOLDER, also when it is
killed and started again: a commit is there as a whole or not at all. A token says who one is
and what one may do: write-USER, read-USER; every other one is invalid. USER may write to
USER/NAME and to team/NAME. Private repositories are read by those who may write to them.
There is no storage of chunks (xet), hence HF_HUB_DISABLE_XET: the client then uploads by
git-lfs's protocol.

Answers and error codes are the hub's, as far as the client looks at them. It listens on
loopback alone and trusts nobody with a path: files lie under their hashes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from outrider.conf import disk

LARGE = (".safetensors", ".gguf", ".bin", ".pt")  # stored by git-lfs, whatever their size
LARGE_BYTES = 10 << 20
TEAM = "team"
NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
BYTES = "application/octet-stream"
PIECE = 1 << 20  # bytes that are read at once
CUT = -1  # in place of a status: the connection is closed without an answer


@dataclass
class Refusal(Exception):
    """An answer that is none: its status, the hub's code for it, and what it says."""

    status: int
    code: str = ""
    message: str = ""


@dataclass
class Answer:
    """status: of the answer. body: JSON, or a file's path. headers: further ones."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class User:
    """Who asks. name: "" for nobody."""

    name: str = ""
    writes: bool = False

    def owns(self, repository: str) -> bool:
        """Whether the repository is this user's or the team's."""
        return bool(self.name) and repository.partition("/")[0] in (self.name, TEAM)


class Store:
    """Repositories in a folder: OWNER/NAME.json beside the files of all of them by sha256."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.RLock()
        (folder / "files").mkdir(parents=True, exist_ok=True)

    def file(self, sha256: str) -> Path:
        """Where a file of this hash lies or will lie. Raises Refusal for what is no hash."""
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise Refusal(400, message=f"{sha256[:80]} is no sha256")
        return self.folder / "files" / sha256

    def keep(self, data: bytes) -> str:
        """Store some bytes; their sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        disk.write_bytes(self.file(sha256), data)
        return sha256

    def read(self, name: str) -> dict[str, Any] | None:
        """A repository: {private, refs: {name: commit}, commits: {commit: {files, ..}}}."""
        place = self._place(name)
        return json.loads(place.read_text()) if place.is_file() else None

    def write(self, name: str, repository: dict[str, Any]) -> None:
        """Replace a repository."""
        disk.write_text(self._place(name), json.dumps(repository, indent=1))

    def commit(
        self, name: str, branch: str, files: dict[str, Any], summary: str, parent: str = ""
    ) -> str:
        """A new commit on a branch, which holds these files; its id. parent: the commit that
        the branch must be at, "" for any. Raises Refusal where it is at another one."""
        with self.lock:
            found = self.read(name)
            assert found is not None
            before = found["refs"].get(branch, "")
            if parent and not before.startswith(parent):
                raise Refusal(412, message="A commit has happened since. Please refresh.")
            row = {"parent": before, "summary": summary, "created": time.time(), "files": files}
            commit = hashlib.sha1(json.dumps(row).encode()).hexdigest()
            found["commits"][commit] = row
            found["refs"][branch] = commit
            self.write(name, found)
        return commit

    def _place(self, name: str) -> Path:
        if not NAME.fullmatch(name) or ".." in name:
            raise Refusal(400, message=f"{name[:80]} is no name of a repository")
        return self.folder / f"{name}.json"


def pointer(path: str, data: bytes, store: Store) -> dict[str, Any]:
    """The entry of a small file in a commit."""
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"oid": oid, "sha256": store.keep(data), "size": len(data), "lfs": False}


def fault_free(method: str, path: str) -> int:
    """No request goes wrong."""
    return 0


class HubStandIn(ThreadingHTTPServer):
    """The server. fault: called with the method and path of every request; a status that is
    not 0 is what the request gets in place of its answer. requests: "METHOD PATH" of all of
    them."""

    daemon_threads = True
    fault: Callable[[str, str], int] = staticmethod(fault_free)

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.store, self.requests = Store(folder), list[str]()

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: HubStandIn

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def _do(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        self.server.requests.append(f"{self.command} {path}")
        status = self.server.fault(self.command, path)
        if status == CUT:
            self.close_connection = True
            return
        try:
            if status:
                raise Refusal(status, message="a fault that was asked for")
            answer = self._routed(path, query)
        except Refusal as refusal:
            self.close_connection = True  # what is left of the body is not read
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            shown = {k: v for k, v in headers.items() if v}
            answer = Answer({"error": refusal.message or refusal.code}, refusal.status, shown)
        self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = _do

    # -- who, and which repository

    def _user(self) -> User:
        """Who asks. Raises Refusal for a token that is none."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        role, _, name = token.partition("-")
        if token and (role not in ("read", "write") or not name):
            raise Refusal(401, message="Invalid credentials in Authorization header")
        return User(name, role == "write")

    def _found(self, name: str) -> dict[str, Any]:
        """A repository that the user may read. Raises Refusal, the same for one that is not
        there and one that is not shown."""
        user, found = self._user(), self.server.store.read(name)
        if found is None or (found["private"] and not user.owns(name)):
            raise Refusal(404 if user.name else 401, "RepoNotFound", "Repository not found")
        return found

    def _writable(self, name: str) -> dict[str, Any]:
        """A repository that the user may write to. Raises Refusal."""
        found, user = self._found(name), self._user()
        if not (user.writes and user.owns(name)):
            said = "Forbidden: you must use a write token to upload to a repository."
            raise Refusal(403 if user.name else 401, message=said)
        return found

    def _at(self, name: str, revision: str) -> tuple[str, dict[str, Any]]:
        """(commit, its files by path). Raises Refusal for a revision that is none."""
        found = self._found(name)
        commit = found["refs"].get(revision, revision)
        if commit not in found["commits"]:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, found["commits"][commit]["files"]

    # -- the routes

    def _routed(self, path: str, query: dict[str, list[str]]) -> Answer:
        for method, pattern, route in ROUTES:
            matched = re.fullmatch(pattern, path)
            if matched and self.command in method:
                return route(self, query, **matched.groupdict())
        raise Refusal(404, message=f"the stand-in knows no {self.command} {path}")

    def _whoami(self, query: Any) -> Answer:
        user = self._user()
        if not user.name:
            raise Refusal(401, message="Invalid username or password.")
        token = {"displayName": "stand-in", "role": "write" if user.writes else "read"}
        orgs = [{"type": "org", "name": TEAM}]
        auth = {"type": "access_token", "accessToken": token}
        return Answer({"type": "user", "name": user.name, "orgs": orgs, "auth": auth})

    def _create(self, query: Any) -> Answer:
        user, body = self._user(), self._json()
        name = f"{body.get('organization') or user.name}/{body['name']}"
        if not (user.writes and user.owns(name)):
            said = f"You don't have the rights to create a model under this namespace: {name}"
            raise Refusal(403 if user.name else 401, message=said)
        store, url = self.server.store, f"{self.server.url}/{name}"
        with store.lock:
            if store.read(name) is not None:
                return Answer({"error": "You already created this model repo", "url": url}, 409)
            private = body.get("visibility") == "private" or bool(body.get("private"))
            store.write(name, {"private": private, "refs": {}, "commits": {}})
            first = pointer(".gitattributes", b"*.safetensors filter=lfs -text\n", store)
            store.commit(name, "main", {".gitattributes": first}, "initial commit")
        return Answer({"url": url, "name": name})

    def _branch(self, query: Any, name: str, branch: str) -> Answer:
        found = self._writable(name)
        if branch in found["refs"]:
            raise Refusal(409, message=f"Reference already exists: {branch}")
        commit, _ = self._at(name, self._json().get("startingPoint", "main"))
        found["refs"][branch] = commit
        self.server.store.write(name, found)
        return Answer({})

    def _refs(self, query: Any, name: str) -> Answer:
        refs = self._found(name)["refs"].items()
        rows = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in refs]
        return Answer({"branches": rows, "tags": [], "converts": []})

    def _info(self, query: Any, name: str, revision: str | None = None) -> Answer:
        commit, files = self._at(name, revision or "main")
        rows = [{"rfilename": path, "size": entry["size"]} for path, entry in files.items()]
        private = self._found(name)["private"]
        card = _card_data(self.server.store, files)
        return Answer(
            {"_id": name, "id": name, "modelId": name, "sha": commit, "private": private}
            | {"siblings": rows, "tags": [], "downloads": 0, "likes": 0, "cardData": card}
        )

    def _tree(self, query: Any, name: str, revision: str, inner: str | None = None) -> Answer:
        _, files = self._at(name, revision)
        lead = f"{inner}/" if inner else ""
        return Answer([_row(p, entry) for p, entry in files.items() if p.startswith(lead)])

    def _validate(self, query: Any) -> Answer:
        """A model card's metadata, as far as the hub is strict about its form."""
        content = self._json()["content"]
        matched = re.match(r"---\n(.*?)\n---\n", content, re.S)
        try:
            data = yaml.safe_load(matched[1]) if matched else {}
        except yaml.YAMLError as error:
            return Answer({"errors": [{"message": str(error)}], "warnings": []}, 400)
        wrong = [] if isinstance(data, dict) else ["metadata is no mapping"]
        if isinstance(data, dict):
            for row in data.get("model-index") or ():
                for result in row.get("results") or ():
                    if not {"name", "type"} <= set(result.get("dataset") or ()):
                        wrong.append("model-index: a dataset needs name and type")
                    if any(not {"type", "value"} <= set(m) for m in result.get("metrics") or ()):
                        wrong.append("model-index: a metric needs type and value")
        errors = [{"message": line} for line in wrong]
        warnings = [] if data else [{"message": "empty or missing yaml metadata in repo card"}]
        return Answer({"errors": errors, "warnings": warnings}, 400 if errors else 200)

    def _preupload(self, query: Any, name: str, revision: str) -> Answer:
        self._writable(name)
        _, files = self._at(name, revision)
        rows = []
        for one in self._json()["files"]:
            large = one["path"].endswith(LARGE) or one["size"] > LARGE_BYTES
            there = files.get(one["path"], {})
            rows.append(
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": False,
                    "oid": there.get("sha256" if there.get("lfs") else "oid"),
                }
            )
        return Answer({"files": rows})

    def _lfs_batch(self, query: Any, name: str) -> Answer:
        """Where large files go; no action for one that is here already."""
        self._writable(name)
        rows = []
        for one in self._json()["objects"]:
            upload = {"href": f"{self.server.url}/lfs/{one['oid']}", "header": {}}
            there = self.server.store.file(one["oid"]).is_file()
            rows.append({**one, **({} if there else {"actions": {"upload": upload}})})
        return Answer({"transfer": "basic", "objects": rows})

    def _lfs_put(self, query: Any, oid: str) -> Answer:
        digest, final = hashlib.sha256(), self.server.store.file(oid)
        with disk.whole(final) as stage, stage.open("wb") as out:
            for piece in self._pieces():
                digest.update(piece)
                out.write(piece)
            if digest.hexdigest() != oid:
                raise Refusal(400, message="the content is not that of its sha256")
        return Answer({})

    def _commit(self, query: Any, name: str, revision: str) -> Answer:
        self._writable(name)
        store, header = self.server.store, {}
        _, before = self._at(name, revision)
        files = dict(before)
        for line in b"".join(self._pieces()).splitlines():
            row = json.loads(line)
            kind, value = row["key"], row["value"]
            if kind == "header":
                header = value
                continue
            path = value["path"]
            if kind == "file":
                files[path] = pointer(path, base64.b64decode(value["content"]), store)
            elif kind == "lfsFile":
                place = store.file(value["oid"])
                if not place.is_file():
                    raise Refusal(400, message=f"lfs object of {path} is not uploaded")
                size, oid = place.stat().st_size, value["oid"]
                small = hashlib.sha1(oid.encode()).hexdigest()
                files[path] = {"oid": small, "sha256": oid, "size": size, "lfs": True}
            elif kind == "deletedFile" and files.pop(path, None) is None:
                raise Refusal(404, "EntryNotFound", "A file with this name doesn't exist")
        parent = header.get("parentCommit", "")
        commit = store.commit(name, revision, files, header.get("summary", ""), parent)
        url = f"{self.server.url}/{name}/commit/{commit}"
        return Answer({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _resolve(self, query: Any, name: str, revision: str, file: str) -> Answer:
        commit, files = self._at(name, revision)
        if file not in files:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        entry = files[file]
        etag = entry["sha256"] if entry["lfs"] else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(entry["size"])}
        return Answer(self.server.store.file(entry["sha256"]), 200, headers)

    # -- bytes in and out

    def _pieces(self) -> Iterator[bytes]:
        """The body of the request, by its length or in chunks. Raises Refusal for one that is
        cut off."""
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            while size := int(self.rfile.readline().strip() or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            piece = self.rfile.read(min(left, PIECE))
            if not piece:
                raise Refusal(400, message="the body ends before its end")
            left -= len(piece)
            yield piece

    def _json(self) -> dict[str, Any]:
        return json.loads(b"".join(self._pieces()) or b"{}")

    def _send(self, answer: Answer) -> None:
        file = answer.body if isinstance(answer.body, Path) else None
        data = b"" if file else json.dumps(answer.body).encode()
        begin, size = 0, file.stat().st_size if file else len(data)
        status, headers = answer.status, dict(answer.headers)
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if file and wanted and int(wanted[1]) < size:
            begin, status = int(wanted[1]), 206
            headers["Content-Range"] = f"bytes {begin}-{size - 1}/{size}"
        self.send_response(status)
        headers.setdefault("Content-Type", "application/json" if file is None else BYTES)
        if self.close_connection:  # else the client's next request would meet a closed one
            headers["Connection"] = "close"
        for name, value in {**headers, "Content-Length": str(size - begin)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if file is None:
                self.wfile.write(data)
                return
            with file.open("rb") as source:
                source.seek(begin)
                while piece := source.read(PIECE):
                    self.wfile.write(piece)


def _row(path: str, entry: dict[str, Any]) -> dict[str, Any]:
    """A file as a listing shows it."""
    row = {"type": "file", "path": path, "oid": entry["oid"], "size": entry["size"]}
    lfs = {"oid": entry["sha256"], "size": entry["size"], "pointerSize": 134}
    return row | ({"lfs": lfs} if entry["lfs"] else {})


def _card_data(store: Store, files: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a repository's card, {} without one."""
    if "README.md" not in files:
        return {}
    text = store.file(files["README.md"]["sha256"]).read_text()
    matched = re.match(r"---\n(.*?)\n---\n", text, re.S)
    return yaml.safe_load(matched[1]) if matched else {}


REPO = r"(?P<name>[^/]+/[^/]+)"
ROUTES: tuple[tuple[tuple[str, ...], str, Callable[..., Answer]], ...] = (
    (("GET",), r"/api/whoami-v2", Handler._whoami),
    (("POST",), r"/api/repos/create", Handler._create),
    (("POST",), r"/api/validate-yaml", Handler._validate),
    (("GET",), rf"/api/models/{REPO}", Handler._info),
    (("GET",), rf"/api/models/{REPO}/revision/(?P<revision>.+)", Handler._info),
    (("GET",), rf"/api/models/{REPO}/refs", Handler._refs),
    (("GET",), rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<inner>.+))?", Handler._tree),
    (("POST",), rf"/api/models/{REPO}/branch/(?P<branch>.+)", Handler._branch),
    (("POST",), rf"/api/models/{REPO}/preupload/(?P<revision>.+)", Handler._preupload),
    (("POST",), rf"/api/models/{REPO}/commit/(?P<revision>.+)", Handler._commit),
    (("POST",), rf"/{REPO}\.git/info/lfs/objects/batch", Handler._lfs_batch),
    (("PUT",), r"/lfs/(?P<oid>[^/]+)", Handler._lfs_put),
    (("GET", "HEAD"), rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", Handler._resolve),
)


@contextlib.contextmanager
def hub(folder: Path, port: int = 0) -> Iterator[HubStandIn]:
    """The stand-in while the block runs, in a thread of this process."""
    server = HubStandIn(folder, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main(words: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    given = dict(word.partition("=")[::2] for word in words[1:])
    if not words or set(given) - {"port"} or not given.get("port", "0").isdigit():
        print("error: write FOLDER, then port=NUMBER or nothing", file=sys.stderr)
        return 2
    server = HubStandIn(Path(words[0]).expanduser(), int(given.get("port", 0)))
    print(f"HF_ENDPOINT={server.url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
