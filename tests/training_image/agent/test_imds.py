"""The metadata client against a service that answers as the recorded one does."""

import pytest

from agent.identity import interface_of, read_identity
from agent.imds import Imds, ImdsUnavailable, Notice, read_notice, read_warnings
from agent.journal import Journal
from agent.notices import NoticePoller, WarningPoller


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_one_token_serves_many_reads_until_most_of_its_life_is_over(metadata):
    clock = Clock()
    imds = Imds(metadata.endpoint, clock=clock)
    metadata.documents["instance-id"] = "i-1"
    assert [imds.read("instance-id"), imds.read("instance-id"), len(metadata.tokens)] == ["i-1", "i-1", 1]
    clock.now = 0.8 * 21600
    imds.read("instance-id")
    assert len(metadata.tokens) == 2


def test_a_token_that_died_early_is_renewed_in_the_same_read(metadata):
    imds = Imds(metadata.endpoint)
    metadata.documents["instance-id"] = "i-1"
    imds.read("instance-id")
    metadata.tokens.append("of a new service")
    assert imds.read("instance-id") == "i-1"


def test_a_document_that_is_not_there_is_none(metadata):
    assert Imds(metadata.endpoint).read("spot/instance-action") is None


@pytest.mark.parametrize("status", [400, 403, 500, 503])
def test_another_status_is_unavailable(metadata, status):
    metadata.status = status
    with pytest.raises(ImdsUnavailable):
        Imds(metadata.endpoint).read("instance-id")


def test_a_service_that_is_not_there_is_unavailable():
    with pytest.raises(ImdsUnavailable):
        Imds("http://127.0.0.1:9/").read("instance-id")


def test_a_notice_has_its_end_in_epoch_seconds(metadata):
    metadata.documents["spot/instance-action"] = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
    assert read_notice(Imds(metadata.endpoint)) == Notice(action="terminate", deadline_at=1505722920.0)


@pytest.mark.parametrize("text", ["", "soon", "[]", "{}", '{"action": "stop", "time": "soon"}'])
def test_a_notice_in_another_form_is_unavailable(metadata, text):
    metadata.documents["spot/instance-action"] = text
    with pytest.raises(ImdsUnavailable):
        read_notice(Imds(metadata.endpoint))


def test_a_failed_poll_keeps_the_notice_and_is_written_down_once(metadata, tmp_path):
    poller = NoticePoller(Imds(metadata.endpoint), Journal(tmp_path / "events.jsonl"), interval_s=0.01)
    metadata.documents["spot/instance-action"] = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
    poller._round()
    metadata.status = 500
    poller._round()
    poller._round()
    assert poller.latest().action == "terminate"
    assert (tmp_path / "events.jsonl").read_text().count("metadata_silent") == 1


MAINTENANCE = (
    '[{"NotBefore": "14 Dec 2026 15:00:00 GMT", "Code": "system-reboot", "EventId": "instance-event-0d59", '
    '"State": "active"}, {"NotBefore": "1 Dec 2026 15:00:00 GMT", "Code": "system-reboot", "State": "completed"}]'
)


def test_advice_and_standing_maintenance_are_warnings(metadata):
    imds = Imds(metadata.endpoint)
    assert read_warnings(imds) == ()
    metadata.documents |= {
        "events/recommendations/rebalance": '{"noticeTime": "2020-10-27T08:22:00Z"}',
        "events/maintenance/scheduled": MAINTENANCE,
    }
    assert read_warnings(imds) == (
        Notice(action="rebalance", deadline_at=1603786920.0),
        Notice(action="system-reboot", deadline_at=1797260400.0),
    )


@pytest.mark.parametrize("name", ["events/recommendations/rebalance", "events/maintenance/scheduled"])
@pytest.mark.parametrize(
    "text", ["soon", "5", '[{"Code": 1}]', '[{"State": "active", "NotBefore": "soon", "Code": "x"}]']
)
def test_a_warning_in_another_form_is_unavailable_and_keeps_the_last(metadata, tmp_path, name, text):
    poller = WarningPoller(Imds(metadata.endpoint), Journal(tmp_path / "events.jsonl"), interval_s=30.0)
    metadata.documents["events/maintenance/scheduled"] = MAINTENANCE
    poller._round()
    metadata.documents[name] = text
    assert poller._round() == 30.0
    assert [warning.action for warning in poller.latest()] == ["system-reboot"]


def test_the_node_knows_itself_by_its_metadata(metadata):
    metadata.documents |= {
        "instance-id": "i-1",
        "instance-type": "c7i.large",
        "local-ipv4": "127.0.0.1",
        "placement/availability-zone": "eu-west-1a",
        "placement/region": "eu-west-1",
    }
    with pytest.raises(ImdsUnavailable, match="holdfast:job"):
        read_identity(Imds(metadata.endpoint))
    metadata.documents["tags/instance/holdfast:job"] = "tiny-1"
    identity = read_identity(Imds(metadata.endpoint))
    assert (identity.instance, identity.job, identity.interface) == ("i-1", "tiny-1", "lo")


def test_an_address_that_no_interface_owns_is_an_error():
    assert interface_of("127.8.8.8") == "lo"
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        interface_of("192.0.2.1")
