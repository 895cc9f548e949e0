"""Tables and bucket outlive the stack and a slip of the hand."""

import deployed
import pytest

from holdfast.adapters.job_table import WAITING_CARRIES

TABLES = deployed.resources("AWS::DynamoDB::Table")
BUCKET = deployed.resources("AWS::S3::Bucket")["CheckpointBucket"]


@pytest.mark.parametrize("name", ["JobsTable", "OrdersTable", "CheckpointBucket"])
def test_state_is_retained(name):
    resource = deployed.expanded()["Resources"][name]
    assert resource["DeletionPolicy"] == resource["UpdateReplacePolicy"] == "Retain"


@pytest.mark.parametrize("name", TABLES)
def test_a_table_can_be_restored_cannot_be_deleted_and_is_encrypted(name):
    assert TABLES[name]["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
    assert TABLES[name]["DeletionProtectionEnabled"] is True
    assert TABLES[name]["SSESpecification"] == {"SSEEnabled": True}
    assert TABLES[name]["TimeToLiveSpecification"] == {"AttributeName": "expires_at", "Enabled": True}
    assert TABLES[name]["BillingMode"] == "PAY_PER_REQUEST"


def test_the_jobs_table_has_three_indexes_and_only_the_waiting_one_carries_more_than_keys():
    indexes = {
        index["IndexName"]: tuple(key["AttributeName"] for key in index["KeySchema"])
        for index in TABLES["JobsTable"]["GlobalSecondaryIndexes"]
    }
    assert indexes == {
        "waiting": ("waiting_team", "waiting_rank"),
        "alive": ("alive_shard", "pk"),
        "ended": ("ended_team", "ended_at"),
    }
    projections = {index["IndexName"]: index["Projection"] for index in TABLES["JobsTable"]["GlobalSecondaryIndexes"]}
    assert projections == {
        "waiting": {"ProjectionType": "INCLUDE", "NonKeyAttributes": list(WAITING_CARRIES)},
        "alive": {"ProjectionType": "KEYS_ONLY"},
        "ended": {"ProjectionType": "KEYS_ONLY"},
    }


def test_the_stream_shows_a_row_before_and_after():
    assert TABLES["JobsTable"]["StreamSpecification"] == {"StreamViewType": "NEW_AND_OLD_IMAGES"}


def test_checkpoints_are_private_encrypted_and_versioned():
    assert all(BUCKET["PublicAccessBlockConfiguration"].values())
    assert BUCKET["VersioningConfiguration"] == {"Status": "Enabled"}
    assert BUCKET["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    [statement] = deployed.resources("AWS::S3::BucketPolicy")["CheckpointBucketPolicy"]["PolicyDocument"]["Statement"]
    assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})


def test_what_no_job_can_use_any_more_is_gone_in_a_day():
    rules = BUCKET["LifecycleConfiguration"]["Rules"]
    assert {"NoncurrentDays": 1} in [rule.get("NoncurrentVersionExpiration") for rule in rules]
    assert {"DaysAfterInitiation": 1} in [rule.get("AbortIncompleteMultipartUpload") for rule in rules]
    assert all(rule["Status"] == "Enabled" and "ExpirationInDays" not in rule for rule in rules)
