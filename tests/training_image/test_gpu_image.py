"""Claims about the GPU image, as far as a machine without GPUs can prove them. It was never built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from training_image.assert_gpu_stack import faults

IMAGE = Path(__file__).parents[2] / "training_image"
PLATFORMS = ("x86_64", "aarch64")
NCCL = {"nvidia-nccl-cu13": "2.29.7", "torch": "2.13.0"}


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (IMAGE / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(" ")[0].split("==") for line in lines)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_package_of_a_platform_is_pinned_by_digest(platform: str) -> None:
    lines = (IMAGE / f"requirements-gpu-{platform}.txt").read_text().splitlines()[1:]
    assert len(lines) > 30
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_both_images_run_the_same_versions_and_one_wheel_brings_nccl(platform: str) -> None:
    gpu, cpu = pins(f"requirements-gpu-{platform}.txt"), pins("requirements.txt")
    assert {name: gpu[name] for name in cpu} == cpu
    assert [name for name in gpu if "nccl" in name] == ["nvidia-nccl-cu13"]


def test_both_images_hold_the_same_programs_and_begin_with_the_agent() -> None:
    cpu, gpu = ((IMAGE / name).read_text() for name in ("Dockerfile", "Dockerfile.gpu"))
    programs = [
        re.findall(r"^COPY (?:layers|training_image)\S+ (/opt/holdfast/\w+)$", text, re.M) for text in (cpu, gpu)
    ]
    assert programs[0] == programs[1] and len(programs[0]) >= 4
    entry = 'ENTRYPOINT ["python", "-m", "agent"]'
    assert cpu.rstrip().endswith(entry) and gpu.rstrip().endswith(entry)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"torch_cuda": None}, "without CUDA"),
        ({"torch_nccl": (2, 27, 3)}, "torch loads NCCL 2.27.3, its wheel is 2.29.7"),
        ({"nccl_elsewhere": ["/usr/lib/libnccl.so.2"]}, "a second NCCL lies in /usr/lib/libnccl.so.2"),
        ({"wheels": {"torch": "2.13.0"}}, "0 wheels bring NCCL"),
    ],
)
def test_the_build_names_a_stack_that_is_not_the_one_of_the_wheels(seen: dict, said: str) -> None:
    good = {"torch_cuda": "13.0", "torch_nccl": (2, 29, 7), "wheels": NCCL, "nccl_elsewhere": []}
    assert faults(**good) == []
    [fault] = faults(**{**good, **seen})
    assert said in fault
