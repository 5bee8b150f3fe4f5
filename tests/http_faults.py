"""A small HTTP server that serves files as the Hugging Face hub does, and misbehaves on request."""

import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import perf_counter, sleep  # the real ones, whatever a test makes of `time`


class FaultyServer:
    """Serves {path: body}. `faults` is consumed a GET at a time, `head_faults` a HEAD at a time; both may be endless,
    and once they are empty all goes well. `requests` records. `rate` limits each response to so many bytes a second."""

    def __init__(self, files: dict[str, bytes], faults=(), head_faults=(), rate: float = float("inf")):
        self.files, self.rate = files, rate
        self.faults = {"GET": iter(faults), "HEAD": iter(head_faults)}
        self.requests: list[tuple[str, str, str | None]] = []  # (method, path, Range)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        self.http.handle_error = lambda *request: None  # clients hang up, or are killed
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> "FaultyServer":
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.http.shutdown()
        self.http.server_close()

    def ranges(self) -> list[str | None]:
        """Of the GETs."""
        return [asked for method, _, asked in self.requests if method == "GET"]

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            rate = server.rate

            def log_message(self, *args) -> None:
                pass

            def serve(self) -> None:
                server.requests.append((self.command, self.path, self.headers.get("Range")))
                fault = next(server.faults[self.command], None)
                (fault or (respond if self.path in server.files else status(404)))(
                    self, server.files.get(self.path, b"")
                )

            do_HEAD = do_GET = serve

        return Handler


def respond(handler, body: bytes, *, ranges=True, send=None, stall=0.0) -> None:
    """200 or 206; `send` is how many bytes really go out."""
    asked = handler.headers.get("Range") if ranges else None
    start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
    if asked and start >= len(body):
        return status(416)(handler, body)
    handler.send_response(206 if asked else 200)
    handler.send_header("X-Repo-Commit", "0" * 40)
    handler.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
    if asked:
        handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
    part = body[start:]
    handler.send_header("Content-Length", str(len(part)))
    handler.end_headers()
    if handler.command == "GET":
        part = part[:send]
        start = perf_counter()
        for i in range(0, len(part), 2**15):
            handler.wfile.write(part[i : i + 2**15])
            sleep(max(0.0, start + i / handler.rate - perf_counter()))
        handler.wfile.flush()
        sleep(stall)


Fault = Callable[[BaseHTTPRequestHandler, bytes], None]


def status(code: int, **headers: str) -> Fault:
    def fault(handler, body: bytes) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return fault


def truncate(handler, body: bytes) -> None:
    respond(handler, body, send=len(body) // 3)


def nothing(handler, body: bytes) -> None:
    respond(handler, body, send=0)


def stall(handler, body: bytes) -> None:
    respond(handler, body, send=len(body) // 3, stall=1.0)


def corrupt(handler, body: bytes) -> None:
    respond(handler, body[:-8] + b"no  PAR1", ranges=False)
