"""The engine: ministack with the repairs and the machines, served on loopback until its parent ends."""

import asyncio
import os
import sys
import threading

from local.engine import seams
from local.engine.settings import REGION, Settings, from_environment
from local.processes import FORKER_THREAD, Forker


def main() -> None:
    settings = from_environment()
    # ministack reads these when it is imported.
    os.environ |= {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(settings.port),
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "MINISTACK_REGION": REGION,
        "MINISTACK_HOST": "127.0.0.1",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": settings.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    threading.excepthook = _end_with_a_vital_thread
    app = assemble(settings)
    threading.Thread(target=_import_ahead, name="import-ahead", daemon=True).start()
    asyncio.run(_serve(app, settings.listener))


def assemble(settings: Settings):
    """The ASGI application with every repair applied. Raises seams.SeamMissing when ministack is another version."""
    from local.engine import (
        alarms,
        async_invoke,
        cfn_types,
        dynamodb,
        ec2,
        events,
        faults,
        gateway,
        lambda_ric,
        redrive,
        schedules,
        sqs,
        stepfunctions,
        streams,
    )
    from local.engine.capacity import Capacity
    from local.engine.journal import Journal
    from local.engine.nodes import Nodes

    parts = [
        alarms,
        async_invoke,
        cfn_types,
        dynamodb,
        ec2,
        events,
        gateway,
        lambda_ric,
        redrive,
        schedules,
        sqs,
        stepfunctions,
        streams,
    ]
    for part in parts:
        seams.check(part.NEEDS)

    from ministack.app import app

    root, forker, muted_kinds = settings.root_path, Forker(), set()
    source = events.EventSource(Journal(root / "events.jsonl"))
    nodes = Nodes(settings, Capacity(), source, forker)
    lambda_ric.apply(settings, forker)
    async_invoke.apply()
    schedules.apply(settings.schedule_factor)
    streams.apply()
    sqs.apply(muted_kinds)
    redrive.apply()
    stepfunctions.apply()
    dynamodb.apply()
    cfn_types.apply()
    alarms.apply(source, settings.alarm_period_factor)
    ec2.Ec2(nodes, Journal(root / "ec2_calls.jsonl")).apply()
    return gateway.Gateway(app, faults.Faults(nodes, source, muted_kinds), Journal(root / "api_calls.jsonl"))


def _end_with_a_vital_thread(failure: threading.ExceptHookArgs) -> None:
    """An engine that keeps no nodes any more must not look alive; the warden ends what it leaves."""
    from local.engine import nodes

    threading.__excepthook__(failure)
    if failure.thread and failure.thread.name in (nodes.THREAD, FORKER_THREAD):
        os._exit(70)


def _import_ahead() -> None:
    """The first deployment and the first EC2 call don't wait for slow imports."""
    import samtranslator.translator.transform  # noqa: F401
    from ministack.services import cloudformation, cloudwatch_logs, iam, s3, ssm  # noqa: F401

    from local.engine import ec2, ec2_protocol

    ec2_protocol.operation("CreateFleet")
    ec2.instance_types()


async def _serve(app, listener: int) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"fd://{listener}"]
    config.keep_alive_timeout = 75
    config.loglevel = "WARNING"
    await serve(app, config, shutdown_trigger=asyncio.Event().wait)


if __name__ == "__main__":
    sys.exit(main())
