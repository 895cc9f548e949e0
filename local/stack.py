"""The product's own stack on the embedded cloud."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.adapters.job_table import JobTable
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
