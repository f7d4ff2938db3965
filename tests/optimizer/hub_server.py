"""A Hugging Face Hub on the loopback: the endpoints that huggingface_hub asks when a model is fetched.

Large files are at a second address, as the Hub's are, and the redirect to it must not take the token along.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MODEL = "some-org/tiny-llama"

LARGE = 20_000
"""From this size on a file is stored as the Hub stores those of Git LFS."""


@dataclass
class Repository:
    """``revisions``: files by name, by commit; ``names``: commits by branch or tag. ``gated`` models want ``token``."""

    revisions: dict[str, dict[str, bytes]]
    names: dict[str, str]
    gated: bool = False
    private: bool = False

    @staticmethod
    def of(files: dict[str, bytes] | Path, **options: bool) -> Repository:
        """One commit, on main, of files or of those in a folder."""
        content = files if isinstance(files, dict) else {p.name: p.read_bytes() for p in files.iterdir()}
        commit = commit_of(content)
        return Repository({commit: content}, {"main": commit}, **options)

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """Another branch; returns its commit."""
        commit = commit_of(files)
        self.revisions[commit], self.names[name] = files, commit
        return commit


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(b"".join(n.encode() + b"\0" + data for n, data in sorted(files.items()))).hexdigest()


@dataclass
class Hub:
    """The models, what goes wrong, and what was asked.

    Attributes:
        cuts: connections that break, by the file's name: after how many bytes each.
        without_ranges: a Range is ignored, as the HTTP standard allows.
        damaged: files that arrive with another last byte.
        endless: answers about a repository have no end.
        listed: what a repository's list says of a file instead, by the file's name.
        served: bytes sent of each file.
        starts: from which byte each was asked for.
        asked: "METHOD path" of each request, without what follows "?".
        tokens: the authorization that came, by "hub" and "storage".
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_secretsecretsecret"
    cuts: dict[str, list[int]] = field(default_factory=dict)
    without_ranges: bool = False
    damaged: set[str] = field(default_factory=set)
    broken: int | None = None
    endless: bool = False
    listed: dict[str, dict[str, object]] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    starts: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    asked: list[str] = field(default_factory=list)
    tokens: dict[str, set[str | None]] = field(default_factory=lambda: {"hub": set(), "storage": set()})
    endpoint: str = ""
    storage: str = ""
    blobs: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def __enter__(self) -> Hub:
        hub = self

        class OnHub(_Handler):
            state, side = hub, "hub"

        class OnStorage(_Handler):
            state, side = hub, "storage"

        self._servers = [_Server(("127.0.0.1", 0), OnHub), _Server(("127.0.0.2", 0), OnStorage)]
        self.endpoint, self.storage = ("http://{}:{}".format(*server.server_address) for server in self._servers)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is what some tests want."""


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    side: str
    protocol_version = "HTTP/1.1"

    def log_request(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.asked.append(f"{self.command} {path}")
        self.state.tokens[self.side].add(self.headers.get("Authorization"))
        if self.state.broken is not None:
            return self._send(self.state.broken, b"{}")
        if self.side == "storage":
            return self._file(*self.state.blobs[path.removeprefix("/")])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+)|/(refs))?", path):
            return self._api(match[1], match[2] or "main", refs=match[3] is not None)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[2], match[3])
        return self._send(404, b"{}")

    def _repository(self, name: str) -> Repository | None:
        repository = self.state.repositories.get(name)
        if repository is None or (repository.private and not self._has_token()):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return None
        return repository

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.state.token}"

    def _api(self, name: str, revision: str, *, refs: bool) -> None:
        repository = self._repository(name)
        if repository is None:
            return None
        if refs:
            branches = [{"name": n, "ref": n, "targetCommit": c} for n, c in repository.names.items()]
            return self._send(200, json.dumps({"branches": branches, "tags": [], "converts": []}).encode())
        commit = repository.names.get(revision, revision)
        if commit not in repository.revisions:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for file, data in repository.revisions[commit].items():
            entry = {"rfilename": file, "size": len(data), "blobId": _git_hash(data)}
            if len(data) >= LARGE:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry | self.state.listed.get(file, {}))
        if self.state.endless:
            return self._send_for_ever()
        return self._send(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return None
        if repository.gated and not self._has_token():
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        commit = repository.names.get(revision, revision)
        data = repository.revisions[commit].get(file)
        if data is None:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit}
        if len(data) < LARGE:
            return self._file(file, data, headers | {"ETag": f'"{_git_hash(data)}"'})
        digest = hashlib.sha256(data).hexdigest()
        self.state.blobs[digest] = (file, data)
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        return self._send(302, b"", headers | {"Location": f"{self.state.storage}/{digest}?Signature=abc"})

    def _file(self, name: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        sent, status, headers = data, 200, dict(headers or {})
        if name in self.state.damaged:
            sent = data[:-1] + bytes([data[-1] ^ 1])
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if match is not None and not self.state.without_ranges:
            start, status = int(match[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            sent = sent[start:]
        if self.command == "GET":
            self.state.starts[name].append(len(data) - len(sent))
        cuts = self.state.cuts.get(name, [])
        if self.command == "GET" and cuts:
            return self._send(status, sent, headers, only=cuts.pop(0), name=name)
        return self._send(status, sent, headers, name=name)

    def _send_for_ever(self) -> None:
        """Until the client has enough."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while True:
            self.wfile.write(b" " * (1 << 20))
            self.state.served["list"] += 1 << 20

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, only: int | None = None, name: str = ""
    ) -> None:
        """``only``: as many bytes, and then the connection breaks."""
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:only])
        if name:
            self.state.served[name] += len(body[:only])
        if only is not None:
            self.wfile.flush()
            self.close_connection = True


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
