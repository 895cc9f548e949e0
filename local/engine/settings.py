"""What the harness tells the engine: one JSON document in one environment variable."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

VARIABLE = "HOLDFAST_ENGINE_SETTINGS"
ACCOUNT = "000000000000"
REGION = "us-east-1"


@dataclass(frozen=True, kw_only=True)
class Settings:
    cloud_id: str
    root: str
    port: int
    listener: int
    repository: str
    node_command: list[str]
    node_environment: dict[str, str] = field(default_factory=dict)
    image_root: str = ""
    boot_delay_s: float = 0.3
    stop_grace_s: float = 2.0
    schedule_factor: float = 1.0
    alarm_period_factor: float = 1.0
    warm_environments: int = 14
    lambda_pythonpath: str = ""

    @property
    def root_path(self) -> Path:
        return Path(self.root)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def from_environment() -> Settings:
    """The settings; the variable is gone afterwards, so functions and nodes don't inherit it."""
    return Settings(**json.loads(os.environ.pop(VARIABLE)))
