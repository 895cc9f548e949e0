from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import botocore.session
import pytest
from botocore.loaders import create_loader
from moto import mock_aws

from holdfast_cli.stack import outputs
from tests.cli.cloud import Cloud

# Reading the models of five services takes a second; a loader remembers what it has read.
MODELS = create_loader()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cloud]:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("USER", "ops")
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "HOLDFAST_STACK"):
        monkeypatch.delenv(name, raising=False)
    outputs.cache_clear()
    with mock_aws():
        session = botocore.session.get_session()
        session.register_component("data_loader", MODELS)
        boto3.setup_default_session(botocore_session=session)
        built = Cloud(tmp_path)
        monkeypatch.setenv("HOLDFAST_OUTPUTS", str(built.outputs_file))
        yield built
    outputs.cache_clear()
