"""How the behaviour checks look at a cloud with the small template deployed."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from local.cloud import Cloud

HERE = Path(__file__).resolve().parent


def eventually(look, *, within_s: float = 10.0):
    """The first true thing that `look` returns; fails when none came in time."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"still {found!r} after {within_s} s"
        time.sleep(0.05)
    return found


@dataclass
class Stack:
    cloud: Cloud
    outputs: dict[str, str]
    deploy_s: float

    def client(self, service: str, **options):
        return self.cloud.client(service, **options)

    def notes(self, topic: str) -> list:
        """What the functions wrote about a topic, oldest first."""
        rows = self.client("dynamodb").query(
            TableName=self.outputs["Probes"],
            KeyConditionExpression="topic = :topic",
            ExpressionAttributeValues={":topic": {"S": topic}},
            ConsistentRead=True,
        )["Items"]
        return [json.loads(row["fact"]["S"]) for row in rows]

    def received(self, output: str) -> list[dict]:
        """The messages of a queue, which are gone afterwards."""
        sqs, url = self.client("sqs"), self.outputs[output]
        messages = sqs.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, AttributeNames=["All"], MessageAttributeNames=["All"]
        ).get("Messages", [])
        for message in messages:
            sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return messages

    def launch(self, count: int = 1, *, market: str = "spot", token: str = "", **tags: str) -> dict:
        """The answer to one CreateFleet for c5.large in us-east-1a, all or nothing."""
        options = {"SingleInstanceType": True, "SingleAvailabilityZone": True, "MinTargetCapacity": count}
        specification = {"LaunchTemplateId": self.outputs["NodeTemplate"], "Version": "$Latest"}
        pairs = [{"Key": f"holdfast:{key}", "Value": value} for key, value in tags.items()]
        return self.client("ec2").create_fleet(
            Type="instant",
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": specification,
                    "Overrides": [{"InstanceType": "c5.large", "SubnetId": "subnet-00000001"}],
                }
            ],
            TargetCapacitySpecification={"TotalTargetCapacity": count, "DefaultTargetCapacityType": market},
            TagSpecifications=[{"ResourceType": kind, "Tags": pairs} for kind in ("fleet", "instance") if pairs],
            **({"ClientToken": token} if token else {}),
            **({"SpotOptions": options} if market == "spot" else {"OnDemandOptions": options}),
        )

    def state(self, instance_id: str) -> str:
        return next(one["state"] for one in self.cloud.instances() if one["instance"] == instance_id)
