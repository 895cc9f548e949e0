"""Each repair of the engine, seen from outside through boto3."""

import json
import time
import uuid

import pytest

from tests.local.probing import eventually

pytestmark = pytest.mark.cloud


def execute(stack, *, timeout_s=30, heartbeat_s=30, fail=False):
    """A running execution of the waiting machine: (arn, first token)."""
    key = uuid.uuid4().hex
    request = {"id": key, "timeout_s": timeout_s, "heartbeat_s": heartbeat_s, "fail": fail}
    arn = stack.client("stepfunctions").start_execution(
        stateMachineArn=stack.outputs["Machine"], name=key, input=json.dumps(request)
    )["executionArn"]
    [token] = eventually(lambda: stack.notes(f"token-{key}"))
    return arn, token


def ended(stack, arn):
    described = stack.client("stepfunctions").describe_execution(executionArn=arn)
    return described if described["status"] != "RUNNING" else None


def put_event(stack, source):
    entry = {"Source": source, "DetailType": "probe", "Detail": "{}"}
    stack.client("events").put_events(Entries=[entry])


def test_the_template_is_deployed_in_a_few_seconds(stack):
    assert stack.outputs["Machine"].startswith("arn:aws:states:")
    assert stack.deploy_s < 10


def test_a_function_finds_its_layer_and_the_endpoint(stack):
    answer = stack.client("lambda").invoke(
        FunctionName=stack.outputs["Environment"], Payload=json.dumps({"names": ["AWS_ENDPOINT_URL", "PROBE_TABLE"]})
    )
    facts = json.loads(answer["Payload"].read())
    assert facts["greeting"] == "from the layer"
    assert facts["AWS_ENDPOINT_URL"] == stack.cloud.endpoint_url
    assert facts["PROBE_TABLE"] == stack.outputs["Probes"]


def test_a_raised_exception_keeps_its_class_name(stack):
    answer = stack.client("lambda").invoke(FunctionName=stack.outputs["Environment"], Payload=b"{}")
    assert json.loads(answer["Payload"].read())["errorType"] == "KeyError"


def test_a_rule_to_a_raising_function_reaches_its_on_failure_queue(stack):
    put_event(stack, "probe.boom")
    [message] = eventually(lambda: stack.received("FailedCalls"))
    assert json.loads(message["Body"])["responsePayload"]["errorType"] == "Boom"
    assert len(stack.notes("boom")) == 3


def test_an_event_whose_target_is_gone_reaches_the_dead_letter_queue_of_the_rule(stack):
    put_event(stack, "probe.lost")
    [message] = eventually(lambda: stack.received("LostEvents"))
    assert json.loads(message["Body"])["source"] == "probe.lost"
    assert message["MessageAttributes"]["ERROR_CODE"]["StringValue"] == "NO_SUCH_TARGET"


def test_a_schedule_fires_at_its_shortened_rate(stack):
    eventually(lambda: len(stack.notes("tick")) >= 2)


def test_a_timeout_from_a_path_fires(stack):
    arn, _ = execute(stack, timeout_s=1)
    assert json.loads(eventually(lambda: ended(stack, arn))["output"]) == "deadline"


def test_silence_is_a_heartbeat_timeout_and_beats_keep_the_step_alive(stack):
    arn, token = execute(stack, heartbeat_s=1)
    sfn, beats = stack.client("stepfunctions"), iter(range(4))

    def beat():
        sfn.send_task_heartbeat(taskToken=token)
        return next(beats, None) is None

    while not beat():
        time.sleep(0.5)  # the pace of the beats is what is tested
    assert ended(stack, arn) is None
    assert json.loads(eventually(lambda: ended(stack, arn))["output"]) == "silence"


def test_a_token_step_whose_function_fails_fails_at_once(stack):
    arn, _ = execute(stack, fail=True)
    assert json.loads(eventually(lambda: ended(stack, arn), within_s=3)["output"]) == "step failed"


def test_a_stopped_execution_stays_aborted_and_its_token_is_dead(stack):
    arn, token = execute(stack, timeout_s=1)
    sfn = stack.client("stepfunctions")
    sfn.stop_execution(executionArn=arn, error="Cancelled", cause="by test")
    try:
        sfn.send_task_heartbeat(taskToken=token)
        dead = False
    except sfn.exceptions.TaskDoesNotExist:
        dead = True
    later, _ = execute(stack, timeout_s=2)  # ends after the stopped one's deadline has passed
    eventually(lambda: ended(stack, later))
    assert dead
    assert ended(stack, arn)["status"] == "ABORTED"


