"""Whatever fails waits in a queue, and a person is told of it."""

import re

import deployed
import pytest

QUEUES = deployed.resources("AWS::SQS::Queue")
FUNCTIONS = deployed.resources("AWS::Lambda::Function")
MAPPINGS = deployed.resources("AWS::Lambda::EventSourceMapping")
RULES = deployed.resources("AWS::Events::Rule")
ALARMS = deployed.resources("AWS::CloudWatch::Alarm")
INVOKE_CONFIGS = deployed.resources("AWS::Lambda::EventInvokeConfig")
FOUR_DAYS_S = 345_600  # what SQS keeps a message for unless told otherwise

READ = {
    deployed.named(mapping["EventSourceArn"]): mapping
    for mapping in MAPPINGS.values()
    if deployed.named(mapping["EventSourceArn"]) in QUEUES
}
STREAMS = {name: mapping for name, mapping in MAPPINGS.items() if "StartingPosition" in mapping}
CALLED_BY_RULES = {
    deployed.named(target["Arn"])
    for rule in RULES.values()
    for target in rule["Targets"]
    if deployed.named(target["Arn"]) in FUNCTIONS
}
NOTICES = ("OnSpotInterruption", "OnCapacityBlockEvent")


def dead_letters(queue: str) -> str:
    return deployed.named(QUEUES[queue]["RedrivePolicy"]["deadLetterTargetArn"])


def watched(metric: str, dimension: str) -> set[str]:
    """Logical ids of what an alarm watches by a metric."""
    return {
        deployed.named(alarm["Dimensions"][0]["Value"])
        for alarm in ALARMS.values()
        if alarm["MetricName"] == metric and alarm["Dimensions"][0]["Name"] == dimension
    }


AGES = {"ApproximateAgeOfOldestMessage", "IteratorAge"}
PATIENT = {"CapacityRefused"}
MEASURED = re.compile(r"""(?:measure\(|_one_more\(|self\.found\[)"(\w+)""")


def test_requests_controls_and_node_reports_are_read():
    assert set(READ) == {"RequestQueue", "ControlQueue", "NodeReportQueue"}


@pytest.mark.parametrize("queue", READ)
def test_a_queue_that_is_read_has_dead_letters_and_an_alarm_on_them(queue):
    assert QUEUES[queue]["RedrivePolicy"]["maxReceiveCount"] >= 5
    assert dead_letters(queue) in watched("ApproximateNumberOfMessagesVisible", "QueueName")


@pytest.mark.parametrize("queue", READ)
def test_dead_letters_are_kept_longer_than_the_queue_keeps_its_messages(queue):
    assert QUEUES[dead_letters(queue)]["MessageRetentionPeriod"] > QUEUES[queue].get(
        "MessageRetentionPeriod", FOUR_DAYS_S
    )


@pytest.mark.parametrize("queue", READ)
def test_a_message_stays_hidden_for_six_timeouts_of_its_function(queue):
    timeout_s = FUNCTIONS[deployed.named(READ[queue]["FunctionName"])]["Timeout"]
    window_s = READ[queue].get("MaximumBatchingWindowInSeconds", 0)
    assert QUEUES[queue]["VisibilityTimeout"] >= 6 * timeout_s + window_s


@pytest.mark.parametrize("queue", READ)
def test_one_bad_message_does_not_fail_its_batch(queue):
    assert READ[queue]["FunctionResponseTypes"] == ["ReportBatchItemFailures"]


@pytest.mark.parametrize("queue", QUEUES)
def test_every_queue_is_encrypted(queue):
    assert QUEUES[queue]["SqsManagedSseEnabled"] is True


def test_results_arrive_once_under_an_id_of_ours():
    assert QUEUES["ResultQueue"]["FifoQueue"] is True
    assert QUEUES["ResultQueue"]["ContentBasedDeduplication"] is False


def test_every_function_that_is_called_asynchronously_has_a_place_for_its_failures():
    configured = {deployed.named(config["FunctionName"]): config for config in INVOKE_CONFIGS.values()}
    assert set(configured) == CALLED_BY_RULES
    for config in configured.values():
        assert deployed.named(config["DestinationConfig"]["OnFailure"]["Destination"]) == "FailedCalls"
        assert config["MaximumRetryAttempts"] == 2


@pytest.mark.parametrize("function", NOTICES)
def test_a_notice_is_not_tried_for_longer_than_it_is_good_for(function):
    config = next(one for one in INVOKE_CONFIGS.values() if deployed.named(one["FunctionName"]) == function)
    assert config["MaximumEventAgeInSeconds"] <= 120
    ages = [
        target["RetryPolicy"]["MaximumEventAgeInSeconds"]
        for rule in RULES.values()
        for target in rule["Targets"]
        if deployed.named(target["Arn"]) == function
    ]
    assert min(ages) <= 120


def test_a_reservations_warning_is_delivered_within_its_time_and_a_health_event_for_a_day():
    ages = {name: RULES[name]["Targets"][0]["RetryPolicy"]["MaximumEventAgeInSeconds"] for name in RULES}
    assert ages["OnCapacityBlockEventTaken"] <= 120
    assert ages["OnHealthEventTrouble"] == 86_400


