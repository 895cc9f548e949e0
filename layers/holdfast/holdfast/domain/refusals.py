"""Every reason for which a request is refused at submit, and every warning; docs/plan.md is made of these tables.

`python -m holdfast.messages.plan_page > docs/plan.md` writes the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """`fault` is what is wrong with a request, `fix` what its sender does about it."""

    fault: str
    fix: str


REFUSALS: Mapping[str, Refusal] = {
    "unsupported_parallelism": Refusal(
        "Tensor, pipeline, context and expert parallelism are asked for",
        "use data parallelism: training.parallel ddp, fsdp, hsdp or auto",
    ),
    "on_premises_refused": Refusal(
        "A gang of, or with, machines outside AWS is asked for",
        "leave it out: every node is an EC2 instance of one type in one zone",
    ),
    "shell_like_name": Refusal(
        "The name has characters that a shell acts on, or begins with a dash",
        "use letters, digits, blanks and . _ - + : / # ( ) =",
    ),
    "blank_edges": Refusal(
        "The name begins or ends with a blank",
        "take the blanks away",
    ),
    "named_twice": Refusal(
        "A list names one thing twice",
        "name each once",
    ),
    "min_nodes_above_nodes": Refusal(
        "fleet.min_nodes is more than fleet.nodes",
        "lower min_nodes or raise nodes",
    ),
    "two_intervals": Refusal(
        "checkpoint has both interval_steps and interval_s",
        "keep one of them",
    ),
    "bad_environment_name": Refusal(
        "A variable's name is none",
        "use [A-Za-z_][A-Za-z0-9_]*, at most 128 characters",
    ),
    "reserved_variable": Refusal(
        "A variable steers the loader, the interpreter, the ranks, credentials or Holdfast itself",
        "choose another name; what the trainer needs of these is set by the agent",
    ),
    "environment_too_large": Refusal(
        "environment or secrets are larger than allowed",
        "put large values into a bucket, and their address into the variable",
    ),
    "bad_environment_value": Refusal(
        "A variable's value holds a NUL or half of a surrogate pair",
        "use plain text",
    ),
    "bad_secret_reference": Refusal(
        "A secret is not a reference",
        "give secretsmanager:ARN or ssm:/name; values never stand in a request",
    ),
    "variable_named_twice": Refusal(
        "environment and secrets name the same variable",
        "keep one of them",
    ),
    "bad_location": Refusal(
        "An address is no s3://bucket/key",
        "give s3://bucket/key",
    ),
    "path_outside_team": Refusal(
        "An address leaves the team's own part of the bucket",
        "name a save under s3://<checkpoint bucket>/teams/<team>/, without '..' and the like",
    ),
    "bucket_not_ours": Refusal(
        "An address names a bucket that the stack does not use",
        "copy the object into the stack's checkpoint bucket or a data bucket",
    ),
    "unknown_template": Refusal(
        "There is no template of that name",
        "put it with `holdfast template put FILE`, or correct the name",
    ),
    "unknown_template_version": Refusal(
        "The template has no such version",
        "name one that exists, or leave the version out for the newest",
    ),
    "bad_template": Refusal(
        "A template does not keep its format",
        "see docs/plan.md, Templates",
    ),
    "template_version_taken": Refusal(
        "That version of the template exists with another content",
        "put the change under the next version",
    ),
    "reference_not_found": Refusal(
        "The object of a request by reference is not there",
        "upload it before sending the reference",
    ),
    "reference_not_readable": Refusal(
        "The object may not be read",
        "it must lie in a bucket of this account that the stack may read",
    ),
    "reference_too_large": Refusal(
        "The object is larger than a request may be",
        "make it smaller",
    ),
    "reference_digest_differs": Refusal(
        "The object is not the one whose sha256 was sent",
        "send the sha256 of the object as it is",
    ),
    "reference_nested": Refusal(
        "The object is itself a reference",
        "let the reference name the request",
    ),
    "unknown_instance_type": Refusal(
        "EC2 knows no such instance type in this region",
        "correct the name",
    ),
    "accelerator_not_supported": Refusal(
        "The type's accelerator is none of NVIDIA's",
        "choose a type with NVIDIA GPUs, or one without accelerators",
    ),
    "mixed_accelerators": Refusal(
        "instance_types names types with GPUs and types without",
        "keep one kind: one gang, one kind of machine",
    ),
    "arm_without_image": Refusal(
        "The type is arm64, and the bundled image is not",
        "name an arm64 image of your own in image.uri, or choose an x86_64 type",
    ),
    "precision_not_on_gpu": Refusal(
        "The GPU has no bf16",
        "set training.precision to fp32, or choose a GPU of Ampere or newer",
    ),
    "market_not_offered": Refusal(
        "The type is not sold on that market",
        "choose the other market or another type",
    ),
    "no_subnet_in_zone": Refusal(
        "The stack has no subnet in the zones asked for",
        "allow other zones, or add a subnet to the stack",
    ),
    "type_not_offered": Refusal(
        "The type is not offered in any zone that is allowed and has a subnet",
        "allow a zone that has it, or choose another type",
    ),
    "no_efa": Refusal(
        "A gang of several GPU nodes needs EFA, and the type has none",
        "choose a type with EFA, or fleet.nodes 1",
    ),
    "zero_quota": Refusal(
        "The account's quota for the family is 0",
        "ask AWS for a higher quota, or choose another family or market",
    ),
    "gang_over_quota": Refusal(
        "The gang has more vCPUs than the account's quota for the family",
        "lower fleet.nodes, ask AWS for a higher quota, or choose another family or market",
    ),
    "too_few_addresses": Refusal(
        "No allowed zone has as many free addresses as the gang has nodes",
        "free some, add a larger subnet, or lower fleet.nodes",
    ),
    "batch_too_small": Refusal(
        "The global batch has fewer sequences than the gang has ranks",
        "raise training.global_batch, or lower fleet.nodes",
    ),
    "ddp_does_not_fit": Refusal(
        "A whole replica does not fit one GPU",
        "set training.parallel to fsdp or auto",
    ),
    "hsdp_does_not_fit": Refusal(
        "A whole replica does not fit the GPUs of one node",
        "set training.parallel to fsdp or auto",
    ),
    "model_does_not_fit": Refusal(
        "The model does not fit the gang even when sharded",
        "use more nodes, a type with more memory, or a smaller model",
    ),
    "min_nodes_do_not_fit": Refusal(
        "The model fits fleet.nodes, but not fleet.min_nodes",
        "raise fleet.min_nodes",
    ),
    "sequence_does_not_fit": Refusal(
        "One sequence's activations do not fit beside the state",
        "shorten training.sequence_length, use more nodes, or a type with more memory",
    ),
    "micro_batch_does_not_fit": Refusal(
        "The activations of one micro-batch do not fit beside the state",
        "set training.micro_batch lower",
    ),
    "checkpoint_over_disk": Refusal(
        "A node's disk has no room for its part of three saves and the data that it reads now and next",
        "use more nodes, a type with more instance store, or smaller shards",
    ),
    "save_slower_than_interval": Refusal(
        "A periodic save cannot be durable before the next one is due",
        "lengthen the interval, use more nodes, or a type with more network",
    ),
    "no_save_within_run_limit": Refusal(
        "No save is due within limits.run_s, so every attempt would begin anew",
        "shorten the interval, or raise limits.run_s",
    ),
    "no_save_on_spot": Refusal(
        "A long job on spot has no periodic save before its end",
        "shorten the checkpoint interval",
    ),
    "run_limit_too_short": Refusal(
        "All attempts together are shorter than the shortest possible training",
        "raise limits.run_s or limits.attempts, or use more nodes",
    ),
    "deadline_cannot_be_met": Refusal(
        "The shortest possible training ends after limits.finish_by",
        "move finish_by, train fewer steps, or use more nodes",
    ),
    "budget_below_estimate": Refusal(
        "The shortest possible training costs more than limits.budget_usd",
        "raise the budget, train fewer steps, or choose another type or market",
    ),
    "unknown_dataset": Refusal(
        "training.data.dataset names a dataset or a version that nobody registered",
        "`holdfast dataset list` shows those there are; register yours",
    ),
    "dataset_not_found": Refusal(
        "There is no index.json at training.data.uri",
        "upload what `holdfast dataset prepare` made, or correct the address",
    ),
    "dataset_not_readable": Refusal(
        "The index at training.data.uri is not there or may not be read",
        "name its bucket in the stack's DataBucketArns",
    ),
    "dataset_damaged": Refusal(
        "The index is not whole, contradicts itself, or has another digest than the one given",
        "upload the dataset again, or prepare it anew",
    ),
    "dataset_digest_needed": Refusal(
        "A dataset on a mounted file system has no digest, and the supervisor cannot read it",
        "give training.data.digest, as `holdfast dataset prepare` printed it",
    ),
    "data_does_not_fit": Refusal(
        "The dataset has tokens beyond the model's vocabulary, or no shard as long as a sequence",
        "set training.model.vocab or training.sequence_length as the reason says",
    ),
    "weights_not_found": Refusal(
        "There is no SHA256SUMS in training.init_from, so nothing says which weights are meant; or no such save",
        "make it with sha256sum in the weights' folder, and upload it; or name a save that is there",
    ),
    "weights_damaged": Refusal(
        "What lists the weights of training.init_from cannot be used",
        "upload the weights and their list again; or name another save",
    ),
    "weights_do_not_fit": Refusal(
        "The save that training.init_from names is of another model, of adapters, or not of the bundled trainer",
        "correct training.model as the reason says, or export the weights to a folder",
    ),
    "dataset_version_taken": Refusal(
        "A name and version of a dataset are taken by another one",
        "register the change under the next version",
    ),
    "not_in_this_release": Refusal(
        "The format has a field whose work is not built yet",
        "leave it out",
    ),
    "identity_conflict": Refusal(
        "The dedup_id was used before with another body",
        "send the change under a new dedup_id",
    ),
}

WARNINGS: Mapping[str, str] = {
    "save_exceeds_notice": "A forced save does not fit a spot notice: what was trained since the last save is at risk",
    "saves_stop_the_training": "A save cannot be staged in host memory, so the training stands still for it",
    "save_may_exceed_interval": "At usual rates a periodic save takes longer than its interval: saves will be skipped",
    "small_model_many_nodes": "A model below 1 billion parameters pays more for traffic between nodes than it gains",
    "bf16_on_cpu": "bf16 on a CPU is several times slower than fp32, unless it has AMX",
    "uneven_batch": "The global batch does not divide by the ranks: some wait for others in every step",
    "memory_tight": "The estimate leaves less than a tenth of the memory free",
    "several_gpu_models": "Attempts may run on different GPUs: results are not equal to the bit across them",
    "candidate_dropped": "One of the instance types cannot run this; the others can",
    "budget_tight": "At usual rates the training costs more than the budget",
    "budget_not_checked": "No price is known, so the budget was not compared",
    "deadline_tight": "At usual rates the training ends after limits.finish_by",
    "one_attempt": "limits.attempts is 1: the first failure other than an interruption ends the job",
    "long_interval": "A lost node costs up to a whole checkpoint interval",
    "fact_unknown": "A fact could not be read from AWS, so it was not checked",
}
