"""Profiles: the requested one, the one that the machine can run, and the ranks that run in it."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.errors import ProfileError, RequiredProfileError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.rule import Rule, golden_list
from conformance.judging.verdict import Verdict
from conformance.ranks.placement import dispatch_key, take_place
from conformance.scenarios.hook import BUCKETS, ORDERED, RAW, VALUES
from conformance.scenarios.model import scenario_from_json
from conformance.scenarios.profiles import (
    BACKENDS,
    DEVICES,
    GLOO_CPU,
    SHARED,
    Profile,
    profile_from_json,
    recorded_profile,
    requested_profile,
    require,
    resolve_profile,
)
from conformance.session.adaptations import adapt_scenario
from conformance.session.engine import Engine
from conformance.session.options import Options
from conformance.session.request import parse_request
from conformance.session.run_sources import RunSource as Source
from conformance.session.session import Session, select_rules
from conformance.subjects.claims import default_claims, parse_claims
from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import REFERENCE
from conformance.subjects.target import parse_target
from tests.test_cuda import ROOT, gate

NCCL, GLOO_CUDA = requested_profile("nccl"), requested_profile("gloo", "cuda")


@pytest.mark.parametrize(
    ("backend", "device", "name"),
    [
        ("gloo", None, "gloo-cpu"),
        ("gloo", "cuda", "gloo-cuda"),
        ("nccl", None, "nccl"),
        ("nccl", "cuda", "nccl"),
        ("xccl", None, "xccl-xpu"),
        ("hccl", None, "hccl-npu"),
        ("mpi", None, "mpi-cpu"),
        ("mpi", "privateuseone", "mpi-privateuseone"),
    ],
)
def test_what_is_asked_for_has_a_name(backend: str, device: str | None, name: str) -> None:
    asked = requested_profile(backend, device)
    assert asked.name == name
    assert (
        profile_from_json(
            {**vars(asked), "environment": [list(pair) for pair in asked.environment]}
        )
        == asked
    )


def test_a_package_may_register_any_name() -> None:
    assert requested_profile("mine", "mydevice", "mypkg").name == "mine-mydevice"


def test_the_names_of_torch_are_known() -> None:
    # Another test may have imported tests.other_backend.
    assert set(dist.Backend.backend_list) - {"undefined", "other"} <= set(BACKENDS)
    with pytest.raises(RuntimeError) as caught:
        torch.device("nonesuch")
    named = re.search(r"one of (.*) device type", str(caught.value))
    assert named is not None
    without_gradients = {"mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "lazy"}
    without_gradients |= {"vulkan", "meta"}
    assert set(named[1].split(", ")) - without_gradients <= set(DEVICES)


def test_the_default_is_gloo_on_the_cpu() -> None:
    assert requested_profile("gloo") == GLOO_CPU == Profile()
    assert (
        requested_profile(Options().backend, Options().device, Options().backend_import) == GLOO_CPU
    )


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (("NCCL", None, None), UsageError, "--backend NCCL: a name in small letters"),
        (("gloo", "cuda:0", None), UsageError, "--device cuda:0: a name in small letters"),
        (("foo", None, None), UsageError, "--backend foo: no known backend; did you mean gloo?"),
        (("ncll", None, None), UsageError, "did you mean nccl? Known are gloo, nccl, mpi,"),
        (("something", None, None), UsageError, "--backend something: no known backend. Known"),
        (("gloo", "gpu", None), UsageError, "--device gpu: no known device; did you mean cuda?"),
        (("gloo", "cdua", None), UsageError, "did you mean cuda? Known are cpu, cuda, xpu,"),
        (("gloo", None, "no such"), UsageError, "--backend-import no such: the name of a module"),
        (
            ("nccl", "cpu", None),
            ProfileError,
            ("profile nccl-cpu: not run: nccl takes tensors on cuda alone"),
        ),
    ],
)
def test_what_no_machine_can_run(
    given: tuple[str, str | None, str | None], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        requested_profile(*given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "machine", "worlds", "said"),
    [
        (NCCL, {"devices": 0}, (1,), "profile nccl: not run: no CUDA device"),
        (GLOO_CUDA, {"devices": 0}, (1,), "profile gloo-cuda: not run: no CUDA device"),
        (
            GLOO_CUDA,
            {"devices": 1, "fails": "no kernel"},
            (2,),
            ("profile gloo-cuda: not run: no kernel"),
        ),
        (
            requested_profile("mpi"),
            {"fails": "this torch was built without mpi"},
            (2,),
            "profile mpi-cpu: not run: this torch was built without",
        ),
        (
            requested_profile("hccl"),
            {"unknown": "torch knows no backend 'hccl'"},
            (2,),
            ("'hccl'; --backend-import names a package"),
        ),
        (
            requested_profile("mine", None, "pkg"),
            {"error": "importing pkg raised"},
            (2,),
            "profile mine-cpu: not run: importing pkg raised",
        ),
        (
            requested_profile("xccl"),
            {"devices": 0},
            (2,),
            ("profile xccl-xpu: not run: no XPU device"),
        ),
        (
            NCCL,
            {"devices": 1, "nccl": [2, 28, 9]},
            (1, 2),
            "world size 2 needs as many GPUs, there is 1; ranks can share one from NCCL 2.30",
        ),
        (
            NCCL,
            {"devices": 2, "nccl": [2, 28, 9]},
            (1, 2, 4),
            ("this is 2.28.9 (pip download --no-deps nvidia-nccl-cu13==2.30.7"),
        ),
        (NCCL, {"devices": 2}, (4,), "this is unknown"),
    ],
)
def test_what_this_machine_cannot_run(
    asked: Profile, machine: Mapping[str, Any], worlds: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ProfileError) as caught:
        resolve_profile(asked, machine, worlds)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 8


@pytest.mark.parametrize(
    ("devices", "worlds", "name", "ctas"),
    [
        (4, (1, 2, 3, 4), "nccl", None),
        (2, (1, 2), "nccl", None),
        # Some scenarios bring eight ranks, whatever world sizes are run.
        (2, (1, 2, 3, 4), SHARED, "2"),
        (1, (2, 4), SHARED, "1"),
        (1, (64,), SHARED, "1"),
    ],
)
def test_ranks_share_gpus_where_there_are_fewer(
    devices: int, worlds: tuple[int, ...], name: str, ctas: str | None
) -> None:
    profile = resolve_profile(NCCL, {"devices": devices, "nccl": [2, 30, 7]}, worlds)
    assert profile.name == name
    settings = dict(profile.environment)
    assert settings.get("NCCL_MAX_CTAS") == ctas
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in settings) == (name == SHARED)
    assert resolve_profile(GLOO_CUDA, {"devices": 1}, (4,)) == GLOO_CUDA, "Gloo does not mind"


def test_another_profile_than_the_required_one_is_a_failure() -> None:
    shared = resolve_profile(NCCL, {"devices": 1, "nccl": [2, 30, 7]}, (2,))
    require(SHARED, shared)
    require(None, shared)
    require(SHARED, NCCL, final=False)
    for required, chosen, final, advice in (
        ("nccl", shared, True, "; nccl needs a GPU for each rank"),
        (SHARED, NCCL, True, "; ranks share GPUs only if there are fewer GPUs than ranks"),
        ("nccl", GLOO_CPU, False, "; pass --backend nccl"),
        (SHARED, GLOO_CPU, False, "; pass --backend nccl"),
        ("gloo-cpu", NCCL, False, "; leave --backend and --device out"),
        ("gloo-cuda", NCCL, False, "; pass --device cuda"),
        ("xccl-xpu", GLOO_CPU, False, "; pass --backend xccl"),
        ("mpi-cuda", GLOO_CPU, False, "; pass --backend mpi --device cuda"),
        ("gloo-cpu", NCCL, True, ""),  # records, which are judged again
    ):
        with pytest.raises(RequiredProfileError) as caught:
            require(required, chosen, final=final)
        assert caught.value.exit_code == 1
        assert str(caught.value) == (
            f"--require-profile {required}: the profile of this run is {chosen.name}{advice}"
        )


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gloo_cpu", "; did you mean gloo-cpu?"),
        ("gloo", "; did you mean gloo-cpu?"),
        ("nccl-cuda", "; did you mean nccl?"),
        ("nccl-shared", "; did you mean nccl-shared-gpu?"),
        ("fast", "; a name is BACKEND-DEVICE, or nccl"),
    ],
)
def test_an_unknown_required_profile_is_a_usage_error(name: str, end: str) -> None:
    options = Options(hook="mypkg:mean", require_profile=name)
    with pytest.raises(UsageError) as caught:
        parse_request(options)
    assert str(caught.value) == f"--require-profile {name}: no such profile{end}"
    # A module may register a backend of any name.
    options = replace(options, backend="mine", backend_import="mypkg", require_profile="mine-cpu")
    assert parse_request(options).profile.name == "mine-cpu"


def test_a_device_that_the_backend_does_not_take() -> None:
    with pytest.raises(ProfileError) as caught:
        parse_request(Options(hook="mypkg:mean", backend="nccl", device="cpu"))
    assert str(caught.value) == (
        "profile nccl-cpu: not run: nccl takes tensors on cuda alone; leave --device out, or pass "
        "--device cuda"
    )


def test_a_certificate_names_the_profile() -> None:
    assert [
        NCCL.display_name(False),
        GLOO_CPU.display_name(True),
        GLOO_CUDA.display_name(True),
    ] == [
        "nccl",
        "gloo-serialised",
        "gloo-cuda-serialised",
    ]
    assert [NCCL.where, GLOO_CPU.where] == ["nccl on cuda", "gloo on cpu"]
    for profile, serialised in (
        (GLOO_CPU, True),
        (GLOO_CPU, False),
        (GLOO_CUDA, True),
        (NCCL, False),
    ):
        kept = recorded_profile(
            {
                "name": profile.display_name(serialised),
                "backend": profile.backend,
                "device": profile.device,
            }
        )
        assert replace(profile, environment=()) == kept


def test_a_subject_says_what_it_takes() -> None:
    assert NCCL.takes((), ())
    assert NCCL.takes(("gloo", "nccl"), ("cuda",))
    assert not NCCL.takes(("gloo",), ())
    assert not NCCL.takes((), ("cpu",))


def test_a_scenario_brings_its_profile_to_the_ranks() -> None:
    scenario = adapt_scenario(VALUES, parse_claims("exact"), NCCL)
    assert scenario.profile == NCCL
    assert scenario_from_json(scenario.to_json()) == scenario
    for kind in KINDS.values():
        claims = default_claims(kind.name, parse_target(kind.reference, "").kwargs)
        assert adapt_scenario(kind.scenarios[0], claims, NCCL).profile == NCCL


def test_on_a_stream_chained_collectives_run_as_they_come() -> None:
    claims = parse_claims("exact, chained")
    here, there = adapt_scenario(ORDERED, claims), adapt_scenario(ORDERED, claims, NCCL)
    assert (here.serialised, here.order) == (True, "free")
    assert (there.serialised, there.order) == (False, "rank0_first")
    assert adapt_scenario(BUCKETS, claims, NCCL).observe.collectives, (
        "by which 10.4 sees that callbacks start some"
    )
    assert adapt_scenario(BUCKETS, claims, GLOO_CUDA).serialised
    assert not adapt_scenario(RAW, claims, GLOO_CUDA).serialised


def test_a_rank_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that the user has set stay."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_MAX_CTAS", "")
    monkeypatch.delenv("NCCL_MAX_CTAS")
    profile = Profile(
        environment=(("NCCL_NVLS_ENABLE", "0"), ("NCCL_MAX_CTAS", "4")),
        imports="tests.other_backend",
    )
    assert take_place(profile, 3) == torch.device("cpu")
    assert (os.environ["NCCL_NVLS_ENABLE"], os.environ["NCCL_MAX_CTAS"]) == ("1", "4")
    assert "other" in dist.Backend.backend_list


def test_devices_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current: list[torch.device] = []
    module = SimpleNamespace(device_count=lambda: 2, set_device=current.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    for name in (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCH_FR_DUMP_TEMP_FILE",
    ):
        monkeypatch.setenv(name, "as it was")
    assert [take_place(GLOO_CUDA, rank, str(tmp_path)).index for rank in range(4)] == [0, 1, 0, 1]
    assert current == [torch.device("cuda", rank % 2) for rank in range(4)]
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(tmp_path)), "not in /tmp"


def test_collectives_are_seen_on_the_device_of_the_profile() -> None:
    """Each device has the key under which torch keeps its kernels; some need a torch built for
    them.
    """
    keys = [
        dispatch_key(requested_profile("gloo", device)) for device in ("cpu", "cuda", "xpu", "npu")
    ]
    assert keys == ["CPU", "CUDA", "XPU", "PrivateUse1"]
    for key in ("CPU", "CUDA", "PrivateUse1"):
        assert torch.library.get_kernel("c10d::allreduce_", key), key


class _NoRuns(Source):
    """A source with a profile and no runs."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile


