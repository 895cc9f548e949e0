"""What a job's `secrets` refer to, fetched when its ranks start and kept in their environment only."""

from __future__ import annotations

from collections.abc import Mapping

from agent.cloud import CLOUD_ERRORS, SecretStores, error_code

SECRETS_MANAGER, PARAMETER_STORE = "secretsmanager:", "ssm:"

# What no second try and no other node can change: the reference or its permission is wrong.
FINAL = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "ResourceNotFoundException",
        "ParameterNotFound",
        "InvalidRequestException",
        "InvalidParameterException",
        "InvalidKeyId",
        "DecryptionFailure",
        "ValidationException",
        "Unknown reference",
        "Not text",
    }
)


class SecretUnavailable(Exception):
    """A reference that could not be resolved; the text names it, never a value. `final` = no second try helps."""

    def __init__(self, name: str, reference: str, code: str) -> None:
        super().__init__(f"secret {name} ({reference}) could not be read: {code}")
        self.final = code in FINAL


def resolve(references: Mapping[str, str], stores: SecretStores) -> dict[str, str]:
    """Return the values by variable name. Raises SecretUnavailable about the first that cannot be had."""
    return {name: _value(name, reference, stores) for name, reference in sorted(references.items())}


def _value(name: str, reference: str, stores: SecretStores) -> str:
    try:
        value = _fetch(reference, stores)
    except CLOUD_ERRORS as error:
        # Chained errors are printed with their parameters; this one is told by its code alone.
        raise SecretUnavailable(name, reference, error_code(error)) from None
    if value is None:
        raise SecretUnavailable(name, reference, "Unknown reference")
    if "\0" in value:
        raise SecretUnavailable(name, reference, "Not text")
    return value


def _fetch(reference: str, stores: SecretStores) -> str | None:
    if reference.startswith(SECRETS_MANAGER):
        return stores.secret(reference.removeprefix(SECRETS_MANAGER))
    if reference.startswith(PARAMETER_STORE):
        return stores.parameter(reference.removeprefix(PARAMETER_STORE))
    return None


def without(text: str, values: Mapping[str, str]) -> str:
    """Return the text with every value replaced by its variable's name: log tails leave the node in reports."""
    for name, value in sorted(values.items(), key=lambda item: -len(item[1])):
        if value.strip():
            text = text.replace(value, f"[{name}]")
    return text
