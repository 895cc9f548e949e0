"""The only place that knows both the application and AWS: one session, clients made on first use."""

from __future__ import annotations

import time
from functools import cache, cached_property
from typing import Any

import boto3.session
from botocore.config import Config

from holdfast.adapters.catalogue_ec2 import Ec2Catalogue
from holdfast.adapters.checkpoints_s3 import S3Checkpoints
from holdfast.adapters.fleets_ec2 import Ec2Fleets
from holdfast.adapters.job_table import JobTable
from holdfast.adapters.outbox import AwsOutbox
from holdfast.adapters.reports_s3 import S3Reports
from holdfast.adapters.request_files_s3 import S3RequestFiles
from holdfast.adapters.workflow_sfn import StepFunctions
from holdfast.runtime.settings import settings

# CreateFleet of a large gang answers late; a second call by the SDK would only ask under the same token.
EC2_CONFIG = Config(connect_timeout=3, read_timeout=55, retries={"total_max_attempts": 1})
CONFIG = Config(connect_timeout=2, read_timeout=8, retries={"mode": "standard", "total_max_attempts": 4})


class Supervisor:
    """Keeps ports.Ports on AWS; each port is made when first asked for."""

    clock, pause = staticmethod(time.time), staticmethod(time.sleep)

    @cached_property
    def session(self) -> boto3.session.Session:
        return boto3.session.Session()

    def client(self, service: str, config: Config = CONFIG) -> Any:
        return self.session.client(service, config=config)

    @cached_property
    def store(self) -> JobTable:
        return JobTable(self.client("dynamodb"), jobs=settings().jobs_table, orders=settings().orders_table)

    @cached_property
    def workflow(self) -> StepFunctions:
        return StepFunctions(self.client("stepfunctions"), state_machine_arn=settings().state_machine_arn)

    @cached_property
    def fleets(self) -> Ec2Fleets:
        return Ec2Fleets(
            self.client("ec2", EC2_CONFIG),
            stack=settings().stack,
            launch_template_id=settings().launch_template_id,
            subnet_ids=settings().subnet_ids,
        )

    @cached_property
    def checkpoints(self) -> S3Checkpoints:
        return S3Checkpoints(self.client("s3"), bucket=settings().bucket)

    @cached_property
    def catalogue(self) -> Ec2Catalogue:
        return Ec2Catalogue(
            self.client("ec2"),
            self.client("service-quotas"),
            subnet_ids=settings().subnet_ids,
            clock=self.clock,
        )

    @cached_property
    def request_files(self) -> S3RequestFiles:
        return S3RequestFiles(self.client("s3"), buckets=settings().request_buckets, owner=settings().account)

    @cached_property
    def reports(self) -> S3Reports:
        return S3Reports(self.client("s3"), bucket=settings().bucket)

    @property
    def bucket(self) -> str:
        return settings().bucket

    @cached_property
    def outbox(self) -> AwsOutbox:
        return AwsOutbox(
            self.client("events"),
            self.client("sqs"),
            bus=settings().bus,
            result_queue_url=settings().result_queue_url,
        )


@cache
def supervisor() -> Supervisor:
    return Supervisor()
