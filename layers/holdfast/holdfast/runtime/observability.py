"""One logger, tracer and metrics sink for every door."""

from __future__ import annotations

from aws_lambda_powertools.logging import Logger
from aws_lambda_powertools.metrics import Metrics
from aws_lambda_powertools.tracing import Tracer

logger = Logger(service="holdfast")
metrics = Metrics(namespace="Holdfast", service="holdfast")
# Patching botocore costs 140 ms of every cold start; the doors' own segments say what we need.
tracer = Tracer(service="holdfast", auto_patch=False)