def test_a_reported_stream_record_comes_again_and_is_given_up_with_its_neighbours_delivered(stack):
    dynamodb = stack.client("dynamodb")
    for name in ("first", "poison", "last"):
        dynamodb.put_item(TableName=stack.outputs["Things"], Item={"name": {"S": name}})
    [message] = eventually(lambda: stack.received("FailedRecords"))
    assert json.loads(message["Body"])["requestContext"]["condition"] == "RetryAttemptsExhausted"
    eventually(lambda: any("last" in names for names in stack.notes("stream")))
    assert sum("poison" in names for names in stack.notes("stream")) == 3


def test_the_sender_of_a_report_is_the_instance_whose_key_signed_it(stack):
    instance = f"i-0{uuid.uuid4().hex[:16]}"
    body = json.dumps({"kind": "ready", "instance": instance})
    stack.client("sqs", access_key=instance).send_message(QueueUrl=stack.outputs["Reports"], MessageBody=body)
    found = eventually(lambda: [one for one in stack.notes("queue") if one["body"] == body])
    assert found[0]["sender"].endswith(f":{instance}")


def test_muted_reports_are_lost_while_the_sender_is_told_otherwise(stack):
    lost, kept = (json.dumps({"kind": kind, "id": uuid.uuid4().hex}) for kind in ("heard", "progress"))
    stack.cloud.mute(reports=["heard"])
    sqs, url = stack.client("sqs"), stack.outputs["Reports"]
    assert sqs.send_message(QueueUrl=url, MessageBody=lost)["MessageId"]
    answer = sqs.send_message_batch(
        QueueUrl=url, Entries=[{"Id": "a", "MessageBody": lost}, {"Id": "b", "MessageBody": kept}]
    )
    stack.cloud.mute()
    assert {one["Id"] for one in answer["Successful"]} == {"a", "b"}
    eventually(lambda: any(one["body"] == kept for one in stack.notes("queue")))
    assert not any(one["body"] == lost for one in stack.notes("queue"))


def test_expiry_and_recovery_of_the_template_hold_for_the_table(stack):
    dynamodb, table = stack.client("dynamodb"), stack.outputs["Probes"]
    assert dynamodb.describe_time_to_live(TableName=table)["TimeToLiveDescription"]["AttributeName"] == "expires_at"
    backups = dynamodb.describe_continuous_backups(TableName=table)["ContinuousBackupsDescription"]
    assert backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"] == "ENABLED"


def test_writes_are_in_the_call_log_with_their_keys(stack):
    dynamodb, table = stack.client("dynamodb", access_key="i-0123456789abcdef0"), stack.outputs["Probes"]
    key = {"topic": {"S": "logged"}, "at": {"S": uuid.uuid4().hex}}
    dynamodb.put_item(TableName=table, Item={**key, "fact": {"S": "1"}})
    calls = [one for one in stack.cloud.journal("api_calls") if one["caller"] == "i-0123456789abcdef0"]
    assert calls[-1]["items"] == [{"table": table, "key": key}]
    assert (calls[-1]["service"], calls[-1]["operation"], calls[-1]["status"]) == ("dynamodb", "PutItem", 200)


def test_an_alarm_rises_with_the_depth_of_its_queue_and_falls_again(stack):
    def news():
        bodies = [json.loads(message["Body"]) for message in stack.received("AlarmNews")]
        return [json.loads(body["Message"])["NewStateValue"] for body in bodies]

    sqs, url = stack.client("sqs"), stack.outputs["Watched"]
    eventually(lambda: "OK" in news())
    sqs.send_message(QueueUrl=url, MessageBody="1")
    eventually(lambda: "ALARM" in news())
    sqs.purge_queue(QueueUrl=url)
    eventually(lambda: "OK" in news())


def test_dead_letters_are_moved_back_to_the_queue_they_came_from(stack):
    sqs = stack.client("sqs")
    dead = sqs.create_queue(QueueName=f"dead-{uuid.uuid4().hex}")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
    source = sqs.create_queue(QueueName=f"source-{uuid.uuid4().hex}", Attributes={"RedrivePolicy": policy})["QueueUrl"]
    sqs.send_message(QueueUrl=dead, MessageBody="try me again")
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [source]
    sqs.start_message_move_task(SourceArn=arn)
    [task] = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
    assert (task["Status"], task["ApproximateNumberOfMessagesMoved"]) == ("COMPLETED", 1)
    [message] = sqs.receive_message(QueueUrl=source)["Messages"]
    assert message["Body"] == "try me again"
