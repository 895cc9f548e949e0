"""How the values of the last periods make the state of an alarm, without any cloud."""

import pytest

from local.engine.alarms import verdict


def alarm(**changes):
    defaults = {
        "ComparisonOperator": "GreaterThanThreshold",
        "Threshold": 0,
        "EvaluationPeriods": 3,
        "StateValue": "ALARM",
    }
    return defaults | changes


@pytest.mark.parametrize(
    ("values", "changes", "state"),
    [
        ([1, 1, 1], {}, "ALARM"),
        ([1, 0, 1], {}, "OK"),
        ([1, 0, 1], {"DatapointsToAlarm": 2}, "ALARM"),
        ([None, None, None], {}, "INSUFFICIENT_DATA"),
        ([None, None, None], {"TreatMissingData": "notBreaching"}, "OK"),
        ([None, None, None], {"TreatMissingData": "breaching"}, "ALARM"),
        ([None, None, None], {"TreatMissingData": "ignore"}, "ALARM"),
        ([None, 1, 1], {"TreatMissingData": "breaching"}, "ALARM"),
    ],
)
def test_missing_data_and_datapoints_to_alarm_count_as_the_alarm_says(values, changes, state):
    assert verdict(values, alarm(**changes)) == state
