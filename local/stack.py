"""The product's own stack on the embedded cloud."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.adapters.items import from_item, to_item
from holdfast.adapters.job_table import JobTable
from holdfast.domain.job import Job
from job_contract.orders import Roster, RosterNode, roster_key
from job_contract.version import decode
from local.cloud import Cloud

REPOSITORY = Path(__file__).resolve().parent.parent
AMI_PARAMETER = "/holdfast/local/ami"
SCHEDULE_FACTOR = 0.05
"""The minute of tick and sweep takes three seconds here."""


@dataclass(frozen=True)
class Stack:
    """The deployed template: its outputs, and the job table behind them."""

    cloud: Cloud
    outputs: dict[str, str]

    def send_request(self, body: str) -> None:
        self.cloud.client("sqs").send_message(QueueUrl=self.outputs["RequestQueueUrl"], MessageBody=body)

    def results(self, wait_s: int = 0) -> list[str]:
        """Take what lies on the result queue."""
        answer = self.cloud.client("sqs").receive_message(
            QueueUrl=self.outputs["ResultQueueUrl"], WaitTimeSeconds=wait_s, MaxNumberOfMessages=10
        )
        return [message["Body"] for message in answer.get("Messages", [])]

    def send_control(self, body: str) -> None:
        self.cloud.client("sqs").send_message(QueueUrl=self.outputs["ControlQueueUrl"], MessageBody=body)

    def members(self, job: Job) -> tuple[RosterNode, ...]:
        """The nodes of the job's newest roster, by node rank; none before its ranks were first started."""
        roster_id = job.roster_id or job.last_roster_id
        if roster_id is None:
            return ()
        key = to_item({"key": roster_key(job.id, roster_id)})
        item = self.cloud.client("dynamodb").get_item(TableName=self.outputs["OrdersTableName"], Key=key)["Item"]
        return decode(Roster, from_item(item)).nodes

    def table(self) -> JobTable:
        client: Any = self.cloud.client("dynamodb")
        return JobTable(client, jobs=self.outputs["JobsTableName"], orders=self.outputs["OrdersTableName"])


def deploy(cloud: Cloud) -> Stack:
    """template.yaml is deployed, with the default network's subnets and an image id of our own."""
    cloud.client("ssm").put_parameter(Name=AMI_PARAMETER, Value="ami-0123456789abcdef0", Type="String", Overwrite=True)
    parameters = {
        "VpcId": cloud.vpc_id,
        "SubnetIds": cloud.subnet_ids,
        "AmiParameter": AMI_PARAMETER,
        "ImageUri": "holdfast-training:local",
    }
    return Stack(cloud, cloud.deploy(REPOSITORY / "template.yaml", parameters))
