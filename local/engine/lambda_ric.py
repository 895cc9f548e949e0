"""Python functions run under the real awslambdaric, so a raised exception keeps its class name and its stack trace.

ministack's ProvidedWorker already is a Runtime API server with warm environments; here it also serves python runtimes.
"""

import os
import sys
import threading
import time
from pathlib import Path

from ministack.core import lambda_runtime
from ministack.services import lambda_svc

from local.engine.prefork import Environments
from local.engine.settings import Settings
from local.processes import Forker

NEEDS = {
    "ministack.services.lambda_svc": (
        "_provided_runtime_code_dir",
        "_provided_worker_env",
        "_resolve_layer_zip",
        "_execute_function_warm",
        "_execute_function_provided_warm",
    ),
    "ministack.core.lambda_runtime": (
        "ProvidedWorker",
        "_worker_class_for",
        "_workers",
        "_lock",
        "kill_workers",
        "subprocess",
    ),
}

_IDLE_LOOK_S = 1.0
# In a code folder whose bootstrap is ours.
_MARK = ".python-function"


def apply(settings: Settings, forker: Forker) -> None:
    """Every python function runs in a warm environment of the real runtime; at most `warm_environments` idle stay."""
    lambda_svc._provided_runtime_code_dir = _with_bootstrap
    lambda_svc._provided_worker_env = lambda config, code_dir, port: _environment(settings, config, code_dir, port)
    lambda_runtime._worker_class_for = _worker_class
    lambda_svc._execute_function_warm = _execute_warm
    warm = None if settings.lambda_pythonpath else Environments(forker)
    lambda_runtime.subprocess = _Subprocess(forker, warm)
    threading.Thread(target=_drop_idle, args=(settings.warm_environments,), name="warm-cap", daemon=True).start()


_stock_code_dir = lambda_svc._provided_runtime_code_dir
_stock_environment = lambda_svc._provided_worker_env
_stock_worker_class = lambda_runtime._worker_class_for
_stock_execute_warm = lambda_svc._execute_function_warm
_stock_subprocess = lambda_runtime.subprocess


class _Subprocess:
    """The subprocess module of lambda_runtime, with children that die with the engine."""

    def __init__(self, forker: Forker, warm: Environments | None) -> None:
        self._forker, self._warm = forker, warm

    def Popen(self, command: list[str], *, cwd: str, env: dict[str, str], **options):
        if self._warm and Path(cwd, _MARK).exists():
            return self._warm.start(environment=env, cwd=cwd)
        return self._forker.popen(command, cwd=cwd, env=env, **options)

    def __getattr__(self, name: str):
        return getattr(_stock_subprocess, name)


def _is_python(config: dict) -> bool:
    return str(config.get("Runtime", "")).startswith("python")


def _with_bootstrap(code_zip: bytes) -> str:
    code_dir = _stock_code_dir(code_zip)
    bootstrap = Path(code_dir, "bootstrap")
    if not bootstrap.exists():
        # Written aside and renamed: a fork elsewhere that inherits an open write fd makes execve fail with ETXTBSY.
        draft = bootstrap.with_suffix(f".{threading.get_ident()}")
        draft.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m awslambdaric "$_HANDLER"\n')
        draft.chmod(0o755)
        draft.replace(bootstrap)
        Path(code_dir, _MARK).touch()
    return code_dir


def _environment(settings: Settings, config: dict, code_dir: str, port: int) -> dict[str, str]:
    environment = _stock_environment(config, code_dir, port)
    layers = (lambda_svc._resolve_layer_zip(layer) for layer in config.get("Layers", []))
    folders = [settings.lambda_pythonpath, code_dir]
    folders += [os.path.join(_stock_code_dir(layer), "python") for layer in layers if layer]
    return environment | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
        "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{environment['AWS_LAMBDA_FUNCTION_NAME']}",
        "AWS_EXECUTION_ENV": f"AWS_Lambda_{config['Runtime']}",
    }


def _worker_class(config: dict) -> type:
    return RuntimeWorker if _is_python(config) else _stock_worker_class(config)


def _execute_warm(func: dict, event: dict, request_id: str) -> dict:
    python = _is_python(func.get("config") or func)
    run = lambda_svc._execute_function_provided_warm if python else _stock_execute_warm
    return run(func, event, request_id)


class RuntimeWorker(lambda_runtime.ProvidedWorker):
    """One environment. Headers and body leave in one packet: sent apart, Nagle's algorithm costs 50 ms a call."""

    def _build_handler_class(self, generation, pending):
        stock = super()._build_handler_class(generation, pending)

        class Handler(stock):
            disable_nagle_algorithm = True
            wbufsize = -1

            def do_GET(self) -> None:
                stock.do_GET(self)
                self.wfile.flush()

            def do_POST(self) -> None:
                stock.do_POST(self)
                self.wfile.flush()

        return Handler

    def _drain_stderr_bounded(self, first_line_wait=0.0, idle_confirm=0.001, hard_cap=0.05):
        # The stock default waits 50 ms for a first line, on each call; most calls of a quiet function write none.
        return super()._drain_stderr_bounded(
            0.0 if first_line_wait == 0.05 else first_line_wait, idle_confirm, hard_cap
        )


def _drop_idle(cap: int) -> None:
    while True:
        time.sleep(_IDLE_LOOK_S)
        dropped = []
        with lambda_runtime._lock:
            workers = [(worker, key) for key, pool in lambda_runtime._workers.items() for worker in pool]
            idle = sorted((pair for pair in workers if not pair[0].in_use), key=lambda pair: pair[0].last_used)
            for worker, key in idle[: max(0, len(workers) - cap)]:
                lambda_runtime._workers[key].remove(worker)
                dropped.append(worker)
        lambda_runtime.kill_workers(dropped)
