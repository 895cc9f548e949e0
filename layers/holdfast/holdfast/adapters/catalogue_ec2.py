"""Keeps ports.Catalogue on EC2 and Service Quotas; what was read is good for minutes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

from holdfast.adapters.aws_errors import code_of, transient
from holdfast.domain.catalogue import InstanceType, Offers, quota_code
from holdfast.domain.errors import Unavailable

GOOD_FOR_S = 300.0
KEPT_AT_MOST = 64
PRODUCTS = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
MIB = 1024**2
GB = 10**9


class Ec2Catalogue:
    """A call that AWS refuses leaves its fact unknown, in words; one that may work later raises Unavailable."""

    def __init__(self, ec2: Any, quotas: Any, *, subnet_ids: Sequence[str], clock: Callable[[], float]) -> None:
        self.ec2, self.quotas, self.subnet_ids, self.clock = ec2, quotas, tuple(subnet_ids), clock
        self._kept: dict[tuple[tuple[str, ...], str], tuple[float, Offers]] = {}

    def offers(self, instance_types: Sequence[str], market: str) -> Offers:
        key, now = (tuple(sorted(instance_types)), market), self.clock()
        kept = self._kept.get(key)
        if kept is not None and now - kept[0] < GOOD_FOR_S:
            return kept[1]
        if len(self._kept) >= KEPT_AT_MOST:
            self._kept.clear()
        read = Look(self.ec2, self.quotas, self.subnet_ids, now).offers(instance_types, market)
        self._kept[key] = (now, read)
        return read


class Look:
    """One look at AWS; `unread` grows with every fact that could not be read."""

    def __init__(self, ec2: Any, quotas: Any, subnet_ids: tuple[str, ...], now: float) -> None:
        self.ec2, self.quotas, self.subnet_ids, self.now = ec2, quotas, subnet_ids, now
        self.unread: list[str] = []

    def offers(self, instance_types: Sequence[str], market: str) -> Offers:
        names = list(instance_types)
        described = self._asked("instance types", lambda: list(self._types(names)))
        zones = self._asked("the zones that offer them", lambda: self._zones(names))
        prices = self._asked("spot prices", lambda: self._spot_prices(names)) if market in ("spot", "mixed") else {}
        types = None
        if described is not None:
            listed = on_demand_prices(self.ec2.meta.region_name)
            types = {
                raw["InstanceType"]: instance_type(raw, zones, (prices or {}).get(raw["InstanceType"], {}), listed)
                for raw in described
            }
        codes = sorted({code for name in types or () if (code := quota_code(name, market)) is not None})
        addresses = self._asked("free addresses", self._addresses) if self.subnet_ids else None
        return Offers(types=types, quotas=self._quotas(codes), addresses=addresses, unread=tuple(self.unread))

    def _types(self, names: list[str]) -> Iterable[Mapping[str, Any]]:
        # By filter, not by name: one unknown name would fail the whole call.
        pages = self.ec2.get_paginator("describe_instance_types").paginate(
            Filters=[{"Name": "instance-type", "Values": names}]
        )
        return (raw for page in pages for raw in page["InstanceTypes"])

    def _zones(self, names: list[str]) -> Mapping[str, tuple[str, ...]]:
        pages = self.ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": names}]
        )
        pairs = [(raw["InstanceType"], raw["Location"]) for page in pages for raw in page["InstanceTypeOfferings"]]
        return {name: tuple(sorted(zone for kind, zone in pairs if kind == name)) for name in names}

    def _spot_prices(self, names: list[str]) -> Mapping[str, Mapping[str, float]]:
        # The answer for a start of now holds each zone's last change before it, which is the price that stands.
        pages = self.ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=names, ProductDescriptions=list(PRODUCTS), StartTime=datetime.fromtimestamp(self.now, UTC)
        )
        prices: dict[str, dict[str, tuple[Any, float]]] = {name: {} for name in names}
        for raw in (raw for page in pages for raw in page["SpotPriceHistory"]):
            here = prices.setdefault(raw["InstanceType"], {})
            told = (raw["Timestamp"], float(raw["SpotPrice"]))
            here[raw["AvailabilityZone"]] = max(here.get(raw["AvailabilityZone"], told), told)
        return {name: {zone: usd for zone, (_, usd) in zones.items()} for name, zones in prices.items()}

    def _addresses(self) -> Mapping[str, int] | None:
        free: dict[str, int] = {}
        for subnet in self.ec2.describe_subnets(SubnetIds=list(self.subnet_ids))["Subnets"]:
            if "AvailableIpAddressCount" in subnet:
                zone = subnet["AvailabilityZone"]
                free[zone] = free.get(zone, 0) + int(subnet["AvailableIpAddressCount"])
        return free or None

    def _quotas(self, codes: Iterable[str]) -> Mapping[str, float]:
        found = {code: self._asked(f"the vCPU quota {code}", lambda code=code: self._quota(code)) for code in codes}
        return {code: value for code, value in found.items() if value is not None}

    def _quota(self, code: str) -> float:
        return float(self.quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])

    def _asked(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ConnectionError, HTTPClientError) as error:
            raise Unavailable(f"{what} cannot be read now: {error}") from error
        except ClientError as error:
            if transient(error):
                raise Unavailable(f"{what} cannot be read now: {code_of(error)}") from error
            self.unread.append(f"{what} could not be read ({error.operation_name}: {code_of(error)}), so not checked")
            return None


def instance_type(
    raw: Mapping[str, Any],
    zones: Mapping[str, tuple[str, ...]] | None,
    spot_usd: Mapping[str, float],
    on_demand_usd: Mapping[str, float],
) -> InstanceType:
    """Return the type as DescribeInstanceTypes and the other calls give it."""
    name = raw["InstanceType"]
    gpu = (raw.get("GpuInfo", {}).get("Gpus") or [{}])[0]
    network = raw.get("NetworkInfo", {})
    card = (network.get("NetworkCards") or [{}])[0]
    architectures = raw.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"])
    return InstanceType(
        name=name,
        vcpus=raw["VCpuInfo"]["DefaultVCpus"],
        memory_bytes=raw["MemoryInfo"]["SizeInMiB"] * MIB,
        arch="x86_64" if "x86_64" in architectures else architectures[0],
        accelerator=_accelerator(raw, gpu),
        gpus=gpu.get("Count", 0),
        gpu_name=gpu.get("Name", ""),
        gpu_memory_bytes=gpu.get("MemoryInfo", {}).get("SizeInMiB", 0) * MIB,
        instance_store_bytes=raw.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0) * GB,
        efa_max=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
        network_gbps=float(card.get("BaselineBandwidthInGbps", 0.0)),
        network_peak_gbps=float(card.get("PeakBandwidthInGbps", 0.0)),
        markets=tuple(
            market for market in ("spot", "on_demand") if market.replace("_", "-") in raw["SupportedUsageClasses"]
        ),
        zones=None if zones is None else zones.get(name, ()),
        spot_usd=spot_usd,
        on_demand_usd=on_demand_usd.get(name),
    )


def _accelerator(raw: Mapping[str, Any], gpu: Mapping[str, Any]) -> str:
    if gpu:
        return str(gpu.get("Manufacturer", "unknown")).lower()
    others = {"NeuronInfo": "aws neuron", "InferenceAcceleratorInfo": "inference", "FpgaInfo": "fpga"}
    others["MediaAcceleratorInfo"] = "media"
    return next((name for key, name in others.items() if raw.get(key)), "")


@cache
def _price_file() -> Mapping[str, Any]:
    return dict(json.loads(Path(__file__).with_name("on_demand_prices.json").read_text()))


def on_demand_prices(region: str) -> Mapping[str, float]:
    """Return US dollars an hour by type: of the region that the price file was made for, and of no other."""
    prices = _price_file()
    return dict(prices["usd_per_hour"]) if prices["region"] == region else {}
