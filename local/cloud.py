"""The embedded cloud as a context manager: the engine runs while it is open, and nothing is left when it is closed."""

import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from local import deploy as deployment
from local import self_check
from local.engine.settings import REGION, VARIABLE, Settings
from local.processes import CLOUD_MARKER, Forker, kill_marked, marked

REPOSITORY = Path(__file__).resolve().parent.parent
_START_S = 60.0
_STOP_S = 3.0


class CloudFailed(RuntimeError):
    """The engine did not start, or refused a control call; the message says why, or where the log is."""


@functools.cache
def _forker() -> Forker:
    return Forker()


class Cloud:
    """One engine with its own port, processes and state directory `root`.

    In `root`: engine.log, nodes/<instance>/agent.log, api_calls.jsonl, ec2_calls.jsonl, events.jsonl.
    """

    def __init__(
        self,
        root: Path,
        *,
        node_command: list[str] | None = None,
        node_environment: dict[str, str] | None = None,
        image_root: str = "",
        boot_delay_s: float = 0.3,
        stop_grace_s: float = 2.0,
        schedule_factor: float = 1.0,
        alarm_period_factor: float = 1.0,
        async_retry_s: float = 1.0,
        warm_environments: int = 14,
        lambda_pythonpath: str = "",
        engine_environment: dict[str, str] | None = None,
    ) -> None:
        """With `image_root`, the files of a container image, nodes are containers of it: see `local.containers`.
        Times are in seconds. `schedule_factor` 0.05 makes rate(1 minute) fire each 3 s; `async_retry_s` is the
        first pause after a failed asynchronous call (60 on AWS); `lambda_pythonpath` is put before a function's code;
        `engine_environment` reaches the engine and every function."""
        self.root = Path(root).resolve()
        self.id = uuid.uuid4().hex[:12]
        # Bound here and handed to the engine, so that nobody else gets the port meanwhile.
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._engine_environment = {
            "LAMBDA_ASYNC_RETRY_BASE_SECONDS": str(async_retry_s),
            **(engine_environment or {}),
        }
        self._settings = Settings(
            cloud_id=self.id,
            root=str(self.root),
            port=self._listener.getsockname()[1],
            listener=self._listener.fileno(),
            repository=str(REPOSITORY),
            node_command=node_command or [sys.executable, "-m", "agent"],
            node_environment=node_environment or {},
            image_root=image_root,
            boot_delay_s=boot_delay_s,
            stop_grace_s=stop_grace_s,
            schedule_factor=schedule_factor,
            alarm_period_factor=alarm_period_factor,
            warm_environments=warm_environments,
            lambda_pythonpath=lambda_pythonpath or os.environ.get("HOLDFAST_LAMBDA_PYTHONPATH", ""),
        )
        # Clients are made from several threads, and a session makes only one at a time.
        self._session, self._session_lock = boto3.session.Session(), threading.Lock()
        self._engine: subprocess.Popen | None = None
        self._warden: subprocess.Popen | None = None

    def __enter__(self) -> "Cloud":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def endpoint_url(self) -> str:
        return self._settings.endpoint

    @property
    def vpc_id(self) -> str:
        return self.client("ec2").describe_vpcs()["Vpcs"][0]["VpcId"]

    @property
    def subnet_ids(self) -> str:
        """The subnets of the default network, one a zone, as a CommaDelimitedList."""
        subnets = self.client("ec2").describe_subnets()["Subnets"]
        return ",".join(subnet["SubnetId"] for subnet in subnets)

    def environment(self) -> dict[str, str]:
        """What boto3, the AWS CLI and the `holdfast` command need in order to talk to this cloud."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
        }

    def client(self, service: str, *, access_key: str = "test", **options):
        """A boto3 client of this cloud."""
        with self._session_lock:
            return self._session.client(
                service,
                endpoint_url=self.endpoint_url,
                region_name=REGION,
                aws_access_key_id=access_key,
                aws_secret_access_key="test",
                **options,
            )

    def start(self) -> None:
        """The engine answers, and a self-check is under way, whose result `deploy` gives.
        Raises CloudFailed, with nothing left behind."""
        (self.root / "nodes").mkdir(parents=True, exist_ok=True)
        (self.root / "tmp").mkdir(exist_ok=True)
        watched, held = os.pipe()
        try:
            self._warden = self._start_warden(watched)
            self._engine = self._start_engine(held)
        finally:
            os.close(watched)
            os.close(held)
            self._listener.close()
        try:
            self._wait_until_healthy()
        except CloudFailed:
            self.stop()
            raise
        self._self_check = _in_thread(self_check.run, self.client)

    def stop(self) -> None:
        """Engine, functions, nodes and their ranks are dead."""
        if self._engine is None:
            return
        self._engine.kill()
        self._engine.wait()
        self._engine = None
        try:
            self._warden.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait()
        kill_marked(CLOUD_MARKER, self.id)

    def processes_left(self) -> list[int]:
        """Ids of the living processes of this cloud."""
        return marked(CLOUD_MARKER, self.id)

    def deploy(
        self, template_path: Path, parameters: dict[str, str] | None = None, *, stack_name: str = "holdfast"
    ) -> dict[str, str]:
        """The stack of the template is made or updated, and the self-check has passed; the outputs of the stack.
        Raises deploy.DeployFailed and self_check.SelfCheckFailed."""
        outputs = deployment.deploy(
            Path(template_path), stack_name=stack_name, parameters=parameters or {}, client=self.client
        )
        self._self_check.result()
        return outputs

    def instances(self) -> list[dict]:
        """Every instance ever launched: instance, state, reason, type, zone, market, fleet, tags, start, end."""
        return self._control("instances")

    def interrupt(
        self, instance_id: str, notice_s: float = 120.0, *, event: bool = True, metadata: bool = True
    ) -> float:
        """A spot notice of `notice_s` by event and metadata; then the node is killed. The epoch time it went out.
        With both switched off it is a silent loss at the end of the notice."""
        return self._control("interrupt", instance_id=instance_id, notice_s=notice_s, event=event, metadata=metadata)

    def rebalance(self, instance_id: str, *, event: bool = True, metadata: bool = True) -> float:
        """A rebalance recommendation; the epoch time it went out."""
        return self._control("rebalance", instance_id=instance_id, event=event, metadata=metadata)

    def kill_node(self, instance_id: str, *, seen: bool = True) -> None:
        """The node's processes are dead, without notice. EC2 ends the instance at once, or, with `seen` False, goes on
        to show it running."""
        self._control("kill", instance_id=instance_id, seen=seen)

    def mute(self, *, state_changes: bool = False, reports: list[str] | tuple[str, ...] = ()) -> None:
        """From now on exactly these get lost: state-change events, and queue messages of the kinds in `reports`."""
        self._control("mute", state_changes=state_changes, reports=list(reports))

    def set_capacity(
        self,
        instance_type: str = "*",
        zone: str = "*",
        market: str = "*",
        *,
        slots: int | None,
        error_code: str = "",
        partial: bool = False,
    ) -> None:
        """So many free machines (None: plenty); more are refused with the code (InsufficientInstanceCapacity).
        With `partial`, what there is is given although a minimum was asked."""
        self._control(
            "set_capacity",
            instance_type=instance_type,
            zone=zone,
            market=market,
            slots=slots,
            error_code=error_code,
            partial=partial,
        )

    def next_launch(self, instance_type: str, *, boot_delay_s: float | None = None, **metadata: object) -> None:
        """The next machine that is launched of this type boots so late, or tells other things of itself: any field of
        `imds.Metadata`, such as `zone`. Called twice, it is about the next two."""
        self._control("next_launch", instance_type=instance_type, boot_delay_s=boot_delay_s, metadata=metadata)

    def slow_uploads(self, keys: str, seconds: float) -> None:
        """From now on each object whose key is like `keys` (*.distcp) takes so long to put; 0 ends it."""
        self._control("slow_uploads", keys=keys, seconds=seconds)

    def schedule_event(self, instance_id: str, code: str, starts_at: float, *, description: str = "") -> None:
        """DescribeInstanceStatus, and nothing else, shows this scheduled event of the instance (epoch seconds)."""
        self._control("schedule", instance_id=instance_id, code=code, starts_at=starts_at, description=description)

    def impair(self, instance_id: str, since: float | None) -> None:
        """The instance's status check fails since this epoch time; None: it passes again."""
        self._control("impair", instance_id=instance_id, since=since)

    def emit(self, source: str, detail_type: str, detail: dict, resources: list[str] | None = None) -> float:
        """Any event, of aws.health for instance, is on the default bus; the epoch time it went out."""
        return self._control("emit", source=source, detail_type=detail_type, detail=detail, resources=resources or [])

    def journal(self, name: str) -> list[dict]:
        """The lines so far of api_calls, ec2_calls or events; `at` is epoch seconds."""
        path = self.root / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _control(self, verb: str, **arguments):
        request = Request(f"{self.endpoint_url}/_holdfast/{verb}", json.dumps(arguments).encode(), method="POST")
        try:
            with urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise CloudFailed(f"{verb} {arguments}: {error.code} {error.read().decode()}") from error

    def _start_warden(self, watched: int) -> subprocess.Popen:
        command = [sys.executable, "-I", "-S", str(REPOSITORY / "local" / "warden.py"), str(watched), self.id]
        return subprocess.Popen(
            command,
            pass_fds=[watched],
            env={"PATH": os.environ.get("PATH", "")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _start_engine(self, held: int) -> subprocess.Popen:
        own = ("AWS_", "HOLDFAST_", "POWERTOOLS_", "LAMBDA_", "SFN_", "MINISTACK_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        ours = {
            VARIABLE: self._settings.as_json(),
            CLOUD_MARKER: self.id,
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(self.root / "tmp"),
            "STATE_DIR": str(self.root / "tmp" / "state"),
            "S3_DATA_DIR": str(self.root / "tmp" / "s3"),
        }
        environment = inherited | self._engine_environment | ours
        with (self.root / "engine.log").open("ab") as log:
            return _forker().popen(
                [sys.executable, "-m", "local.engine.main"],
                pass_fds=[held, self._listener.fileno()],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._engine.poll() is not None:
                raise CloudFailed(f"the engine ended with code {self._engine.returncode}:\n{self._log_tail()}")
            try:
                with urlopen(f"{self.endpoint_url}/_ministack/health", timeout=1):
                    return
            except (URLError, OSError):
                time.sleep(0.02)
        raise CloudFailed(f"the engine did not answer within {_START_S:g} s; see {self.root / 'engine.log'}")

    def _log_tail(self) -> str:
        return (self.root / "engine.log").read_text(errors="replace")[-2000:]


def _in_thread(work, *arguments) -> Future:
    """The future of work in a thread that nobody waits for when the process ends."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except (self_check.SelfCheckFailed, BotoCoreError, ClientError) as error:
            future.set_exception(error)

    threading.Thread(target=run, name="self-check", daemon=True).start()
    return future