@pytest.mark.parametrize(
    ("profile", "number", "verdict", "said"),
    [
        (
            GLOO_CPU,
            "21.1",
            Verdict.NOT_RUN,
            ("it applies on cuda only, and this profile is gloo-cpu"),
        ),
        (GLOO_CUDA, "21.5", Verdict.NOT_APPLICABLE, "gloo's collectives cannot be captured"),
        (NCCL, "12.2", Verdict.NOT_APPLICABLE, "watchdog"),
        (NCCL, "12.3", Verdict.NOT_APPLICABLE, "watchdog"),
        (NCCL, "12.4", Verdict.NOT_APPLICABLE, "watchdog"),
    ],
)
def test_what_a_profile_does_not_ask(
    rules: dict[str, Rule], profile: Profile, number: str, verdict: Verdict, said: str
) -> None:
    judgement = Engine(_NoRuns(profile), rules, REFERENCE, parse_claims("exact"), (2,)).judge(
        number
    )
    assert (judgement.verdict, said in judgement.reason) == (verdict, True), judgement.reason


def test_rules_of_a_device_belong_to_its_profiles(rules: dict[str, Rule]) -> None:
    assert "21.1" in golden_list(device="cuda")
    assert "21.1" not in golden_list()
    assert "21.1" in select_rules(rules, (), device="cuda")
    assert "21.1" not in select_rules(rules, (), device="cpu")
    with pytest.raises(
        UsageError,
        match=(
            r"--rule 21\.1 applies on cuda only, and this run is on cpu; pass --device "
            r"cuda"
        ),
    ):
        select_rules(rules, ("21.1",), device="cpu")


