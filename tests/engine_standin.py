"""A stand-in for a serving engine: a standard-library HTTP server that answers what a test tells it to."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StandIn:
    """Answers ``routes[path](body)``, which returns an object (status 200), text, or (status, object).

    ``requests`` holds every (path, body) in the order of arrival; ``most_at_once`` the largest number in flight.
    """

    def __init__(self, routes):
        self.routes = dict(routes)
        self.requests = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                outer.answer(self, None)

            def do_POST(self):
                size = int(self.headers["Content-Length"])
                outer.answer(self, json.loads(self.rfile.read(size)))

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, handler, body):
        with self._lock:
            self.requests.append((handler.path, body))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            route = self.routes.get(handler.path)
            answer = (404, {"detail": "Not Found"}) if route is None else route(body)
            status, answer = answer if isinstance(answer, tuple) else (200, answer)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        finally:
            with self._lock:
                self._now -= 1
        with contextlib.suppress(BrokenPipeError):  # a client that gave up waiting
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)

    def bodies(self, path):
        """Bodies sent to a route."""
        return [body for seen, body in self.requests if seen == path]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
