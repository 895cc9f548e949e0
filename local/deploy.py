"""`sam deploy` without SAM: sources are zipped and uploaded, the template is rewritten to them, the stack is made."""

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml

BUCKET = "holdfast-deploy"
CAPABILITIES = ["CAPABILITY_IAM", "CAPABILITY_NAMED_IAM", "CAPABILITY_AUTO_EXPAND"]
# The engine's own interpreter has what this layer would bring, so its layer is empty here.
INSTALLED_LAYERS = {"dependencies"}
_EPOCH = (1980, 1, 1, 0, 0, 0)


class DeployFailed(RuntimeError):
    """The stack was not made; the message names the resources and why."""


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short tags."""


def _short_tag(loader: yaml.Loader, suffix: str, node: yaml.Node) -> dict:
    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    if suffix == "GetAtt" and isinstance(value, str):
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _short_tag)
# An unquoted 2012-10-17 is a policy version, not a date.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load(path: Path) -> dict:
    """The template with long-form functions only."""
    return yaml.load(path.read_text(), _Loader)


def deploy(template_path: Path, *, stack_name: str, parameters: dict[str, str], client) -> dict[str, str]:
    """The stack is made or updated; its outputs. `client(service)` gives boto3 clients. Raises DeployFailed."""
    template = load(template_path)
    s3 = client("s3")
    _upload_sources(template, template_path.parent, s3)
    cloudformation = client("cloudformation")
    # TemplateBody takes 51,200 bytes, so a template of this size goes by way of a bucket, as SAM sends it.
    body = _upload(s3, {}, json.dumps(template).encode())
    request = {
        "StackName": stack_name,
        "TemplateURL": f"{s3.meta.endpoint_url}/{body['Bucket']}/{body['Key']}",
        "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        "Capabilities": CAPABILITIES,
    }
    known = {one["StackName"] for one in cloudformation.describe_stacks()["Stacks"]}
    if stack_name in known:
        cloudformation.update_stack(**request)
    else:
        cloudformation.create_stack(**request)
    return _outputs(stack_name, cloudformation)


def _outputs(stack_name: str, cloudformation) -> dict[str, str]:
    while True:
        [stack] = cloudformation.describe_stacks(StackName=stack_name)["Stacks"]
        status = stack["StackStatus"]
        if not status.endswith("IN_PROGRESS"):
            break
        time.sleep(0.05)
    if status not in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
        reasons = "\n".join(_failures(stack_name, cloudformation))
        raise DeployFailed(f"stack {stack_name} is {status}: {stack.get('StackStatusReason', '')}\n{reasons}")
    return {one["OutputKey"]: one["OutputValue"] for one in stack.get("Outputs", [])}


def _failures(stack_name: str, cloudformation) -> Iterator[str]:
    events = cloudformation.describe_stack_events(StackName=stack_name)["StackEvents"]
    for event in reversed(events):
        if "FAILED" in event["ResourceStatus"]:
            reason = event.get("ResourceStatusReason", "")
            yield f"  {event['LogicalResourceId']} ({event['ResourceType']}): {reason}"


def _upload_sources(template: dict, folder: Path, s3) -> None:
    """Every local CodeUri, ContentUri and DefinitionUri is in the bucket, and the template names it there."""
    s3.create_bucket(Bucket=BUCKET)
    uploaded: dict[str, dict] = {}
    sources = [template.get("Globals", {}).get("Function", {})]
    for resource in template["Resources"].values():
        properties = resource.setdefault("Properties", {})
        if isinstance(properties.get("ContentUri"), str):
            body = _layer_zip(folder / properties["ContentUri"], built="BuildMethod" in resource.get("Metadata", {}))
            properties["ContentUri"] = _upload(s3, uploaded, body)
        if isinstance(properties.get("DefinitionUri"), str):
            body = (folder / properties["DefinitionUri"]).read_bytes()
            properties["DefinitionUri"] = _upload(s3, uploaded, body)
        sources.append(properties)
    archives: dict[str, bytes] = {}
    for properties in sources:
        if isinstance(uri := properties.get("CodeUri"), str):
            if uri not in archives:
                archives[uri] = _zip(_files(folder / uri))
            properties["CodeUri"] = _upload(s3, uploaded, archives[uri])


def _upload(s3, uploaded: dict[str, dict], body: bytes) -> dict:
    key = hashlib.sha256(body).hexdigest()
    if key not in uploaded:
        s3.put_object(Bucket=BUCKET, Key=key, Body=body)
        uploaded[key] = {"Bucket": BUCKET, "Key": key}
    return dict(uploaded[key])


def _layer_zip(folder: Path, *, built: bool) -> bytes:
    """What `sam build` makes of a layer with a BuildMethod: its packages under python/."""
    if folder.name in INSTALLED_LAYERS:
        return _zip([("python/EMPTY", b"")])
    prefix = "python/" if built else ""
    return _zip((f"{prefix}{name}", body) for name, body in _files(folder))


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    if not folder.is_dir():
        raise DeployFailed(f"{folder} is named by the template and is not there")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and "__pycache__" not in name.parts and path.suffix != ".pyc":
            yield name.as_posix(), path.read_bytes()


def _zip(files) -> bytes:
    """The same bytes for the same files: the engine keeps extracted code by its digest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in files:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, body)
    return buffer.getvalue()