def test_a_backend_that_a_package_registers(pool: Pool, tmp_path: Path) -> None:
    """Ranks run on the other backend, since the subject refuses any other.

    Its records name it too.
    """
    module, kept = "tests.other_backend", str(tmp_path / "kept")
    given = {"backend": "other", "backend_import": module, "require_profile": "other-cpu"}
    options = Options(
        hook=f"{module}:hook", world_size="1,2", records=kept, rule=("1.8,2.1,2.6,10.2",), **given
    )
    session = Session.of(options, pool)  # it is not closed: the pool is everybody's
    session.begin()
    assert session.header["profile"]["name"] == "other-cpu"
    assert session.header["profile"]["imports"] == module
    assert {
        number: session.judge(number).reason
        for number in ("1.8", "2.1", "2.6", "10.2")
        if not session.judge(number).verdict.holds
    } == {}
    conclusion = session.conclude()
    assert conclusion.verdict == "not certified", "narrowed to a few rules"
    again = Session.of(Options(replay=kept, require_profile="other-cpu"))
    again.begin()
    assert again.header["profile"] == session.header["profile"]
    assert again.judge("2.1").verdict is Verdict.PASS
    with pytest.raises(RequiredProfileError, match="the profile of this run is other-cpu"):
        Session.of(Options(replay=kept, require_profile="gloo-cpu")).begin()


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (
            {"backend": "hccl"},
            8,
            ("profile hccl-npu: not run: torch knows no backend 'hccl'"),
        ),
        ({"backend": "mpi"}, 8, "profile mpi-cpu: not run: this torch was built without mpi"),
        (
            {"backend": "other", "backend_import": "tests.nothing"},
            8,
            ("not run: importing tests.nothing raised ModuleNotFoundError"),
        ),
        (
            {"require_profile": "nccl"},
            1,
            ("--require-profile nccl: the profile of this run is gloo-cpu"),
        ),
        (
            {"backend": "mpi", "require_profile": "mpi-cpu"},
            1,
            ("--require-profile mpi-cpu: profile mpi-cpu: not run"),
        ),
    ],
)
def test_what_cannot_be_run_is_not_run(
    pool: Pool,
    given: dict[str, str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # earlier results in this folder stay
    if given.get("backend") == "mpi" and dist.is_mpi_available():
        pytest.skip("this torch was built with mpi")
    with pytest.raises(ProfileError) as caught:
        Session.of(Options(hook="hooks_ref:allreduce_hook", **given), pool).begin()
    assert caught.value.exit_code == code
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_subject_is_not_for_this_profile(pool: Pool) -> None:
    options = Options(
        hook="hooks_ref:allreduce_hook", claims="exact, devices(cuda)", require_profile="gloo-cpu"
    )
    with pytest.raises(
        ProfileError,
        match=(
            r"profile gloo-cpu: not run: the subject claims exact, "
            r"devices\(cuda\)"
        ),
    ) as caught:
        Session.of(options, pool).begin()
    assert caught.value.exit_code == 1, "required, and not run"


@pytest.mark.skipif(
    bool(torch.cuda.device_count()), reason=("there is a CUDA device: test_cuda.py has the gate")
)
@pytest.mark.ranks
def test_the_gate_of_gpu_pipelines_is_not_passed_here(tmp_path: Path) -> None:
    """The command of tox -e nccl."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [*gate(), "--hook", "hooks_ref:allreduce_hook"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 8, said
    assert (
        len([line for line in said.splitlines() if "profile nccl: not run: no CUDA device" in line])
        == 1
    ), said
    assert "no certificate was written" in said
    assert not list(tmp_path.rglob("certificate.json"))
