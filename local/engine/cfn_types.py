"""Resource types of the template that ministack doesn't know."""

from collections.abc import Callable

from ministack.services import cloudwatch, ec2, eventbridge
from ministack.services.cloudformation import provisioners

NEEDS = {
    "ministack.services.cloudformation.provisioners": ("_RESOURCE_HANDLERS", "_physical_name"),
    "ministack.services.eventbridge": ("_event_bus_policies", "_remove_permission"),
    "ministack.services.ec2": ("_ACTION_MAP",),
    "ministack.services.cloudwatch": ("_put_composite_alarm",),
}

_SERVICE_LINKED_ROLES = {
    "spot.amazonaws.com": "AWSServiceRoleForEC2Spot",
    "ec2fleet.amazonaws.com": "AWSServiceRoleForEC2Fleet",
}


def apply() -> None:
    add = provisioners._RESOURCE_HANDLERS.setdefault
    add("AWS::EC2::SecurityGroupIngress", _kept(_security_group_rule("Ingress", "SourceSecurityGroupId")))
    add("AWS::EC2::SecurityGroupEgress", _kept(_security_group_rule("Egress", "DestinationSecurityGroupId")))
    add("AWS::EC2::PlacementGroup", {"create": _create_placement_group, "delete": _delete_placement_group})
    add("AWS::Events::EventBusPolicy", {"create": _create_bus_policy, "delete": _delete_bus_policy})
    add("AWS::IAM::ServiceLinkedRole", _kept(_create_service_linked_role))
    add("AWS::CloudWatch::CompositeAlarm", _kept(_create_composite_alarm))


def _kept(create: Callable) -> dict:
    return {"create": create, "delete": lambda physical_id, properties: None}


def _security_group_rule(direction: str, other_group: str) -> Callable:
    def create(logical_id: str, properties: dict, stack_name: str):
        flat = {"GroupId": properties["GroupId"], "IpPermissions.1.IpProtocol": str(properties.get("IpProtocol", "-1"))}
        for name in ("FromPort", "ToPort"):
            if name in properties:
                flat[f"IpPermissions.1.{name}"] = str(properties[name])
        if properties.get(other_group):
            flat["IpPermissions.1.Groups.1.GroupId"] = properties[other_group]
        if properties.get("CidrIp"):
            flat["IpPermissions.1.IpRanges.1.CidrIp"] = properties["CidrIp"]
        status, _, body = ec2._ACTION_MAP[f"AuthorizeSecurityGroup{direction}"](flat)
        if status >= 400:
            raise ValueError(body)
        return f"{properties['GroupId']}|{logical_id}", {}

    return create


def _create_placement_group(logical_id: str, properties: dict, stack_name: str):
    name = properties.get("GroupName") or provisioners._physical_name(stack_name, logical_id)
    strategy = properties.get("Strategy", "cluster")
    ec2._ACTION_MAP["CreatePlacementGroup"]({"GroupName": name, "Strategy": strategy})
    return name, {"GroupName": name}


def _delete_placement_group(physical_id: str, properties: dict) -> None:
    ec2._ACTION_MAP["DeletePlacementGroup"]({"GroupName": physical_id})


def _create_bus_policy(logical_id: str, properties: dict, stack_name: str):
    bus, statement_id = properties.get("EventBusName", "default"), properties["StatementId"]
    statement = properties.get("Statement") or {
        name: properties[name] for name in ("Principal", "Action", "Condition") if name in properties
    }
    policy = eventbridge._event_bus_policies.get(bus) or {"Version": "2012-10-17", "Statement": []}
    others = [one for one in policy["Statement"] if one.get("Sid") != statement_id]
    policy["Statement"] = [*others, {"Sid": statement_id, **statement}]
    eventbridge._event_bus_policies[bus] = policy
    return f"{bus}|{statement_id}", {}


def _delete_bus_policy(physical_id: str, properties: dict) -> None:
    bus, statement_id = physical_id.split("|")
    eventbridge._remove_permission({"EventBusName": bus, "StatementId": statement_id})


def _create_service_linked_role(logical_id: str, properties: dict, stack_name: str):
    service = properties["AWSServiceName"]
    name = _SERVICE_LINKED_ROLES.get(service, f"AWSServiceRoleFor{service.split('.')[0].capitalize()}")
    return name, {"RoleName": name}


def _create_composite_alarm(logical_id: str, properties: dict, stack_name: str):
    name = properties.get("AlarmName") or provisioners._physical_name(stack_name, logical_id)
    cloudwatch._put_composite_alarm({}, {**properties, "AlarmName": name}, False, True)
    return name, {"Arn": f"arn:aws:cloudwatch:us-east-1:000000000000:alarm:{name}"}
