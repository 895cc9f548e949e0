"""Variables of a request: names that steer neither loader, ranks nor credentials, and secrets by reference only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from holdfast.messages.refusal import Coded

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
ENVIRONMENT_LIMIT_BYTES = 32_768
VARIABLES_AT_MOST = 128

SECRETS_MANAGER = re.compile(
    r"secretsmanager:arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[A-Za-z0-9/_+=.@-]{1,520}"
)
PARAMETER_STORE = re.compile(r"ssm:/[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
REFERENCE_CHARACTERS = 1_024

RESERVED_PREFIXES = (
    "LD_",
    "DYLD_",
    "PYTHON",
    "AWS_",
    "HOLDFAST_",
    "BASH_",
    "GCONV_",
    "GIT_",
    "SSH_",
    "MALLOC_",
    "TORCHELASTIC_",
)
RESERVED = frozenset(
    {
        "PATH", "HOME", "SHELL", "USER", "IFS", "ENV", "PS4", "TMPDIR", "GLIBC_TUNABLES", "LOCPATH",
        "NLSPATH", "BOTO_CONFIG", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
        "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
        "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "HTTP_PROXY", "HTTPS_PROXY",
        "ALL_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE",
        "OPENSSL_CONF", "OPENSSL_MODULES",
    }
)  # fmt: skip


def plain_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables unchanged. Raises Coded; no reason ever quotes a value."""
    _names(variables, "environment")
    for name, value in variables.items():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Coded("bad_environment_value", f"environment.{name} holds no valid text; send UTF-8") from None
        if "\0" in value:
            raise Coded("bad_environment_value", f"environment.{name} holds a NUL, which no variable can; take it out")
    size = sum(len(name) + len(value.encode()) + 2 for name, value in variables.items())
    if size > ENVIRONMENT_LIMIT_BYTES:
        raise Coded(
            "environment_too_large",
            f"environment has {size} bytes, the limit is {ENVIRONMENT_LIMIT_BYTES}; "
            "put large values into a bucket, and their address into the variable",
        )
    return variables


def secret_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return the references unchanged. Raises Coded; what is no reference may be a secret, so it is never quoted."""
    _names(variables, "secrets")
    for name, reference in variables.items():
        known = SECRETS_MANAGER.fullmatch(reference) or PARAMETER_STORE.fullmatch(reference)
        if not known or len(reference) > REFERENCE_CHARACTERS:
            raise Coded(
                "bad_secret_reference",
                f"secrets.{name} is no reference; write secretsmanager:arn:... (the whole ARN) or ssm:/name",
            )
    return variables


def one_of_each(plain: Mapping[str, str], secret: Mapping[str, str]) -> None:
    """No variable is given twice. Raises Coded."""
    twice = sorted(set(plain) & set(secret))
    if twice:
        raise Coded("variable_named_twice", f"environment and secrets both name {', '.join(twice)}; keep one")


def _names(variables: Mapping[str, str], field: str) -> None:
    if len(variables) > VARIABLES_AT_MOST:
        raise Coded(
            "environment_too_large", f"{field} has {len(variables)} variables, the limit is {VARIABLES_AT_MOST}"
        )
    for name in variables:
        if not NAME.fullmatch(name):
            raise Coded("bad_environment_name", f"{field} names {name!r}; a name is [A-Za-z_][A-Za-z0-9_]*")
        upper = name.upper()
        if upper in RESERVED or upper.startswith(RESERVED_PREFIXES):
            raise Coded(
                "reserved_variable",
                f"{field} names {name}, which steers the loader, the ranks or credentials; choose another name",
            )