def test_evictions_are_asked_for_under_the_name_that_cloudtrail_gives_them():
    pattern = RULES["OnBidEvictedTaken"]["EventPattern"]
    assert pattern["detail-type"] == ["AWS Service Event via CloudTrail"]
    assert pattern["detail"] == {"eventName": ["BidEvictedEvent"]}


@pytest.mark.parametrize("word", ["Delivered", "Expiration Warning"])
def test_both_names_of_a_blocks_events_are_matched(word):
    names = RULES["OnCapacityBlockEventEnds"]["EventPattern"]["detail-type"]
    assert {f"Capacity Block {word}", f"Capacity Block Reservation {word}"} <= set(names)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_not_held_up_for_ever_by_a_record_that_fails(name):
    mapping = STREAMS[name]
    assert 1 <= mapping["MaximumRetryAttempts"] <= 10
    assert deployed.named(mapping["DestinationConfig"]["OnFailure"]["Destination"]) == "FailedCalls"
    assert mapping["FilterCriteria"]["Filters"]


def test_a_change_that_cannot_be_published_does_not_take_others_with_it():
    [mapping] = [one for one in STREAMS.values() if deployed.named(one["FunctionName"]) == "PublishChanges"]
    assert mapping["BisectBatchOnFunctionError"] is True
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]


@pytest.mark.parametrize("rule", RULES)
def test_an_event_that_cannot_be_delivered_is_kept(rule):
    for target in RULES[rule]["Targets"]:
        assert target["RetryPolicy"]["MaximumEventAgeInSeconds"] >= 60
        assert deployed.named(target["DeadLetterConfig"]["Arn"]) == "RuleDeadLetters"


def test_every_rule_may_write_its_dead_letters():
    [statement] = deployed.resources("AWS::SQS::QueuePolicy")["RuleDeadLettersPolicy"]["PolicyDocument"]["Statement"]
    arns = [
        arn["Fn::If"][1] if "Fn::If" in arn else arn for arn in statement["Condition"]["ArnEquals"]["aws:SourceArn"]
    ]
    assert {deployed.named(arn) for arn in arns} == set(RULES)


def test_every_place_where_failures_wait_has_an_alarm():
    places = {dead_letters(queue) for queue in READ} | {"FailedCalls", "RuleDeadLetters"}
    assert watched("ApproximateNumberOfMessagesVisible", "QueueName") == places


def test_the_first_failure_alarms():
    for alarm in ALARMS.values():
        assert alarm["ComparisonOperator"] == "GreaterThanThreshold"
        if str(alarm["MetricName"]) not in AGES:
            assert alarm["Threshold"] == 0
        if str(alarm["MetricName"]) not in PATIENT:
            assert alarm["EvaluationPeriods"] == 1


@pytest.mark.parametrize("metric", ["ExecutionsFailed", "ExecutionsTimedOut", "ExecutionsAborted"])
def test_an_attempt_that_did_not_end_in_order_has_an_alarm(metric):
    assert watched(metric, "StateMachineArn") == {"RunAttempt"}


def test_an_attempt_that_did_not_end_in_order_is_told_to_its_door():
    pattern = RULES["OnAttemptEndedBadly"]["EventPattern"]
    assert pattern["detail"]["status"] == ["FAILED", "TIMED_OUT", "ABORTED"]


def test_every_queue_that_is_read_has_an_alarm_on_what_waits_in_it():
    assert watched("ApproximateAgeOfOldestMessage", "QueueName") == set(READ)


def test_news_that_are_late_have_an_alarm():
    assert watched("IteratorAge", "FunctionName") == {"PublishChanges"}


def test_whatever_this_product_measures_has_an_alarm_of_its_stack():
    sources = "\n".join(
        path.read_text()
        for folder in ("layers/holdfast/holdfast/application", "functions")
        for path in (deployed.ROOT / folder).rglob("*.py")
    )
    own = [one for one in ALARMS.values() if one["Namespace"] == "Holdfast" and isinstance(one["MetricName"], str)]
    assert {one["MetricName"] for one in own} == set(MEASURED.findall(sources))
    for alarm in own:
        assert alarm["Dimensions"] == [{"Name": "stack", "Value": {"Ref": "AWS::StackName"}}]


def test_a_function_that_fails_for_good_has_an_alarm_whichever_it_is():
    filters = deployed.resources("AWS::Logs::MetricFilter")
    [alarm] = [one for one in ALARMS.values() if one["MetricName"] == {"Fn::Sub": "DoorErrors-${AWS::StackName}"}]
    for one in filters.values():
        [metric] = one["MetricTransformations"]
        assert (metric["MetricName"], metric["MetricNamespace"]) == (alarm["MetricName"], alarm["Namespace"])
        assert "DefaultValue" not in metric
        assert one["LogGroupName"] == {"Ref": "DoorLogs"}
    assert {function["LoggingConfig"]["LogGroup"]["Ref"] for function in FUNCTIONS.values()} == {"DoorLogs"}


@pytest.mark.parametrize("alarm", ALARMS)
def test_every_alarm_tells_the_topic_and_says_what_to_do(alarm):
    assert ALARMS[alarm]["AlarmActions"] == [{"Ref": "AlarmTopic"}]
    assert ALARMS[alarm]["TreatMissingData"] == "notBreaching"
    assert len(ALARMS[alarm]["AlarmDescription"]) > 40
