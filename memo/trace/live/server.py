"""The page of a running job: a server for this machine alone that follows trace files, and sends the page what is new.

    /            the page, which asks for /data once a second
    /data?after  {"version", "status", "page"} when there is something newer than version `after`, else 204

The server listens on 127.0.0.1 and answers requests that name it so, so that no web page of another host can read it.
"""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.errors import TraceError, UsageError
from memo.trace.html import render_page
from memo.trace.html_data import page_data
from memo.trace.live.follow import Follower
from memo.trace.report import build_report

if TYPE_CHECKING:
    import os

HOST = "127.0.0.1"


class LiveServer(http.server.ThreadingHTTPServer):
    """Server of the live page.

    Args:
        paths: trace files of one run, one per rank; they need not exist yet.
        port: port on 127.0.0.1; 0 takes a free one.

    Raises:
        UsageError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, port: int = 0) -> None:
        self._followers = [Follower(path) for path in paths]
        self._guard = threading.Lock()
        self._seen: tuple[object, ...] = ()
        self._version = 0
        self._answer = b""
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UsageError(f"port {port} cannot be used: {error.strerror}; --port 0 takes a free one") from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def newer(self, than: int) -> bytes | None:
        """JSON of the newest version; None where the page has it already."""
        with self._guard:
            self._update()
            return self._answer if self._version != than else None

    def _update(self) -> None:
        """Reads the files, and makes another version where a step is complete, the run has ended or a file is wrong."""
        try:
            for follower in self._followers:
                follower.update()
            wrong = None
        except TraceError as error:
            wrong = str(error)
        seen = (wrong, *((follower.done, follower.ended) for follower in self._followers))
        if seen == self._seen:
            return
        self._seen = seen
        self._version += 1
        found = [trace for follower in self._followers if (trace := follower.trace()) is not None]
        page = page_data(build_report(found)) if found else None
        answer = {"version": self._version, "status": wrong or self._status(), "page": page}
        self._answer = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode("ascii")

    def _status(self) -> str:
        waiting = [follower.path for follower in self._followers if not follower.done]
        if waiting:
            return f"waiting for the first step of {waiting[0]}"
        if all(follower.ended for follower in self._followers):
            return "the run has ended"
        return "live: a new step is shown when it is complete"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "memo", ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(403)
            return
        path = urllib.parse.urlsplit(self.path)
        if path.path == "/":
            self._send(
                render_page({"live": True}, title="memo trace, live", live=True).encode("utf-8"),
                "text/html; charset=utf-8",
            )
        elif path.path == "/data":
            after = urllib.parse.parse_qs(path.query).get("after", ["0"])[0]
            answer = self.server.newer(int(after) if after.isdecimal() and len(after) < 10 else 0)
            if answer is None:
                self.send_response(204)
                self.end_headers()
            else:
                self._send(answer, "application/json")
        else:
            self.send_error(404)

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a request a second is no news."""
