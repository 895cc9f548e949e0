"""The EC2 calls the product makes, answered from the capacity model; launch templates and networks stay ministack's."""

import base64
import copy
import gzip
import importlib.resources
import json
import re
import time
from collections.abc import Callable

from ministack.core import responses
from ministack.services import ec2

from local.engine import capacity as model
from local.engine import ec2_protocol
from local.engine.imds import iso
from local.engine.journal import Journal
from local.engine.nodes import Nodes
from local.engine.settings import ACCOUNT, REGION

NEEDS = {
    "ministack.services.ec2": (
        "_ACTION_MAP",
        "_error",
        "_launch_templates",
        "_subnets",
        "_parse_lt_data",
        "_create_launch_template_version",
        "_ensure_defaults_initialized",
    ),
    "ministack.core.responses": ("new_uuid",),
}


IMAGE = "ami-0123456789abcdef0"
SPOT_USD_PER_VCPU_H = 0.018


class Refusal(Exception):
    """A client error of EC2: code and message."""


class Ec2:
    def __init__(self, nodes: Nodes, journal: Journal) -> None:
        self._nodes, self._capacity, self._journal = nodes, nodes.capacity, journal
        self._groups: dict[str, dict] = {}

    def apply(self) -> None:
        """The actions of this class are ministack's; every EC2 call is in ec2_calls.jsonl."""
        own: dict[str, Callable[[dict], dict]] = {
            "CreateFleet": self.create_fleet,
            "DescribeFleets": self.describe_fleets,
            "DescribeInstances": self.describe_instances,
            "DescribeInstanceStatus": self.describe_instance_status,
            "TerminateInstances": self.terminate_instances,
            "GetConsoleOutput": self.get_console_output,
            "DescribeInstanceTypes": describe_instance_types,
            "DescribeInstanceTypeOfferings": describe_instance_type_offerings,
            "DescribeSpotPriceHistory": describe_spot_price_history,
            "DescribeLaunchTemplateVersions": describe_launch_template_versions,
            "DescribeCapacityReservations": describe_capacity_reservations,
            "CreatePlacementGroup": self.create_placement_group,
            "DescribePlacementGroups": self.describe_placement_groups,
            "DeletePlacementGroup": self.delete_placement_group,
        }
        for name in ("CreateLaunchTemplate", "CreateLaunchTemplateVersion"):
            ec2._ACTION_MAP[name] = _keeping_everything(name, ec2._ACTION_MAP[name])
        for name, stock in list(ec2._ACTION_MAP.items()):
            ec2._ACTION_MAP[name] = self._logged(name, stock)
        for name, answer in own.items():
            ec2._ACTION_MAP[name] = self._answered(name, answer)

    def create_fleet(self, request: dict) -> dict:
        if request.get("Type") != "instant":
            raise Refusal("InvalidParameterValue", "only fleets of type instant are modelled here")
        wanted = _fleet_requests(request)
        with self._nodes.lock:
            known = set(self._capacity.instances)
            try:
                answers = [(one.market, self._capacity.create_fleet(one, now=time.time())) for one in wanted]
            except model.IdempotentParameterMismatch:
                raise Refusal(
                    "IdempotentParameterMismatch",
                    "The request uses the same client token as a previous, but non-identical request.",
                ) from None
            bought = [one for _, answer in answers for one in answer.instance_ids]
            fresh = [self._capacity.instances[one] for one in bought if one not in known]
        for instance in fresh:
            self._launch(instance)
        return {
            "FleetId": answers[0][1].fleet_id,
            "Instances": [_filled(part, market) for market, answer in answers for part in answer.filled],
            "Errors": [_refused(part, market) for market, answer in answers for part in answer.refused],
        }

    def create_placement_group(self, request: dict) -> dict:
        name = request["GroupName"]
        if name in self._groups:
            raise Refusal("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
        tags = [tag for one in request.get("TagSpecifications", []) for tag in one.get("Tags", [])]
        self._groups[name] = {
            "GroupName": name, "State": "available", "Strategy": request.get("Strategy", "cluster"), "Tags": tags,
        }  # fmt: skip
        return {"PlacementGroup": self._groups[name]}

    def describe_placement_groups(self, request: dict) -> dict:
        filters = request.get("Filters", [])
        chosen = [
            one
            for one in self._groups.values()
            if _matches(filters, lambda name, one=one: _tag_fact(name, _tag_map(one["Tags"])))
        ]
        return {"PlacementGroups": chosen}

    def delete_placement_group(self, request: dict) -> dict:
        name = request["GroupName"]
        if name not in self._groups:
            raise Refusal("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
        with self._nodes.lock:
            inside = [one for one in self._capacity.instances.values() if one.candidate.group == name]
        if any(one.state != "terminated" for one in inside):
            raise Refusal(
                "InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted."
            )
        del self._groups[name]
        return {}

    def describe_fleets(self, request: dict) -> dict:
        filters = request.get("Filters", [])
        fleets = []
        for fleet_id, fleet in self._capacity.fleets.items():
            tags = dict(fleet.fleet_tags)
            chosen = not request.get("FleetIds") or fleet_id in request["FleetIds"]
            if chosen and _matches(filters, lambda name, tags=tags: _tag_fact(name, tags)):
                ids = [key for key, one in self._capacity.instances.items() if one.fleet_id == fleet_id]
                bought = [{"InstanceIds": ids, "Lifecycle": fleet.market}] if ids else []
                shown = {"FleetId": fleet_id, "Type": "instant", "FleetState": "active", "Tags": _tags(tags)}
                fleets.append(shown | {"Instances": bought})
        return {"Fleets": fleets}

    def describe_instances(self, request: dict) -> dict:
        filters = request.get("Filters", [])
        chosen = [
            one
            for one in self._visible(request.get("InstanceIds", []))
            if _matches(filters, lambda name, one=one: _fact(name, one))
        ]
        return {"Reservations": [_reservation(one) for one in chosen]}

    def describe_instance_status(self, request: dict) -> dict:
        shown = [
            one
            for one in self._visible(request.get("InstanceIds", []))
            if (one.state == "running" or request.get("IncludeAllInstances"))
            and _matches(request.get("Filters", []), lambda name, one=one: _status_fact(name, one))
        ]
        return {"InstanceStatuses": [_status(one) for one in shown]}

    def terminate_instances(self, request: dict) -> dict:
        chosen = self._visible(request["InstanceIds"])  # one bad id and none is terminated
        changes = []
        for instance in chosen:
            before = instance.state
            self._nodes.terminate(instance.instance_id)
            changes.append(
                {
                    "InstanceId": instance.instance_id,
                    "PreviousState": _state(before),
                    "CurrentState": _state(instance.state),
                }
            )
        return {"TerminatingInstances": changes}

    def get_console_output(self, request: dict) -> dict:
        [instance] = self._visible([request["InstanceId"]])
        tail = base64.b64encode(self._nodes.console(instance.instance_id)).decode()
        return {"InstanceId": instance.instance_id, "Timestamp": iso(time.time()), "Output": tail}

    def _visible(self, instance_ids: list[str]) -> list[model.Instance]:
        with self._nodes.lock:
            try:
                return self._capacity.describe(instance_ids, now=time.time())
            except model.InstanceNotFound as error:
                [missing] = error.args
                words = ("ID", "does") if len(missing) == 1 else ("IDs", "do")
                raise Refusal(
                    "InvalidInstanceID.NotFound",
                    f"The instance {words[0]} '{', '.join(missing)}' {words[1]} not exist",
                ) from None

    def _launch(self, instance: model.Instance) -> None:
        data, number = _launch_template(instance.candidate)
        for specification in data.get("TagSpecifications", []):
            if specification.get("ResourceType") == "instance":
                instance.tags = {tag["Key"]: tag["Value"] for tag in specification["Tags"]} | instance.tags
        instance.tags["aws:ec2launchtemplate:id"] = instance.candidate.launch_template
        instance.tags["aws:ec2launchtemplate:version"] = str(number)
        self._nodes.launch(instance, base64.b64decode(data.get("UserData", "")).decode())

    def _answered(self, name: str, answer: Callable[[dict], dict]):
        def handle(flat: dict) -> tuple:
            request = ec2_protocol.parse(name, flat)
            try:
                response = answer(request)
            except Refusal as refusal:
                code, message = refusal.args
                self._journal.write(operation=name, request=request, response={"Error": {"Code": code}})
                return ec2._error(code, message, 400)
            self._journal.write(operation=name, request=request, response=response)
            body = ec2_protocol.render(name, response, responses.new_uuid())
            return 200, {"Content-Type": "application/xml"}, body

        return handle

    def _logged(self, name: str, stock):
        def handle(flat: dict) -> tuple:
            answer = stock(flat)
            request = {key: value[0] if isinstance(value, list) else value for key, value in flat.items()}
            self._journal.write(operation=name, request=request, response={"status": answer[0]})
            return answer

        return handle


def _keeping_everything(name: str, stock: Callable[[dict], tuple]) -> Callable[[dict], tuple]:
    """ministack's action; what it drops on the way (EFA interfaces, placement, metadata options) is stored too, and a
    source version named by $Latest or $Default is found."""

    def handle(flat: dict) -> tuple:
        answer = stock(flat)
        if answer[0] == 200:
            request = ec2_protocol.parse(name, flat)
            record = _template_record(request.get("LaunchTemplateId", ""), request.get("LaunchTemplateName", ""))
            source = request.get("SourceVersion")
            base = copy.deepcopy(_version_of(record, source)["LaunchTemplateData"]) if source else {}
            record["Versions"][-1]["LaunchTemplateData"] = base | request.get("LaunchTemplateData", {})
        return answer

    return handle


def describe_launch_template_versions(request: dict) -> dict:
    record = _template_record(request.get("LaunchTemplateId", ""), request.get("LaunchTemplateName", ""))
    wanted = request.get("Versions") or [str(one["VersionNumber"]) for one in record["Versions"]]
    shown = [_version_of(record, version) for version in wanted]
    if request.get("ResolveAlias"):
        shown = [one | {"LaunchTemplateData": _resolved(one["LaunchTemplateData"])} for one in shown]
    return {"LaunchTemplateVersions": shown}


def _resolved(data: dict) -> dict:
    """The data with the image that its parameter names; every parameter names the one image there is."""
    return data | {"ImageId": IMAGE} if data.get("ImageId", "").startswith("resolve:ssm:") else data


def describe_capacity_reservations(request: dict) -> dict:
    """There are none here: a job that names one is told so."""
    if wanted := request.get("CapacityReservationIds", []):
        raise Refusal("InvalidCapacityReservationId.NotFound", f"The capacity reservation '{wanted[0]}' was not found")
    return {"CapacityReservations": []}


def describe_instance_types(request: dict) -> dict:
    types = instance_types()
    wanted = request.get("InstanceTypes", [])
    if unknown := [name for name in wanted if name not in types]:
        raise Refusal("InvalidInstanceType", f"The following supplied instance types do not exist: {unknown}")
    chosen = [types[name] for name in wanted or sorted(types)]
    filters = request.get("Filters", [])
    return {"InstanceTypes": [one for one in chosen if _matches(filters, lambda name, one=one: _type_fact(name, one))]}


def describe_instance_type_offerings(request: dict) -> dict:
    """Every known type in every zone of the region: where a type is missing is said by the capacity model."""
    kind = request.get("LocationType", "region")
    zones = sorted({subnet["AvailabilityZone"] for subnet in ec2._subnets.values()})
    places = zones if kind == "availability-zone" else [REGION]
    offers = [
        {"InstanceType": name, "LocationType": kind, "Location": place} for name in instance_types() for place in places
    ]
    facts = {"instance-type": "InstanceType", "location": "Location"}
    filters = request.get("Filters", [])
    return {
        "InstanceTypeOfferings": [
            one for one in offers if _matches(filters, lambda name, one=one: [one.get(facts.get(name, ""), "")])
        ]
    }


def describe_spot_price_history(request: dict) -> dict:
    """Each type at one price a vCPU, the same in every zone and at all times: invented, but of the right size."""
    types = instance_types()
    names = [name for name in request.get("InstanceTypes") or sorted(types) if name in types]
    zones = sorted({subnet["AvailabilityZone"] for subnet in ec2._subnets.values()})
    product = (request.get("ProductDescriptions") or ["Linux/UNIX"])[0]
    prices = {name: f"{types[name]['VCpuInfo']['DefaultVCpus'] * SPOT_USD_PER_VCPU_H:.6f}" for name in names}
    return {
        "SpotPriceHistory": [
            {
                "InstanceType": name,
                "AvailabilityZone": zone,
                "ProductDescription": product,
                "SpotPrice": prices[name],
                "Timestamp": iso(0.0),
            }
            for name in names
            for zone in zones
        ]
    }


_types: dict[str, dict] = {}


def instance_types() -> dict[str, dict]:
    """The instance types as DescribeInstanceTypes gives them, from the data that moto ships."""
    if not _types:
        packed = importlib.resources.files("moto.ec2").joinpath("resources/instance_types.json.gz").read_bytes()
        _types.update(json.loads(gzip.decompress(packed)))
    return _types


def _fleet_requests(request: dict) -> list[model.FleetRequest]:
    """One for each market: what is asked of one market holds for that market alone."""
    target = request["TargetCapacitySpecification"]
    usual = target.get("DefaultTargetCapacityType", "on-demand")
    shares = {"on-demand": target.get("OnDemandTargetCapacity", 0), "spot": target.get("SpotTargetCapacity", 0)}
    shares[usual] = target["TotalTargetCapacity"] - sum(count for market, count in shares.items() if market != usual)
    mixed = sum(count > 0 for count in shares.values()) > 1
    return [_fleet_request(request, market, count, mixed=mixed) for market, count in shares.items() if count]


def _fleet_request(request: dict, market: str, target: int, *, mixed: bool) -> model.FleetRequest:
    options = request.get({"spot": "SpotOptions", "on-demand": "OnDemandOptions"}.get(market, ""), {})
    token = request.get("ClientToken", "")
    return model.FleetRequest(
        candidates=tuple(_candidates(request["LaunchTemplateConfigs"])),
        market=market,
        target=target,
        minimum=options.get("MinTargetCapacity", 0),
        single_type=options.get("SingleInstanceType", False),
        single_zone=options.get("SingleAvailabilityZone", False),
        client_token=f"{token}/{market}" if token and mixed else token,
        instance_tags=_tag_pairs(request, "instance"),
        fleet_tags=_tag_pairs(request, "fleet"),
    )


def _candidates(configs: list[dict]):
    for config in configs:
        specification = config["LaunchTemplateSpecification"]
        record = _template_record(
            specification.get("LaunchTemplateId", ""), specification.get("LaunchTemplateName", "")
        )
        version = specification.get("Version", "$Default")
        data = _version_of(record, version)["LaunchTemplateData"]
        for override in config.get("Overrides") or [{}]:
            subnet_id = override.get("SubnetId", "")
            zone = _zone_of(subnet_id) if subnet_id else override.get("AvailabilityZone", f"{REGION}a")
            yield model.Candidate(
                instance_type=override.get("InstanceType") or data.get("InstanceType", ""),
                zone=zone,
                subnet_id=subnet_id or _subnet_in(zone),
                launch_template=record["LaunchTemplateId"],
                version=version,
                group=override.get("Placement", {}).get("GroupName", ""),
            )


def _zone_of(subnet_id: str) -> str:
    subnet = ec2._subnets.get(subnet_id)
    if subnet is None:
        raise Refusal("InvalidSubnetID.NotFound", f"The subnet ID '{subnet_id}' does not exist")
    return subnet["AvailabilityZone"]


def _subnet_in(zone: str) -> str:
    return next((key for key, subnet in ec2._subnets.items() if subnet["AvailabilityZone"] == zone), "")


def _template_record(template_id: str, name: str) -> dict:
    for record in ec2._launch_templates.values():
        if template_id == record["LaunchTemplateId"] or (name and name == record["LaunchTemplateName"]):
            return record
    raise Refusal("InvalidLaunchTemplateId.NotFound", f"The launch template '{template_id or name}' does not exist")


def _version_of(record: dict, version: str) -> dict:
    numbers = {"$Default": record["DefaultVersionNumber"], "$Latest": record["LatestVersionNumber"]}
    wanted = str(numbers.get(version, version))
    for one in record["Versions"]:
        if str(one["VersionNumber"]) == wanted:
            return one
    raise Refusal(
        "InvalidLaunchTemplateId.VersionNotFound",
        f"Could not find the specified version {version} for the launch template with ID {record['LaunchTemplateId']}.",
    )


def _launch_template(candidate: model.Candidate) -> tuple[dict, int]:
    version = _version_of(_template_record(candidate.launch_template, ""), candidate.version)
    return version["LaunchTemplateData"], version["VersionNumber"]


def _tag_pairs(request: dict, resource: str) -> tuple[tuple[str, str], ...]:
    pairs = {
        tag["Key"]: tag.get("Value", "")
        for specification in request.get("TagSpecifications", [])
        if specification["ResourceType"] == resource
        for tag in specification.get("Tags", [])
    }
    return tuple(sorted(pairs.items()))


def _tags(tags: dict[str, str]) -> list[dict]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _tag_map(tags: list[dict]) -> dict[str, str]:
    return {tag["Key"]: tag.get("Value", "") for tag in tags}


def _override(candidate: model.Candidate) -> dict:
    return {
        "LaunchTemplateSpecification": {
            "LaunchTemplateId": candidate.launch_template,
            "Version": candidate.version,
        },
        "Overrides": {
            "InstanceType": candidate.instance_type,
            "SubnetId": candidate.subnet_id,
            "AvailabilityZone": candidate.zone,
            "Placement": {"GroupName": candidate.group} if candidate.group else None,
        },
    }


def _filled(part: model.Filled, market: str) -> dict:
    return {
        "LaunchTemplateAndOverrides": _override(part.candidate),
        "Lifecycle": market,
        "InstanceIds": list(part.instance_ids),
        "InstanceType": part.candidate.instance_type,
        "AvailabilityZone": part.candidate.zone,
        "SubnetId": part.candidate.subnet_id,
    }


def _refused(part: model.Refused, market: str) -> dict:
    return {
        "LaunchTemplateAndOverrides": _override(part.candidate),
        "Lifecycle": market,
        "ErrorCode": part.code,
        "ErrorMessage": part.message,
    }


def _state(name: str) -> dict:
    return {"Code": model.STATE_CODES[name], "Name": name}


def _status(instance: model.Instance) -> dict:
    fine = {"Status": "ok", "Details": [{"Name": "reachability", "Status": "passed"}]}
    since = instance.impaired_since
    failed = {"Name": "reachability", "Status": "failed", "ImpairedSince": iso(since or 0.0)}
    bad = {"Status": "impaired", "Details": [failed]}
    return {
        "InstanceId": instance.instance_id,
        "AvailabilityZone": instance.candidate.zone,
        "InstanceState": _state(instance.state),
        "InstanceStatus": fine if since is None else bad,
        "SystemStatus": fine,
        "Events": [
            {"Code": code, "NotBefore": iso(at), "Description": description}
            for code, at, description in instance.scheduled
        ],
    }


def _status_fact(name: str, instance: model.Instance) -> list[str]:
    facts = {
        "event.code": [code for code, _, _ in instance.scheduled],
        "instance-status.status": ["ok" if instance.impaired_since is None else "impaired"],
        "system-status.status": ["ok"],
        "instance-state-name": [instance.state],
        "availability-zone": [instance.candidate.zone],
    }
    if name not in facts:
        raise Refusal("InvalidParameterValue", f"The filter '{name}' is invalid")
    return facts[name]


def _reservation(instance: model.Instance) -> dict:
    candidate = instance.candidate
    user = instance.reason == model.USER_SHUTDOWN
    ended = f"User initiated ({iso(instance.ended_at).replace('T', ' ').replace('Z', ' GMT')})" if user else ""
    shown = {
        "InstanceId": instance.instance_id,
        "ImageId": IMAGE,
        "InstanceType": candidate.instance_type,
        "InstanceLifecycle": None if instance.market == "on-demand" else instance.market,
        "LaunchTime": iso(instance.launched_at),
        "Placement": {"AvailabilityZone": candidate.zone, "GroupName": candidate.group, "Tenancy": "default"},
        "State": _state(instance.state),
        "StateReason": {"Code": instance.reason, "Message": instance.reason_text} if instance.reason else None,
        "StateTransitionReason": ended or instance.reason,
        "SubnetId": candidate.subnet_id,
        "Tags": _tags(instance.tags),
    }
    if instance.state != "terminated":
        shown["PrivateIpAddress"] = "127.0.0.1"
    return {"ReservationId": f"r-0{instance.instance_id[3:]}", "OwnerId": ACCOUNT, "Instances": [shown]}


def _fact(name: str, instance: model.Instance) -> list[str]:
    candidate = instance.candidate
    facts = {
        "instance-id": instance.instance_id,
        "instance-state-name": instance.state,
        "instance-type": candidate.instance_type,
        "instance-lifecycle": instance.market,
        "availability-zone": candidate.zone,
        "subnet-id": candidate.subnet_id,
        "placement-group-name": candidate.group,
    }
    return [facts[name]] if name in facts else _tag_fact(name, instance.tags)


def _tag_fact(name: str, tags: dict[str, str]) -> list[str]:
    if name == "tag-key":
        return list(tags)
    if name.startswith("tag:"):
        key = name.removeprefix("tag:")
        return [tags[key]] if key in tags else []
    raise Refusal("InvalidParameterValue", f"The filter '{name}' is invalid")


def _type_fact(name: str, one: dict) -> list[str]:
    facts = {
        "instance-type": [one["InstanceType"]],
        "current-generation": [str(one.get("CurrentGeneration", True)).lower()],
        "supported-usage-class": one.get("SupportedUsageClasses", []),
        "processor-info.supported-architecture": one.get("ProcessorInfo", {}).get("SupportedArchitectures", []),
        "network-info.efa-supported": [str(one.get("NetworkInfo", {}).get("EfaSupported", False)).lower()],
    }
    if name not in facts:
        raise Refusal("InvalidParameterValue", f"The filter '{name}' is invalid")
    return facts[name]


def _matches(filters: list[dict], facts_named: Callable[[str], list[str]]) -> bool:
    return all(
        any(_like(value, fact) for value in one["Values"] for fact in facts_named(one["Name"])) for one in filters
    )


def _like(pattern: str, text: str) -> bool:
    wanted = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wanted, text, re.DOTALL) is not None
