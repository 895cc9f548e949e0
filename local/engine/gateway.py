"""The one door: requests under /_holdfast/ are control, the others ministack's; writes are in api_calls.jsonl."""

import asyncio
import json
from urllib.parse import parse_qs, unquote

from ministack.core import router
from ministack.services import dynamodb

from local import self_check
from local.engine.faults import PREFIX, Faults
from local.engine.journal import Journal

NEEDS = {
    "ministack.app": ("app",),
    "ministack.core.router": ("extract_access_key_id",),
    "ministack.services.dynamodb": ("_tables",),
}

_READS = ("Describe", "Get", "List", "Head", "Query", "Scan", "BatchGet", "Receive", "TransactGet", "Lookup", "Filter")
_KEPT_BODY = 1 << 20
_S3_WRITES = {
    ("PUT", "partNumber"): "UploadPart",
    ("PUT", ""): "PutObject",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("POST", "delete"): "DeleteObjects",
    ("POST", ""): "PostObject",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("DELETE", ""): "DeleteObject",
}


class Gateway:
    """ASGI application around ministack's."""

    def __init__(self, app, faults: Faults, calls: Journal) -> None:
        self._app, self._faults, self._calls = app, faults, calls

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith(PREFIX):
            await self._control(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    async def _control(self, scope, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        verb, arguments = scope["path"].removeprefix(PREFIX), json.loads(body or b"{}")
        status, answer = await asyncio.to_thread(self._faults.answer, verb, arguments)
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _pass_on(self, scope, receive, send) -> None:
        call = _Call(scope)
        if not call.mutates_by_head():
            await self._app(scope, receive, send)
            return
        if scope["method"] == "PUT" and (delay_s := self._faults.upload_delay_s(scope["path"])):
            await asyncio.sleep(delay_s)

        async def received():
            message = await receive()
            call.take(message.get("body", b""))
            return message

        async def sent(message):
            call.status = message.get("status", call.status)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._log(call)  # before the caller has the whole answer, so that it finds its call in the log
            await send(message)

        await self._app(scope, received, sent)

    def _log(self, call: "_Call") -> None:
        if call.mutates() and call.caller != self_check.ACCOUNT:
            self._calls.write(**call.facts())


class _Call:
    """One request as far as the log needs it."""

    def __init__(self, scope) -> None:
        self._method, self._path = scope["method"], unquote(scope["path"])
        self._query = parse_qs(scope.get("query_string", b"").decode(), keep_blank_values=True)
        self._headers = {key.decode().lower(): value.decode("latin-1") for key, value in scope["headers"]}
        self._body = b""
        self.status = 0

    @property
    def service(self) -> str:
        parts = self._headers.get("authorization", "").split("/")
        return parts[3] if len(parts) > 3 else ""

    @property
    def caller(self) -> str:
        return router.extract_access_key_id(self._headers, self._query)

    @property
    def operation(self) -> str:
        if target := self._headers.get("x-amz-target"):
            return target.split(".")[-1]
        if self.service == "s3":
            return self._s3_operation()
        return self._form().get("Action", [f"{self._method} {self._path}"])[0]

    def mutates_by_head(self) -> bool:
        """False for what is plainly a read, so that its body is not kept."""
        target = self._headers.get("x-amz-target", "")
        return self._method not in ("GET", "HEAD") and not target.split(".")[-1].startswith(_READS)

    def mutates(self) -> bool:
        return not self.operation.startswith(_READS)

    def take(self, body: bytes) -> None:
        if self.service != "s3" and len(self._body) < _KEPT_BODY:
            self._body += body

    def facts(self) -> dict:
        about = {
            "service": self.service,
            "operation": self.operation,
            "status": self.status,
            "caller": self.caller,
        }
        return about | self._key_facts()

    def _key_facts(self) -> dict:
        if self.service == "s3":
            bucket, _, key = self._path.lstrip("/").partition("/")
            return {"bucket": bucket, "key": key}
        if not self._headers.get("x-amz-target"):
            return {}
        request = self._json()
        if self.service == "dynamodb":
            return {"items": _dynamodb_items(request)}
        names = ("QueueUrl", "executionArn", "stateMachineArn", "name", "MessageBody", "Entries", "error", "output")
        found = {name: request[name] for name in names if name in request}
        if "QueueUrl" in found:
            found["queue"] = found.pop("QueueUrl").rsplit("/", 1)[-1]
        return found

    def _json(self) -> dict:
        try:
            return json.loads(self._body or b"{}")
        except ValueError:
            return {}

    def _form(self) -> dict[str, list[str]]:
        if "x-www-form-urlencoded" in self._headers.get("content-type", ""):
            return parse_qs(self._body.decode(errors="replace"))
        return self._query

    def _s3_operation(self) -> str:
        for mark in ("partNumber", "uploads", "uploadId", "delete"):
            if mark in self._query and (self._method, mark) in _S3_WRITES:
                return _S3_WRITES[(self._method, mark)]
        return _S3_WRITES.get((self._method, ""), self._method)


def _dynamodb_items(request: dict) -> list[dict]:
    """What is written, by table and key."""
    if "TransactItems" in request:
        parts = [(name, part) for item in request["TransactItems"] for name, part in item.items()]
    elif "RequestItems" in request:
        parts = [
            (name.removesuffix("Request"), {"TableName": table, **part})
            for table, writes in request["RequestItems"].items()
            for write in writes
            for name, part in write.items()
        ]
    else:
        parts = [("", request)]
    return [_dynamodb_item(name, part) for name, part in parts]


def _dynamodb_item(operation: str, part: dict) -> dict:
    table = part.get("TableName", "").rsplit("/", 1)[-1]
    key = part.get("Key")
    if key is None and "Item" in part:
        schema = (dynamodb._tables.get(table) or {}).get("KeySchema", [])
        key = {one["AttributeName"]: part["Item"].get(one["AttributeName"]) for one in schema}
    return {"operation": operation, "table": table, "key": key} if operation else {"table": table, "key": key}
