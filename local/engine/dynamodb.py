"""What a template says about a table's expiry and recovery holds for the table, too."""

from ministack.services import dynamodb
from ministack.services.cloudformation import provisioners

NEEDS = {
    "ministack.services.dynamodb": ("_ttl_settings", "_pitr_settings"),
    "ministack.services.cloudformation.provisioners": ("_RESOURCE_HANDLERS",),
}


def apply() -> None:
    handlers = provisioners._RESOURCE_HANDLERS["AWS::DynamoDB::Table"]
    stock = handlers["create"]

    def create(logical_id: str, properties: dict, stack_name: str, *rest, **options):
        answer = stock(logical_id, properties, stack_name, *rest, **options)
        _set(answer[0], properties)
        return answer

    handlers["create"] = create


def _set(table_name: str, properties: dict) -> None:
    expiry = properties.get("TimeToLiveSpecification")
    if expiry:
        status = "ENABLED" if _true(expiry.get("Enabled")) else "DISABLED"
        dynamodb._ttl_settings[table_name] = {
            "TimeToLiveStatus": status,
            "AttributeName": expiry.get("AttributeName"),
        }
    if _true((properties.get("PointInTimeRecoverySpecification") or {}).get("PointInTimeRecoveryEnabled")):
        dynamodb._pitr_settings[table_name] = True


def _true(value) -> bool:
    return str(value).lower() == "true"
