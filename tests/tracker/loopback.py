"""A local server that replaces the one of Weights & Biases. It supports the requests of our code.

It answers the real client: GraphQL by the name of the operation, the stream of a run's history, and PUT and GET of files.
Unknown requests are listed in `unknown`, so that a test can check that there were none. The tests see what is sent, but not
how the real service processes it.
"""

import contextlib
import gzip
import itertools
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

ENTITY = "tester"
NOW = "2026-01-01T00:00:00"


@dataclass
class Run:
    """A run on the server."""

    project: str
    name: str
    id: str
    labels: dict = field(default_factory=dict)
    """The latest display name, group, job type and tags."""
    config: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    lines: dict[int, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def history(self) -> list[dict]:
        return [json.loads(line) for _, line in sorted(self.lines.items())]


@dataclass
class Artifact:
    """A version of an artifact."""

    id: str
    collection: str
    type: str
    run: str
    digest: str
    metadata: dict
    version: int
    committed: bool = False
    used_by: list[str] = field(default_factory=list)


class Loopback:
    """The server, as a context. `environment(folder)` returns the variables for its clients."""

    def __init__(self):
        self.runs: dict[tuple[str, str], Run] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.stored: dict[str, bytes] = {}
        self.views: dict[str, dict] = {}
        self.charts: dict[str, str] = {}
        self.unknown: list[tuple] = []
        self._ids, self._lock = itertools.count(1), threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False  # closing waits for them
        self._connections: set[socket.socket] = set()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Loopback":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        for connection in [*self._connections]:  # clients keep theirs open, and a thread waits for the next request
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def environment(self, folder: Path, mode: str = "online") -> dict[str, str]:
        """Environment variables of a client that is logged in on this server and writes below the folder."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "f" * 40, "WANDB_MODE": mode, "WANDB_ERROR_REPORTING": "false",
                "WANDB__DISABLE_STATS": "true", "WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_SILENT": "true",
                "WANDB_CONFIG_DIR": str(folder / "config")}

    def run(self, name: str) -> Run:
        """The run with this id."""
        with self._lock:
            return next(run for (_, its_name), run in self.runs.items() if its_name == name)

    def files(self, artifact: Artifact) -> dict[str, bytes]:
        """The files of an artifact."""
        prefix = f"/storage/artifact/{artifact.id}/"
        return {path.removeprefix(prefix): content for path, content in self.stored.items() if path.startswith(prefix)}

    # ---- transport

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                server._connections.add(self.request)
                super().setup()

            def log_message(self, *_):
                pass

            def _answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                with server._lock:
                    try:
                        status, content = server._dispatch(self.command, urlparse(self.path).path, body)
                    except Exception as error:  # with other errors the client would repeat the request forever
                        server.unknown.append((self.path, repr(error)))
                        status, content = 400, b"{}"
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = _answer

        return Handler

    def _dispatch(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/graphql":
            return self._graphql(json.loads(body))
        stream = re.fullmatch(r"/files/[^/]+/([^/]+)/([^/]+)/file_stream", path)
        if stream:
            return 200, json.dumps(self._stream(self.runs[stream.groups()], json.loads(body))).encode()
        if path.startswith("/storage/"):
            if method == "PUT":
                self.stored[path] = body
                kind, owner, name = path.split("/", 4)[2:]
                if kind == "run":
                    self.run(owner).files[name] = body
                return 200, b""
            return (200, self.stored[path]) if path in self.stored else (404, b"")
        self.unknown.append((method, path))
        return 404, b"{}"

    def _stream(self, run: Run, body: dict) -> dict:
        for name, file in (body.get("files") or {}).items():
            if name == "wandb-summary.json":
                run.summary = json.loads(file["content"][-1])
            elif name == "wandb-history.jsonl":
                run.lines.update(enumerate(file["content"], start=file["offset"]))
        if body.get("complete"):
            run.exit_code = body["exitcode"]
        return {"exitcode": None, "limits": {}, "stopped": False}

    def _graphql(self, request: dict) -> tuple[int, bytes]:
        query, given = request["query"], request.get("variables") or {}
        if "__schema" in query or "__type(" in query:
            return 200, json.dumps({"data": {"__schema": {"types": []}, "__type": None}}).encode()
        operation = request.get("operationName") or re.search(r"\b(?:query|mutation)\s+(\w+)", query)[1]
        answer = getattr(self, f"_{operation}", None)
        if answer is None:
            self.unknown.append((operation, given, query))
            return 200, b'{"data": {}}'
        data = answer(given)
        if isinstance(data, int):
            return data, b'{"errors": [{"message": "refused"}]}'
        return 200, json.dumps({"data": data}).encode()

    def _new_id(self, kind: str) -> str:
        return f"{kind}{next(self._ids)}"

    # ---- accounts, runs

    def _Viewer(self, given):
        return {"viewer": {"id": "u1", "entity": ENTITY, "username": ENTITY, "name": ENTITY, "email": "t@localhost",
                           "admin": False, "flags": "{}", "teams": {"edges": []}, "apiKeys": {"edges": []}},
                "serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0.0"}, "latestLocalVersionInfo": None}}

    _GetDefaultEntity = _Viewer

    def _ServerFeaturesQuery(self, given):
        return {"serverInfo": {"features": []}}

    def _RunResumeStatus(self, given):
        run = self.runs.get((given["project"], given["name"]))
        return {"model": {"id": "p1", "name": given["project"], "entity": {"id": "e1", "name": ENTITY}, "bucket": run and {
            "id": run.id, "name": run.name, "displayName": run.labels["displayName"],
            "summaryMetrics": json.dumps(run.summary),
            "logLineCount": 0, "historyLineCount": len(run.lines), "eventsLineCount": 0, "eventsTail": "[]",
            "historyTail": json.dumps([run.lines[max(run.lines)]] if run.lines else []), "config": json.dumps(run.config),
            "tags": run.labels["tags"], "notes": None, "wandbConfig": json.dumps({"t": 1})}}}

    def _UpsertBucket(self, given):
        key = (given["project"], given["name"])
        inserted = key not in self.runs
        run = self.runs.setdefault(key, Run(*key, self._new_id("run")))
        run.labels.update({name: given[name] for name in ("displayName", "groupName", "jobType", "tags")
                         if given.get(name) is not None or name not in run.labels})
        run.config.update(json.loads(given.get("config") or "{}"))
        run.exit_code = None
        return {"upsertBucket": {"inserted": inserted, "bucket": {
            "id": run.id, "name": run.name, "displayName": run.labels["displayName"], "description": None,
            "config": json.dumps(run.config), "sweepName": None, "historyLineCount": len(run.lines),
            "project": {"id": "p1", "name": run.project, "entity": {"id": "e1", "name": ENTITY}}}}}

    def _CreateRunFiles(self, given):
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": [
            {"name": name, "uploadUrl": f"{self.url}/storage/run/{given['run']}/{name}"} for name in given["files"]]}}

    def _RunStoppedStatus(self, given):
        return {"project": {"run": {"stopped": False}}}

    def _Runs(self, given):
        """Supports only the filter by group."""
        group = (json.loads(given.get("filters") or "{}") or {}).get("group")
        runs = [run for run in self.runs.values()
                if run.project == given["project"] and group in (None, run.labels["groupName"])]
        nodes = [{"__typename": "Run", "id": run.id, "projectId": "1", "name": run.name, "tags": run.labels["tags"] or [],
                  "displayName": run.labels["displayName"], "sweepName": None, "state": "finished", "readOnly": False,
                  "group": run.labels["groupName"], "jobType": run.labels["jobType"], "commit": None, "systemMetrics": "{}",
                  "createdAt": NOW, "heartbeatAt": NOW, "description": None, "notes": None, "config": json.dumps(run.config),
                  "summaryMetrics": json.dumps(run.summary), "historyLineCount": len(run.lines), "historyKeys": None,
                  "user": {"name": ENTITY, "username": ENTITY}} for run in runs]
        return {"project": {"internalId": "1", "runCount": len(nodes), "readOnly": False, "runs": {
            "edges": [{"node": node, "cursor": str(n)} for n, node in enumerate(nodes)],
            "pageInfo": {"endCursor": None, "hasNextPage": False}}}}

    # ---- artifacts

    def _CreateArtifact(self, given):
        given = given["input"]
        names = given.get("artifactCollectionNames") or [given["artifactCollectionName"]]
        same = [one for one in self.artifacts.values() if one.collection == names[0]]
        known = next((one for one in same if one.digest == given["digest"]), None)
        found = known or Artifact(self._new_id("artifact"), names[0], given["artifactTypeName"], given["runName"],
                                  given["digest"], json.loads(given.get("metadata") or "{}"), len(same))
        self.artifacts[found.id] = found
        return {"createArtifact": {"artifact": {"id": found.id, "state": "COMMITTED" if found.committed else "PENDING",
                                                "digest": found.digest,
                                                "artifactSequence": {"id": f"s-{names[0]}", "latestArtifact": None}}}}

    def _CreateArtifactFiles(self, given):
        places = [(file["artifactID"], f"/storage/artifact/{file['artifactID']}/{file['name']}")
                  for file in given["input"]["artifactFiles"]]
        return {"createArtifactFiles": {"files": {"edges": [
            {"node": {"storagePath": path, "uploadUrl": self.url + path, "uploadHeaders": [], "uploadMultipartUrls": None,
                      "artifact": {"id": owner}}} for owner, path in places]}}}

    def _CreateArtifactManifest(self, given):
        path = f"/storage/manifest/{given['artifactID']}/wandb_manifest.json"
        return {"createArtifactManifest": {"artifactManifest": {"id": f"m-{given['artifactID']}", "file": {
            "id": "f1", "uploadUrl": self.url + path, "uploadHeaders": []}}}}

    def _CommitArtifact(self, given):
        found = self.artifacts[given["artifactID"]]
        found.committed = True
        return {"commitArtifact": {"artifact": {"id": found.id, "digest": found.digest}}}

    def _ArtifactType(self, given):
        found = self._latest(given["name"])
        return {"project": {"artifact": found and {"artifactType": {"name": found.type}}}}

    def _latest(self, name: str) -> Artifact | None:
        """The newest version of the artifact; a version after the colon of the name is ignored."""
        return next((one for one in reversed(self.artifacts.values()) if one.collection == name.partition(":")[0]), None)

    def _UseArtifact(self, given):
        given = given.get("input") or given
        found = self.artifacts[given["artifactID"]]
        found.used_by.append(given["runName"])
        return {"useArtifact": {"artifact": {"id": found.id}}}

    def _ArtifactMembershipByName(self, given):
        found = self._latest(given["name"])
        if found is None:
            return {"project": {"artifactCollectionMembership": None}}
        collection = {"__typename": "ArtifactSequence", "name": found.collection,
                      "project": {"id": "p1", "internalId": "1", "name": given["project"], "entity": {"name": ENTITY}}}
        alias = {"__typename": "ArtifactAlias", "id": "latest", "alias": "latest"}
        artifact = {
            "__typename": "Artifact", "id": found.id, "artifactSequence": collection, "versionIndex": found.version, "size": 1,
            "artifactType": {"name": found.type}, "description": None, "metadata": json.dumps(found.metadata), "fileCount": 1,
            "ttlDurationSeconds": -2, "ttlIsInherited": False, "tags": [], "historyStep": None, "state": "COMMITTED",
            "digest": found.digest, "digestAlgorithm": "MANIFEST_MD5", "commitHash": None, "createdAt": NOW, "updatedAt": None,
            "aliases": [{**alias, "artifactCollection": collection}]}
        return {"project": {"artifactCollectionMembership": {
            "__typename": "ArtifactCollectionMembership", "id": f"m{found.id}", "versionIndex": found.version,
            "createdAt": NOW, "aliases": [alias], "artifactCollection": collection, "artifact": artifact}}}

    # ---- charts, workspaces

    def _CreateCustomChart(self, given):
        """Creates a chart. An existing chart is not changed."""
        if given["chartName"] in self.charts:
            return 409
        self.charts[given["chartName"]] = json.loads(given["spec"])
        return {"createCustomChart": {"chart": {"id": f"{given['entity']}/{given['chartName']}"}}}

    def _UpsertView2(self, given):
        number = given.get("id") or self._new_id("view")
        view = self.views[number] = {**self.views.get(number, {}), **given, "id": number}
        return {"upsertView": {"inserted": "id" not in given, "view": {"id": number, "name": view["name"]}}}

    def _View(self, given):
        edges = [{"node": view} for view in self.views.values() if view["name"] == given["viewName"]]
        return {"project": {"allViews": {"edges": edges}}}
