"""What the deployment says of itself; read from the environment on first use, never at import."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, fields
from functools import cache


@dataclass(frozen=True)
class Settings:
    """The `HOLDFAST_*` variables of the template."""

    stack: str
    jobs_table: str
    orders_table: str
    bucket: str
    bus: str
    result_queue_url: str
    state_machine_arn: str
    launch_template_id: str
    subnet_ids: tuple[str, ...]
    data_bucket_arns: tuple[str, ...] = ()

    @property
    def account(self) -> str:
        """The account that everything of this stack lies in."""
        return self.state_machine_arn.split(":")[4]

    @property
    def request_buckets(self) -> frozenset[str]:
        """Buckets that a request may lie in."""
        return frozenset({self.bucket, *(arn.rpartition(":")[2] for arn in self.data_bucket_arns)})


@cache
def settings() -> Settings:
    """Return the settings. Raises RuntimeError naming each variable that the template should have set."""
    names = {field.name: f"HOLDFAST_{field.name.upper()}" for field in fields(Settings)}
    needed = {field.name for field in fields(Settings) if field.default is MISSING}
    missing = [variable for name, variable in names.items() if name in needed and not os.environ.get(variable)]
    if missing:
        raise RuntimeError(f"not set: {', '.join(missing)}; template.yaml sets them for every function")
    values = {name: os.environ.get(variable, "") for name, variable in names.items()}
    lists = {name: tuple(filter(None, values[name].split(","))) for name in ("subnet_ids", "data_bucket_arns")}
    return Settings(**{**values, **lists})  # type: ignore[arg-type]
