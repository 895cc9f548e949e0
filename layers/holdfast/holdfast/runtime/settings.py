"""What the deployment says of itself; read from the environment on first use, never at import."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
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


@cache
def settings() -> Settings:
    """Return the settings. Raises RuntimeError naming each variable that the template should have set."""
    names = {field.name: f"HOLDFAST_{field.name.upper()}" for field in fields(Settings)}
    missing = [variable for variable in names.values() if not os.environ.get(variable)]
    if missing:
        raise RuntimeError(f"not set: {', '.join(missing)}; template.yaml sets them for every function")
    values = {name: os.environ[variable] for name, variable in names.items()}
    return Settings(**{**values, "subnet_ids": tuple(values["subnet_ids"].split(","))})  # type: ignore[arg-type]
