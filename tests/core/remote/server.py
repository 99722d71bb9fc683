"""A server of nnsight's own protocol for the tests: it runs plain models, one request after another.

A client opens ``/subscribe`` as a websocket and is told its session's id; it posts a request with that id to
``/request`` and is sent the result over the socket. The models are nnsight's `TransformersModel`: nothing here imports
nnterp, which comes in with the first request that carries standard envoys, as on any server that has it installed.

usage: server.py CHECKPOINT...        prints the port it listens on, and runs until its input ends
"""

import base64
import hashlib
import io
import json
import linecache
import struct
import sys
import threading
import traceback
import uuid
from email import message_from_bytes
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from nnsight.modeling.mixins.remotable import Remotable
from nnsight.schema.request import RequestModel
from nnsight.schema.response import ResponseModel, Status
from nnsight.tracing.globals import BLOCKS, SOURCES
from nnsight.tracing.tracer import _saves, dec, inc

ALLOWED = sys.argv[1:]
MODELS: dict[str, Remotable] = {}
SESSIONS: dict[str, "Handler"] = {}
ONE_AT_A_TIME = threading.Lock()


def deployed(key: str) -> Remotable:
    """The plain model of a key, loaded at its first request."""
    if key not in MODELS:
        assert json.loads(key.split(":", 1)[1])["repo_id"] in ALLOWED, f"no such model: {key}"
        MODELS[key] = Remotable.from_model_key(key, dispatch=True, device="cpu")
    return MODELS[key]


def execute(request: RequestModel, blob: bytes) -> bytes:
    """Run what a client traced; returns what it saved."""
    model = deployed(request.model_key)
    model._remoteable_set_env(request.env)
    # What nnsight remembers of a client's file is the block of one request: the next may be another of that file.
    remembered = [(store, dict(store)) for store in (linecache.cache, SOURCES, BLOCKS)]
    tracer = RequestModel.deserialize(blob, model._remoteable_persistent_objects(), request.compress)
    inc()
    try:
        tracer.execute(tracer.info.code)
        saved = {name: value for name, value in tracer.info.frame.f_locals.items() if id(value) in _saves()}
    finally:
        dec()
        model.interleaver.cancel()
        for store, before in remembered:
            store.clear()
            store.update(before)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    return compressed(buffer.getvalue()) if request.compress else buffer.getvalue()


def compressed(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=3).compress(data)


def answer(request: RequestModel, blob: bytes, job: str) -> tuple[int, bytes]:
    """The websocket message a request ends in, as its kind and its bytes."""
    with ONE_AT_A_TIME:
        try:
            result = execute(request, blob)
        except Exception:  # whatever a client's code raises is the client's to see
            failed = ResponseModel(id=job, status=Status.ERROR, description=traceback.format_exc())
            return 1, failed.model_dump_json().encode()
    return 2, ResponseModel(id=job, status=Status.COMPLETED, data=result).pickle()


class Handler(BaseHTTPRequestHandler):
    """One connection: a subscription, which stays open, or a request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        token = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accepted = base64.b64encode(hashlib.sha1(token.encode()).digest()).decode()
        self.send_response(101)
        for header in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accepted)):
            self.send_header(*header)
        self.end_headers()
        session = uuid.uuid4().hex
        SESSIONS[session] = self
        self.send_message(1, json.dumps({"session_id": session}).encode())
        self.rfile.read(1)  # the client says nothing but that it leaves, and waits for the answer
        self.send_message(8, b"")
        SESSIONS.pop(session)
        self.close_connection = True

    def send_message(self, kind: int, payload: bytes) -> None:
        length = struct.pack("!B", len(payload)) if len(payload) < 126 else struct.pack("!BQ", 127, len(payload))
        self.wfile.write(struct.pack("!B", 0x80 | kind) + length + payload)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        form = message_from_bytes(f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode() + body, policy=HTTP)
        fields = {part.get_param("name", header="content-disposition"): part for part in form.iter_parts()}
        request = RequestModel.model_validate_json(fields["data"].get_payload(decode=True))
        blob, job = fields["blob"].get_payload(decode=True), uuid.uuid4().hex
        received = ResponseModel(id=job, status=Status.RECEIVED).model_dump_json().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(received)))
        self.end_headers()
        self.wfile.write(received)
        SESSIONS[request.session_id].send_message(*answer(request, blob, job))

    def log_message(self, *args: object) -> None:
        """Nothing: the tests read what the clients see."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
