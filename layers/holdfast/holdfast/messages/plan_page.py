# ruff: noqa: E501 -- rows of a table cannot be broken.
"""Writes docs/plan.md: `python -m holdfast.messages.plan_page > docs/plan.md`."""

from __future__ import annotations

from holdfast.domain import estimate as e
from holdfast.domain.refusals import REFUSALS, WARNINGS
from holdfast.messages.job_template import SCHEMA as TEMPLATE_SCHEMA
from holdfast.messages.request_reference import LIMIT_BYTES
from holdfast.messages.request_reference import SCHEMA as REFERENCE_SCHEMA
from holdfast.messages.variables import ENVIRONMENT_LIMIT_BYTES, RESERVED, RESERVED_PREFIXES, VARIABLES_AT_MOST

HEAD = """# What is checked before a job is queued

<!-- Made by `python -m holdfast.messages.plan_page > docs/plan.md` from the tables in the code. -->

`holdfast plan FILE` shows what a request would run on, `holdfast submit FILE` shows the same warnings, and the door
checks again when the message arrives. A refusal goes to the result queue with its code; nothing is tried again. A fact
that AWS does not let us read is not checked, and a warning (`fact_unknown`) says so. AWS being busy refuses nothing: the
message comes back."""

ESTIMATES = f"""## Estimates

A request is refused only by a fact, or by an estimate that is a bound; what is only likely is a warning.

| what | how | used for |
|---|---|---|
| parameters | from the sizes: untied embeddings, two norms a layer, no biases | everything below |
| state | {e.STATE_BYTES} bytes a parameter: fp32 weight, gradient, AdamW's two moments (ZeRO, 2020, section 3.1). FSDP \
divides it by the ranks, HSDP by those of one node, and both hold one gathered unit; DDP holds all of it, and the bf16 copy | refusals |
| activations | per token and layer (6 dim + 2 kv_dim + 4 ffn_dim) elements, plus 8 bytes a vocabulary entry; \
attention matrix never stored. With `activation_checkpointing` full only the layer's input (dim), with selective \
(5 dim + 2 kv_dim + 2 ffn_dim) elements | refusals |
| a save | {e.SAVED_BYTES} bytes a parameter, dealt out evenly over the nodes; {e.SAVES_ON_DISK} of them on each disk | \
refusals |
| data | two blocks of four shards of the dataset, and of the evaluation set, on each disk; one block where \
no more is read. Of a mounted file system nothing | refusals |
| host memory | what a node may have to write of a save, staged: with FSDP its part (a 70B model on 4 nodes: 207 GB), \
with DDP and HSDP all of it; and 2 GiB for the system | `auto`; a warning that saves stop the training |
| seconds of a save | at the network card's peak (bound), or at {e.NETWORK_USE:.0%} of its baseline (usual) | refusal; \
warning |
| shortest run | dense bf16 peak of the GPU x {e.BEST_USE:.0%} (more has never been published); a vCPU at \
{e.CPU_FLOPS_PER_VCPU / 1e9:.0f} GFLOP/s | refusals of budget, deadline, run limit |
| usual run | {e.TYPICAL_USE:.0%} of a GPU's peak, {e.TYPICAL_CPU_USE:.0%} of a vCPU's | warnings, `usual_usd` |
| spot notice | {e.NOTICE_USABLE_S:.0f} of its 120 s can be used for a save | a warning with the minutes at risk, never a \
refusal |

`training.parallel: auto` becomes DDP where a whole replica takes at most 80 % of a GPU on every type asked for; else HSDP
(a replica a node, sharded inside) where one takes at most 80 % of a node's GPUs; FSDP otherwise. A mode with whole
replicas is taken only where a copy of one fits the host's memory and three saves of it the disk. Any other value of
`training.parallel` is kept. Types are tried in the order of the request; within a type EC2 takes the zone
whose spot pool is deepest (`capacity-optimized`), on demand the cheapest. On-demand prices come from a dated file
(`adapters/on_demand_prices.json`, us-east-1); elsewhere, and for types that it lacks, they are unknown."""

TEMPLATES = f"""## Templates and requests by reference

A template is `{{"schema": "{TEMPLATE_SCHEMA}", "name": ..., "version": 1, "request": {{...}}}}`, put with
`holdfast template put FILE`. A version never changes. A request names it (`"template": {{"name": ..., "version": 1}}`; without
a version the newest is taken) and its own fields win: objects are joined field by field, everything else is replaced,
and `null` takes a field away. What is stored is the whole request with the version in it. Without a `dedup_id` the
message as it was sent is the identity, so a newer version does not turn a second delivery into a second job.

`{{"schema": "{REFERENCE_SCHEMA}", "uri": "s3://bucket/key", "sha256": "..."}}` names an object of at most
{LIMIT_BYTES:,} bytes that holds the request: under `requests/` in the checkpoint bucket, or anywhere in a data bucket of
this account. With `sha256` only that very object will do. Without a `dedup_id` inside, the object's content is the
identity."""

VARIABLES = f"""## Variables

`environment` (at most {ENVIRONMENT_LIMIT_BYTES:,} bytes and {VARIABLES_AT_MOST} variables) reaches every rank as it stands; no
shell reads it. `secrets` maps a variable to `secretsmanager:<ARN>` or `ssm:/<name>`; the node resolves it when the ranks
start, with the node role's permission (parameter `SecretArns` of the stack). A reference that cannot be resolved ends
the job as `user_error`, naming the reference. Refused names begin with {", ".join(RESERVED_PREFIXES)}, or are one of
{", ".join(sorted(RESERVED))}."""


def page() -> str:
    """Return the whole page."""
    refusals = "\n".join(f"| `{code}` | {told.fault} | {told.fix} |" for code, told in REFUSALS.items())
    warnings = "\n".join(f"| `{code}` | {told} |" for code, told in WARNINGS.items())
    return "\n\n".join(
        [
            HEAD,
            f"## Refusals\n\n| code | what is wrong | the fix |\n|---|---|---|\n{refusals}",
            "Fields of the wrong kind or out of range have the codes `bad_value`, `missing_field`, `unknown_field`, "
            "`unknown_schema`,\n`doubled_key`, `not_json` and `too_large`; their sentence names field, value and range.",
            f"## Warnings\n\n| code | what is likely |\n|---|---|\n{warnings}",
            ESTIMATES,
            TEMPLATES,
            VARIABLES,
        ]
    )


if __name__ == "__main__":
    print(page())
