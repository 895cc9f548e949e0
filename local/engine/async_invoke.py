"""Rules and schedules invoke functions asynchronously, as AWS does: retries, then the OnFailure destination.
A target that is gone sends its event to the rule's dead-letter queue."""

import json

from ministack.services import eventbridge, lambda_svc, sns, sqs, stepfunctions

NEEDS = {
    "ministack.services.eventbridge": ("_dispatch_to_lambda", "_invoke_target", "_pattern_event_view"),
    "ministack.services.lambda_svc": (
        "_get_func_record_for_ref",
        "_execution_record_for_config",
        "invoke_async_with_retry",
    ),
    "ministack.services.sqs": ("_queue_by_arn", "_act_send_message"),
    "ministack.services.sns": ("_topics",),
    "ministack.services.stepfunctions": ("_resolve_state_machine_arn",),
}


def apply() -> None:
    eventbridge._dispatch_to_lambda = _to_lambda
    eventbridge._invoke_target = _invoke_target


_stock_invoke_target = eventbridge._invoke_target


def _to_lambda(arn: str, payload: str) -> None:
    func, config, _ = lambda_svc._get_func_record_for_ref(arn)
    if func and config:
        lambda_svc.invoke_async_with_retry(lambda_svc._execution_record_for_config(func, config), _event(payload))


def _event(payload: str) -> dict:
    try:
        return json.loads(payload)
    except (ValueError, TypeError):
        return {"body": payload}


def _invoke_target(target: dict, event: dict, rule: dict, view=None):
    dead_letters = (target.get("DeadLetterConfig") or {}).get("Arn")
    if not dead_letters or _exists(target["Arn"]):
        return _stock_invoke_target(target, event, rule, view)
    queue = sqs._queue_by_arn(dead_letters)
    if queue is not None:
        body = (view or eventbridge._pattern_event_view(event)).event_with_detail()
        attributes = {"RULE_ARN": rule.get("Arn", ""), "TARGET_ARN": target["Arn"], "ERROR_CODE": "NO_SUCH_TARGET"}
        message = {
            "MessageBody": json.dumps(body),
            "MessageAttributes": {
                name: {"DataType": "String", "StringValue": text} for name, text in attributes.items()
            },
        }
        sqs._act_send_message(message, queue["url"])
    return None


def _exists(arn: str) -> bool:
    service = arn.split(":")[2]
    if service == "sqs":
        return sqs._queue_by_arn(arn) is not None
    if service == "lambda":
        return bool(lambda_svc._get_func_record_for_ref(arn)[0])
    if service == "states":
        return stepfunctions._resolve_state_machine_arn(arn) is not None
    return arn in sns._topics if service == "sns" else True
