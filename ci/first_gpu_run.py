"""Run the kit on a machine with GPUs for the first time, in numbered stages.

    python ci/first_gpu_run.py                  # all stages; those that have passed are skipped
    python ci/first_gpu_run.py --stages 1,2     # some stages, again
    python ci/first_gpu_run.py --mps            # share GPUs by NVIDIA's multi-process service
    python ci/first_gpu_run.py --list

The most telling stages come first. Each takes less than five minutes, and writes its output and its
result into the folder (``--folder``, by default ``first-gpu-run``), so that a run can be
interrupted and resumed, and the folder sent back. On a machine without a CUDA device every stage is
"not run", and the exit code is 8.

NCCL before 2.30 refuses two ranks on one GPU. With fewer GPUs than ranks, preload a newer one:

    pip download --no-deps nvidia-nccl-cu13==2.30.7 && unzip nvidia_nccl_cu13-*.whl
    LD_PRELOAD=$PWD/nvidia/nccl/lib/libnccl.so.2 python ci/first_gpu_run.py

Processes take turns at starting a GPU: run nothing beside it. With --mps, stages of right subjects
share GPUs by NVIDIA's multi-process service, and collectives of ranks that share a GPU are some
hundred times as fast. Mutants run without it, since a fault of one process would end the others.

It needs the kit's test requirements (``pip install -e '.[test]'``) beside the machine's torch.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 290  # seconds for a stage
NOT_RUN = 8
TIMED_OUT = 124
DEVICES = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
VERSIONS = """
import json, os, platform, torch
from torch.cuda import nccl
count = torch.cuda.device_count()
print(json.dumps({
    "python": platform.python_version(),
    "platform": platform.platform(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl of torch": nccl.version(),
    "devices": [torch.cuda.get_device_name(i) for i in range(count)],
    "environment": {
        name: value for name, value in os.environ.items()
        if name.startswith(("CUDA_", "NCCL_", "NVIDIA_", "LD_PRELOAD", "PYTORCH_"))
    },
}, indent=1))
"""
MPS = "nvidia-cuda-mps-control"
MPS_FOLDER = "/tmp/conformance-mps"  # short: a socket's path has at most 107 characters
MPS_VARIABLES = {
    "CUDA_MPS_PIPE_DIRECTORY": MPS_FOLDER,
    "CUDA_MPS_LOG_DIRECTORY": MPS_FOLDER,
}
DEFAULT_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


def _certify(target: str, *options: str) -> str:
    """Return the command that certifies a hook on the device."""
    return shlex.join(
        [
            *("{python}", "-m", "pytest", "-p", "conformance.plugin", "--pyargs", "conformance"),
            *("-o", "addopts=", "--device", "cuda", "--hook", target, *options),
        ]
    )


def _tox(environment: str) -> str:
    """Return the command of a gate. Its options replace the hook that it certifies by default."""
    options = "--hook hooks_ref:allreduce_hook --world-size {worlds}"
    return f"{{python}} -m tox -e {environment} -- {options}"


@dataclass(frozen=True)
class Stage:
    """Some commands with one purpose.

    Attributes:
        name: also of its files.
        commands: with ``{python}``, ``{worlds}``, the world sizes of this machine, and ``{gpus}``,
            the number of its devices.
        passes: the exit codes with which a command passes.
        shares: whether it runs under the multi-process service, if there is one.
    """

    name: str
    commands: tuple[str, ...]
    passes: tuple[int, ...] = (0,)
    shares: bool = False


STAGES = (
    Stage("versions", (f"{{python}} -c {shlex.quote(VERSIONS)}", "nvidia-smi")),
    Stage(
        "allreduce-on-nccl",
        (_certify("hooks_ref:allreduce_hook", "--backend", "nccl", "--world-size", "{worlds}"),),
        (0, 7),
        shares=True,
    ),
    Stage("mutants-on-nccl", ("{python} -m pytest tests/test_cuda.py -k 'is_refused and nccl'",)),
    Stage(
        "powersgd-on-nccl",
        (
            _certify(
                "hooks_ref:powerSGD_hook",
                *("--state", "examples.states:power_sgd", "--backend", "nccl"),
                *("--claims", "compressed(ratio=0.039), warmup(2)", "--world-size", "{worlds}"),
            ),
        ),
        (0, 7),
        shares=True,
    ),
    Stage("mutants-on-gloo", ("{python} -m pytest tests/test_cuda.py -k 'is_refused and gloo'",)),
    Stage("tox-nccl", (_tox("nccl"),), (0, 7), shares=True),
    Stage("tox-gloo-cuda", (_tox("gloo-cuda"),), (0, 7)),
    # On one GPU, ranks that share it would time each other.
    Stage("hooks-beside-torchs", ("{python} benchmarks/on_cuda.py hooks --ranks {gpus}",)),
    Stage("cost-of-watch", ("{python} benchmarks/on_cuda.py watch --ranks {gpus}",)),
    Stage(
        "torchs-allreduce-on-nccl",
        (
            _certify(
                f"{DEFAULT_HOOKS}:allreduce_hook", "--backend", "nccl", "--world-size", "{worlds}"
            ),
            _certify(
                f"{DEFAULT_HOOKS}:fp16_compress_hook",
                *("--backend", "nccl", "--claims", "rounded(float16)", "--world-size", "{worlds}"),
            ),
        ),
        (0, 1, 7),
        shares=True,
    ),
    Stage(
        "sizes-on-nccl",
        (
            _certify(
                "hooks_ref:allreduce_hook",
                *("--backend", "nccl", "--world-size", "{worlds}", "--rule", "22"),
            ),
        ),
        (7,),
        shares=True,
    ),
    Stage("gate", ("{python} -m pytest tests/test_cuda.py -k 'gate or hang'",)),
    Stage("torchs-hooks", ("{python} -m pytest tests/test_cuda.py -k torchs",), shares=True),
    Stage("references", ("{python} -m pytest tests/test_cuda.py -k references",), shares=True),
    Stage("allreduce-on-gloo-cuda", (_certify("hooks_ref:allreduce_hook"),)),
)


@dataclass(frozen=True)
class Result:
    """The result of a stage.

    Attributes:
        status: ``passed``, ``failed`` or ``not run``.
        reason: why it was not run, or the command that failed.
        codes: the exit code of each command.
        seconds: of the whole stage.
    """

    status: str
    reason: str = ""
    codes: tuple[int, ...] = ()
    seconds: float = 0.0


def count_devices() -> int:
    """Return the number of CUDA devices that torch can use here."""
    asked = subprocess.run(
        [sys.executable, "-c", DEVICES], capture_output=True, text=True, check=False
    )
    return int(asked.stdout) if asked.returncode == 0 and asked.stdout.strip().isdigit() else 0


def world_sizes(devices: int, shares: bool) -> str:
    """Return the world sizes to certify at.

    Args:
        devices: the number of GPUs; on one of them two ranks share it.
        shares: whether more ranks do, by the multi-process service.
    """
    return ",".join(str(size) for size in (1, 2, 3, 4) if shares or size <= max(devices, 2))


def run_command(command: str, log: Any) -> int:
    """Run one command in the kit's folder, and return its exit code."""
    log.write(f"$ {command}\n")
    log.flush()
    try:
        done = subprocess.run(
            shlex.split(command), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        log.write(f"\nstopped after {LIMIT} seconds\n")
        return TIMED_OUT
    except FileNotFoundError as error:
        log.write(f"{error}\n")
        return 127
    return done.returncode


@contextlib.contextmanager
def multi_process_service() -> Iterator[None]:
    """Start NVIDIA's multi-process service, and stop it at the end."""
    os.makedirs(MPS_FOLDER, exist_ok=True)
    environment = {**os.environ, **MPS_VARIABLES}

    def stop() -> None:
        subprocess.run([MPS], input="quit\n", text=True, env=environment, check=False)

    stop()  # a service that a run has left behind when it was stopped itself
    subprocess.run([MPS, "-d"], env=environment, check=True)
    try:
        yield
    finally:
        stop()


def run_stage(
    stage: Stage,
    folder: Path,
    devices: int,
    run: Callable[[str, Any], int] = run_command,
    mps: bool = False,
) -> Result:
    """Run the commands of a stage, write its files, and return its result.

    Args:
        mps: whether the multi-process service runs.
    """
    shares = mps and stage.shares
    number = STAGES.index(stage) + 1
    path = folder / f"{number:02}-{stage.name}"
    if not devices:
        result = Result("not run", "no CUDA device")
    else:
        begin = time.monotonic()
        codes = []
        with open(path.with_suffix(".txt"), "w", encoding="utf-8") as log:
            for template in stage.commands:
                command = template.replace("{python}", sys.executable)
                command = command.replace("{worlds}", world_sizes(devices, shares))
                codes.append(run(_prefix(shares) + command.replace("{gpus}", str(devices)), log))
        wrong = [
            command
            for command, code in zip(stage.commands, codes, strict=True)
            if code not in stage.passes
        ]
        not_run = bool(wrong) and all(code in (*stage.passes, NOT_RUN) for code in codes)
        status = "passed"
        if wrong:
            status = "not run" if not_run else "failed"
        reason = wrong[0].partition("\n")[0] if wrong else ""
        result = Result(status, reason, tuple(codes), round(time.monotonic() - begin, 1))
    path.with_suffix(".json").write_text(json.dumps(vars(result), indent=1) + "\n")
    return result


def has_passed(stage: Stage, folder: Path) -> bool:
    """Whether an earlier call has run the stage, and it passed."""
    path = folder / f"{STAGES.index(stage) + 1:02}-{stage.name}.json"
    return path.exists() and json.loads(path.read_text())["status"] == "passed"


def chosen(text: str) -> list[Stage]:
    """Return the stages of ``--stages``. Raises: ValueError."""
    numbers = [int(part) for part in text.split(",")]
    if not all(0 < number <= len(STAGES) for number in numbers):
        raise ValueError(text)
    return [STAGES[number - 1] for number in numbers]


def _prefix(shares: bool) -> str:
    """Return what stands in front of the commands of a stage that shares GPUs by the service."""
    if not shares:
        return ""
    return " ".join(["env", *(f"{name}={value}" for name, value in MPS_VARIABLES.items()), ""])


def main(
    arguments: Sequence[str],
    probe: Callable[[], int] = count_devices,
    run: Callable[[str, Any], int] = run_command,
) -> int:
    """Run the stages, and return 0, 1 if one failed, or 8 if there is no device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("first-gpu-run"))
    parser.add_argument(
        "--stages", default="", metavar="N,N", help="only these, also if they passed"
    )
    parser.add_argument(
        "--mps", action="store_true", help="right subjects share GPUs by the multi-process service"
    )
    parser.add_argument("--list", action="store_true", help="list the stages and their commands")
    options = parser.parse_args(arguments)
    if options.list:
        for number, stage in enumerate(STAGES, 1):
            print(f"{number:2}  {stage.name}: {'; '.join(stage.commands)}")
        return 0
    try:
        stages = chosen(options.stages) if options.stages else list(STAGES)
    except ValueError:
        parser.error(f"--stages {options.stages}: numbers from 1 to {len(STAGES)}, such as 1,2")
    options.folder.mkdir(parents=True, exist_ok=True)
    devices = probe()
    if options.mps and devices and not shutil.which(MPS):
        parser.error(f"--mps: there is no {MPS} on PATH")
    service = multi_process_service() if options.mps and devices else contextlib.nullcontext()
    results = []
    with service:
        for stage in stages:
            number = STAGES.index(stage) + 1
            if not options.stages and has_passed(stage, options.folder):
                print(f"{number:2}  {stage.name}: passed before")
                continue
            result = run_stage(stage, options.folder, devices, run, options.mps)
            results.append(result)
            reason = f": {result.reason}" if result.reason else ""
            print(f"{number:2}  {stage.name}: {result.status}{reason}", flush=True)
    if any(result.status == "failed" for result in results):
        return 1
    return NOT_RUN if any(result.status == "not run" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
