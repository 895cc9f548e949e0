"""A door in a fresh process, its AWS calls answered below botocore as recorded. Prints what it cost, as JSON."""

import contextlib
import gc
import importlib
import io
import json
import sys
import time
from types import SimpleNamespace

WARM_CALLS = 300


def main(module: str, script: str) -> None:
    from pathlib import Path

    told = json.loads(Path(script).read_text())
    context = SimpleNamespace(
        function_name=module, memory_limit_in_mb=512, invoked_function_arn="arn:aws:lambda:us-east-1:1:function:f",
        aws_request_id="1", function_version="1",
    )  # fmt: skip
    begun = time.process_time()
    door = importlib.import_module(module)
    imported = time.process_time()

    from botocore.awsrequest import AWSResponse

    from holdfast.runtime.wiring import supervisor

    wire = Answers(told["answers"], told["order"], AWSResponse)
    first_begun = time.process_time()
    supervisor().session.events.register("before-send", wire.answer)
    with contextlib.redirect_stdout(io.StringIO()):
        door.handler(told["event"], context)
        first = wire.ordered_at - first_begun
        gc.collect()
        to_order, whole = [], []
        for _ in range(WARM_CALLS):
            wire.next = 0
            call_begun = time.process_time()
            door.handler(told["event"], context)
            whole.append(time.process_time() - call_begun)
            to_order.append(wire.ordered_at - call_begun)
    to_order.sort()
    print(
        json.dumps(
            {
                "import_ms": 1000 * (imported - begun),
                "first_ms": 1000 * first,
                "warm_ms": 1000 * to_order[WARM_CALLS // 2],
                "warm_p99_ms": 1000 * to_order[WARM_CALLS * 99 // 100],
                "whole_ms": 1000 * sorted(whole)[WARM_CALLS // 2],
            }
        )
    )


class Answers:
    """Gives each call the answer recorded at its place; another call than was recorded is an error."""

    def __init__(self, answers, order, response_class) -> None:
        self.answers, self.order, self.response_class = answers, order, response_class
        self.next = 0
        self.ordered_at = 0.0

    def answer(self, request, **_):
        service, operation, body = self.answers[self.next]
        target = request.headers["X-Amz-Target"]
        target = target.decode() if isinstance(target, bytes) else target
        if not target.endswith(f".{operation}"):
            raise RuntimeError(f"call {self.next} was {service}.{operation}, now it is {target}")
        self.next += 1
        response = self.response_class(request.url, 200, {}, None)
        response._content = body.encode()
        if self.next == self.order:
            self.ordered_at = time.process_time()
        return response


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
