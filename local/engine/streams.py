"""A table stream as AWS delivers it: a failing batch is retried, split if so asked, and given up to the destination;
a record reported in batchItemFailures comes again. Each event source has a thread of its own while a batch is out."""

import json
import threading
import time

from ministack.core import responses
from ministack.services import dynamodb, lambda_svc

NEEDS = {
    "ministack.services.lambda_svc": (
        "_poll_dynamodb_streams",
        "_iter_all_esms",
        "_apply_filter_criteria",
        "_execute_function",
        "_esm_wake",
        "_get_func_record_for_qualifier",
        "_send_ddb_stream_failure_record",
        "_dynamodb_stream_positions",
    ),
    "ministack.services.dynamodb": (
        "_tables",
        "stream_start_position",
        "stream_end_position",
        "stream_records_since",
    ),
    "ministack.core.responses": ("request_scope",),
}

_RETRY_BASE_S = 0.2
_RETRY_MAX_S = 5.0
_busy: set[str] = set()
_busy_lock = threading.Lock()


def apply() -> None:
    lambda_svc._poll_dynamodb_streams = _poll


def _poll() -> bool:
    """Every idle event source with new records has a batch under way; whether one was started."""
    started = False
    for account, region, esm in lambda_svc._iter_all_esms():
        with responses.request_scope(account, region):
            batch = _next_batch(esm)
        if batch and _claim(esm["UUID"]):
            threading.Thread(target=_work, args=(account, region, esm), name="table-stream", daemon=True).start()
            started = True
    return started


def _claim(esm_id: str) -> bool:
    with _busy_lock:
        if esm_id in _busy:
            return False
        _busy.add(esm_id)
        return True


def _work(account: str, region: str, esm: dict) -> None:
    try:
        with responses.request_scope(account, region):
            while (batch := _next_batch(esm)) and esm.get("Enabled", True):
                position, records = batch
                wanted = lambda_svc._apply_filter_criteria(records, esm)
                if wanted:
                    _deliver(esm, wanted, tries=0)
                lambda_svc._dynamodb_stream_positions[esm["UUID"]] = position + len(records)
    finally:
        with _busy_lock:
            _busy.discard(esm["UUID"])


def _next_batch(esm: dict) -> tuple[int, list[dict]] | None:
    """(position, records) not delivered yet; the position of a new source is set from its StartingPosition."""
    source = esm.get("EventSourceArn", "")
    if ":dynamodb:" not in source or not esm.get("Enabled", True):
        return None
    table_name = source.split("/")[1]
    if dynamodb._tables.get(table_name, {}).get("LatestStreamArn") != source:
        return None
    horizon, end = dynamodb.stream_start_position(table_name), dynamodb.stream_end_position(table_name)
    positions = lambda_svc._dynamodb_stream_positions
    start = horizon if esm.get("StartingPosition", "LATEST") == "TRIM_HORIZON" else end
    position = max(positions.setdefault(esm["UUID"], start), horizon)
    records = dynamodb.stream_records_since(table_name, position, esm.get("BatchSize", 100))
    return (position, records) if records else None


def _deliver(esm: dict, batch: list[dict], tries: int) -> None:
    """The batch was handled, or each record in it was given up after MaximumRetryAttempts."""
    while batch:
        func, _ = lambda_svc._get_func_record_for_qualifier(esm["FunctionName"], esm.get("Qualifier"))
        if func is None:
            return
        result = lambda_svc._execute_function(func, {"Records": batch})
        failed_at = _first_failure(esm, batch, result)
        if failed_at is None:
            esm["LastProcessingResult"] = f"OK - {len(batch)} records"
            return
        esm["LastProcessingResult"] = "FAILED"
        batch, tries = batch[failed_at:], tries + 1
        split = esm.get("BisectBatchOnFunctionError") and len(batch) > 1
        if split:
            half = len(batch) // 2
            _deliver(esm, batch[:half], tries)
            batch = batch[half:]
        elif reason := _given_up(esm, batch, tries):
            lambda_svc._send_ddb_stream_failure_record(esm, func, batch, esm["EventSourceArn"], result, reason)
            return
        time.sleep(min(_RETRY_BASE_S * 2 ** min(tries, 6), _RETRY_MAX_S))


def _first_failure(esm: dict, batch: list[dict], result: dict) -> int | None:
    """Index of the first record that failed, None when none did."""
    if result.get("error"):
        return 0
    if "ReportBatchItemFailures" not in (esm.get("FunctionResponseTypes") or []):
        return None
    body = result.get("body")
    body = json.loads(body) if isinstance(body, str) and body else body
    reported = {one.get("itemIdentifier") for one in (body or {}).get("batchItemFailures", [])}
    numbers = [record["dynamodb"]["SequenceNumber"] for record in batch]
    if not reported:
        return None
    # An identifier AWS doesn't know fails the whole batch.
    return min((numbers.index(one) if one in numbers else 0 for one in reported), default=None)


def _given_up(esm: dict, batch: list[dict], tries: int) -> str:
    limit = esm.get("MaximumRetryAttempts")
    if limit not in (None, -1) and tries > int(limit):
        return "RetryAttemptsExhausted"
    max_age_s = int(esm.get("MaximumRecordAgeInSeconds") or -1)
    oldest = min(float(record["dynamodb"].get("ApproximateCreationDateTime", time.time())) for record in batch)
    return "MaxRecordAgeExceeded" if 0 < max_age_s < time.time() - oldest else ""
