"""Ask a server from many threads, in a process of its own: python -m strop.bench.serve_clients.

A line of JSON on standard input says what to ask, one on standard output what came of it. Nothing
of Strop or torch is imported, so the process is small.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any

_PATH = "/v1/images/generations"
_TIMEOUT_S = 600.0


class _Clients:
    """Share requests out among threads, each of which waits for its answer before the next."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.answers: list[dict[str, Any]] = []
        self._left = list(enumerate(plan["bodies"]))
        self._lock = threading.Lock()

    def work(self) -> None:
        host, port = self.plan["host"], self.plan["port"]
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        while (given := self._next()) is not None:
            answer = self._ask(connection, *given)
            with self._lock:
                self.answers.append(answer)
        connection.close()

    def _next(self) -> tuple[int, dict[str, Any]] | None:
        with self._lock:
            return self._left.pop(0) if self._left else None

    def _ask(
        self, connection: http.client.HTTPConnection, number: int, body: dict[str, Any]
    ) -> dict[str, Any]:
        """Ask until the answer is another than 429, as often as ``tries`` allows. Who hangs up
        does so ``hangs_up_s`` seconds behind the request, and has no answer."""
        start, refused = time.perf_counter(), 0
        hangs_up_s = body.pop("hangs_up_s", None)
        headers = {"content-type": "application/json"}
        while True:
            connection.request("POST", _PATH, json.dumps(body), headers)
            if hangs_up_s is not None:
                time.sleep(hangs_up_s)
                connection.close()
                return _answer(number, start, hung_up=True)
            answer = connection.getresponse()
            content = json.loads(answer.read())
            if answer.status != 429 or refused + 1 >= self.plan["tries"]:
                break
            refused += 1
            time.sleep(min(float(answer.headers["retry-after"]), self.plan["most_wait_s"]))
        made = content["data"][0]["b64_json"] if answer.status == 200 else ""
        return _answer(number, start, answer.status, refused, made)


def _answer(
    number: int,
    start: float,
    status: int = 0,
    refused: int = 0,
    png: str = "",
    hung_up: bool = False,
) -> dict[str, Any]:
    return {
        "number": number,
        "status": status,
        "seconds": time.perf_counter() - start,
        "refused": refused,
        "png": png,
        "hung_up": hung_up,
    }


def main() -> None:
    """Ask, and write what came of it."""
    clients = _Clients(json.loads(sys.stdin.readline()))
    threads = [threading.Thread(target=clients.work) for _ in range(clients.plan["clients"])]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {"seconds": time.perf_counter() - start, "answers": clients.answers}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
