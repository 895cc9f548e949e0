"""What AWS offers, read through botocore: moto's instance types, and answers that moto cannot give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from holdfast.adapters.catalogue_ec2 import GOOD_FOR_S, Ec2Catalogue, on_demand_prices
from holdfast.adapters.request_files_s3 import S3RequestFiles
from holdfast.domain.errors import Rejected, Unavailable
from holdfast.messages.request_reference import LIMIT_BYTES
from tests.application.fakes import FakeClock

KEYS = {"aws_access_key_id": "t", "aws_secret_access_key": "t", "region_name": "us-east-1"}
TYPES = ("p5.48xlarge", "c7i.large", "m7g.large", "trn1.32xlarge", "g5.48xlarge", "p5.47xlarge")


class Quotas:
    """GetServiceQuota, which moto knows for other services only."""

    def __init__(self, **values: float) -> None:
        self.values, self.asked = values, []

    def get_service_quota(self, *, ServiceCode: str, QuotaCode: str) -> Any:
        self.asked.append((ServiceCode, QuotaCode))
        return {"Quota": {"Value": self.values[QuotaCode.replace("-", "")]}}


class Stubborn:
    """A client whose calls of one name fail with this code and status."""

    def __init__(self, client: Any, operation: str, code: str, status: int) -> None:
        self.client, self.operation = client, operation
        self.error = ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, operation)

    def __getattr__(self, name: str) -> Any:
        if name == self.operation:
            return self._fail
        return getattr(self.client, name)

    def get_paginator(self, name: str) -> Any:
        return self if name == self.operation else self.client.get_paginator(name)

    def paginate(self, **_: Any) -> Any:
        raise self.error

    def _fail(self, **_: Any) -> Any:
        raise self.error


@pytest.fixture
def ec2() -> Iterator[Any]:
    with mock_aws():
        yield boto3.client("ec2", **KEYS)


def subnets(ec2: Any) -> list[str]:
    return [subnet["SubnetId"] for subnet in ec2.describe_subnets()["Subnets"][:2]]


def catalogue(ec2: Any, quotas: Any = None, clock: FakeClock | None = None) -> Ec2Catalogue:
    quotas = quotas or Quotas(LC4BD4855=0.0, L34B43A08=640.0, L3819A6DF=96.0)
    return Ec2Catalogue(ec2, quotas, subnet_ids=subnets(ec2), clock=clock or FakeClock())


def test_types_are_what_ec2_says_of_them_and_unknown_ones_are_left_out(ec2: Any) -> None:
    types = catalogue(ec2).offers(TYPES, "spot").types
    assert types is not None
    assert set(types) == set(TYPES) - {"p5.47xlarge"}
    p5, cpu = types["p5.48xlarge"], types["c7i.large"]
    assert (p5.gpus, p5.gpu_name, p5.gpu_memory_bytes, p5.accelerator) == (8, "H100", 80 * 1024**3, "nvidia")
    assert (p5.efa_max, p5.vcpus, p5.network_gbps, p5.instance_store_bytes) == (32, 192, 100.0, 30_400 * 10**9)
    assert (cpu.gpus, cpu.accelerator, cpu.memory_bytes, cpu.efa_max) == (0, "", 4 * 1024**3, 0)
    assert (types["m7g.large"].arch, types["trn1.32xlarge"].accelerator) == ("arm64", "aws neuron")
    assert "us-east-1a" in (p5.zones or ())
    assert p5.spot_usd


def test_quotas_are_asked_for_by_the_families_that_are_named(ec2: Any) -> None:
    quotas = Quotas(LC4BD4855=0.0, L34B43A08=640.0)
    offers = catalogue(ec2, quotas).offers(("p5.48xlarge", "c7i.large"), "spot")
    assert offers.quotas == {"L-C4BD4855": 0.0, "L-34B43A08": 640.0}
    assert quotas.asked == [("ec2", "L-34B43A08"), ("ec2", "L-C4BD4855")]


def test_a_mixed_gang_has_spot_prices_and_no_quota_of_its_own(ec2: Any) -> None:
    offers = catalogue(ec2).offers(("c7i.large",), "mixed")
    kind = (offers.types or {})["c7i.large"]
    assert (offers.quotas, bool(kind.spot_usd)) == ({}, True)
    assert kind.price("mixed") == min(kind.spot_usd.values())


def test_free_addresses_are_counted_by_zone_of_the_stacks_own_subnets(ec2: Any) -> None:
    offers = catalogue(ec2).offers(("c7i.large",), "spot")
    assert set(offers.addresses or ()) == {"us-east-1a", "us-east-1b"}
    assert all(free > 4000 for free in (offers.addresses or {}).values())


def test_on_demand_prices_are_those_of_their_own_region_and_unknown_elsewhere(ec2: Any) -> None:
    types = catalogue(ec2, Quotas(L417A185B=0.0, L1216C47A=5.0)).offers(("p5.48xlarge", "c7i.large"), "on_demand").types
    assert types is not None
    assert (types["p5.48xlarge"].on_demand_usd, types["c7i.large"].on_demand_usd) == (55.04, None)
    assert on_demand_prices("eu-west-1") == {}


def test_what_was_read_is_good_for_minutes_and_then_read_again(ec2: Any) -> None:
    clock, quotas = FakeClock(), Quotas(L34B43A08=640.0)
    looks = catalogue(ec2, quotas, clock)
    first = looks.offers(("c7i.large",), "spot")
    clock.step(GOOD_FOR_S - 1)
    assert looks.offers(("c7i.large",), "spot") is first
    clock.step(1)
    assert looks.offers(("c7i.large",), "spot") is not first
    assert len(quotas.asked) == 2


OPERATIONS = {
    "describe_instance_types": "instance types",
    "describe_instance_type_offerings": "zones",
    "describe_spot_price_history": "spot prices",
    "describe_subnets": "free addresses",
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("code", "status"), [("RequestLimitExceeded", 503), ("Throttling", 400), ("Internal", 500)])
def test_a_busy_aws_is_asked_again_later(ec2: Any, operation: str, code: str, status: int) -> None:
    looks = catalogue(ec2)
    looks.ec2 = Stubborn(ec2, operation, code, status)
    with pytest.raises(Unavailable):
        looks.offers(("c7i.large",), "spot")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_missing_permission_leaves_that_fact_unknown_and_says_so(ec2: Any, operation: str) -> None:
    looks = catalogue(ec2)
    looks.ec2 = Stubborn(ec2, operation, "UnauthorizedOperation", 403)
    offers = looks.offers(("c7i.large",), "spot")
    assert any(OPERATIONS[operation] in text and "UnauthorizedOperation" in text for text in offers.unread)
    assert (offers.types is None) == (operation == "describe_instance_types")
    assert (offers.addresses is None) == (operation == "describe_subnets")


def test_a_quota_that_may_not_be_read_is_unknown(ec2: Any) -> None:
    denied = Stubborn(None, "get_service_quota", "AccessDeniedException", 400)
    offers = catalogue(ec2, denied).offers(("c7i.large",), "spot")
    assert offers.quotas == {}
    assert "L-34B43A08" in offers.unread[0]


# -- requests by reference --------------------------------------------------------------------------------------------


@pytest.fixture
def s3() -> Iterator[Any]:
    with mock_aws():
        client = boto3.client("s3", **KEYS)
        for bucket in ("data", "foreign"):
            client.create_bucket(Bucket=bucket)
        yield client


def files(s3: Any, **changes: Any) -> S3RequestFiles:
    return S3RequestFiles(s3, **{"buckets": {"data"}, "owner": "123456789012", **changes})


def refusal_of(reader: S3RequestFiles, bucket: str, key: str) -> str:
    with pytest.raises(Rejected) as caught:
        reader.read(bucket, key, limit_bytes=LIMIT_BYTES)
    return caught.value.code


def test_an_object_of_exactly_the_limit_is_read_and_a_byte_more_is_refused(s3: Any) -> None:
    s3.put_object(Bucket="data", Key="fits", Body=b"x" * LIMIT_BYTES)
    s3.put_object(Bucket="data", Key="more", Body=b"x" * (LIMIT_BYTES + 1))
    assert len(files(s3).read("data", "fits", limit_bytes=LIMIT_BYTES)) == LIMIT_BYTES
    assert refusal_of(files(s3), "data", "more") == "reference_too_large"


def test_an_object_that_is_not_there_is_named(s3: Any) -> None:
    assert refusal_of(files(s3), "data", "none") == "reference_not_found"
    assert refusal_of(files(s3, buckets=None), "no-such-bucket", "x") == "reference_not_found"


def test_a_bucket_that_the_stack_was_not_given_is_not_even_asked(s3: Any) -> None:
    s3.put_object(Bucket="foreign", Key="r", Body=b"{}")
    assert refusal_of(files(s3), "foreign", "r") == "bucket_not_ours"


def test_o26_the_call_names_the_account_that_must_own_the_bucket(s3: Any) -> None:
    seen: list[dict[str, Any]] = []
    s3.meta.events.register("provide-client-params.s3.GetObject", lambda params, **_: seen.append(params))
    s3.put_object(Bucket="data", Key="r", Body=b"{}")
    files(s3).read("data", "r", limit_bytes=10)
    assert seen[0]["ExpectedBucketOwner"] == "123456789012"


@pytest.mark.parametrize(("code", "status"), [("AccessDenied", 403), ("403", 403)])
def test_o26_a_bucket_of_another_account_is_refused_and_not_retried(s3: Any, code: str, status: int) -> None:
    assert refusal_of(files(Stubborn(s3, "get_object", code, status)), "data", "r") == "reference_not_readable"


def test_a_busy_bucket_is_asked_again_later(s3: Any) -> None:
    with pytest.raises(ClientError):
        files(Stubborn(s3, "get_object", "SlowDown", 503)).read("data", "r", limit_bytes=10)
