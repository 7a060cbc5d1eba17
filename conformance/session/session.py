"""One session: from a request to a conclusion and the files that hold it."""

import datetime
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.certificates.canonical import portable
from conformance.certificates.certificate import (
    REQUIRED_WORLDS,
    Conclusion,
    conclude,
    kit_identity,
)
from conformance.certificates.reproduction import reproduce_commands
from conformance.errors import ProfileError, TargetError, UsageError
from conformance.hosts.ranks_protocol import Ranks
from conformance.hosts.remote.rendezvous import kit_digest
from conformance.judging.rule import Rule, with_needed
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.files import write_json
from conformance.rules import book
from conformance.scenarios.profiles import (
    GLOO_CPU,
    SHARED,
    SizeLimit,
    require,
    resolve_profile,
)
from conformance.session.claim_search import SEARCHED, Tried, search_claims
from conformance.session.consequences import left_out_causes
from conformance.session.coverage import entry
from conformance.session.engine import Engine, make_engine
from conformance.session.options import Options
from conformance.session.progress import Progress
from conformance.session.rank_source import ranks_for
from conformance.session.reproducer import Reproducer, reproducer
from conformance.session.request import SESSION, Request, prepare_request, profile_is_required
from conformance.session.results import set_aside
from conformance.session.run_sources import LocalSource, ReplaySource, RunSource, new_records_folder
from conformance.session.subject_files import SubjectFiles, subject_files
from conformance.session.threads import processors_for_ranks
from conformance.subjects.claims import Claims, default_claims, parse_claims
from conformance.subjects.kinds import HOOK, KINDS
from conformance.torch_versions.faults import lines_of
from conformance.torch_versions.tested import LACKS, note_untested, reason_unsupported

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Keys of a recorded profile that describe the request; the others describe the machine.
_PROFILE_KEYS = ("name", "backend", "device", "world_sizes")
_MACHINE_KEYS = ("devices", "names", "nccl", "nccl_of_torch")


class Session:
    """Judges one subject and concludes. A context manager.

    Args:
        request: the parsed command line.
        pool: the source of ranks, if it has been started already.

    Raises:
        UsageError: ``--rule`` selects no rule, or ``--records`` or ``--replay`` names no usable
            folder.
    """

    def __init__(self, request: Request, pool: Ranks | None = None) -> None:
        options = request.options
        self.request = request
        self.options = options
        self.subject = request.subject
        self.profile = request.profile
        self.worlds = request.world_sizes
        self.folder = request.paths.folder
        self.certificate_path = request.paths.certificate
        self.rules = book()
        self.selected = select_rules(
            self.rules, options.rule, self.subject.kind, self.profile.device
        )
        self.records = new_records_folder(Path(options.records)) if options.records else None
        self.pool = None if options.replay else pool or ranks_for(options)
        self.notes: list[str] = list(request.notes)
        self.engine: Engine | None = None
        self.judgements: dict[str, Judgement] = {}
        self.header: dict[str, Any] = {}
        # The number of GPUs, if each rank needs one.
        self._devices: int | None = None
        self.progress = Progress()
        self._until_closed = ExitStack()

    @classmethod
    def of(
        cls,
        options: Options,
        pool: Ranks | None = None,
        *,
        runs: bool = True,
        results: Path | None = None,
    ) -> "Session":
        """Return the session of a command line. Raises: UsageError, ProfileError."""
        return cls(prepare_request(options, runs=runs, results=results), pool)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def searches_claims(self) -> bool:
        """Whether claims are searched for, and nothing is certified."""
        return self.request.searches_claims

    def start(self) -> None:
        """Start the host; it imports torch while the caller goes on."""
        if self.pool:
            self.pool.start()

    def begin(self) -> None:
        """Check the profile, load the subject in a rank, determine its claims, and certify the
        machine.

        Raises:
            ProfileError: the machine cannot run the profile, or the claims exclude it.
            TargetError: the subject cannot be loaded.
            KitError: the machine is not fit to judge.
        """
        self._until_closed.enter_context(processors_for_ranks())
        if self.pool:
            selected = [self.rules[number] for number in self.selected]
            self.pool.prepare(scenario for rule in selected for scenario in rule.on)
        description, machine = self._describe()
        claims, claimed_by = self._claims(description)
        with profile_is_required(self.options):
            if not self.profile.takes(claims.backends, claims.devices):
                raise ProfileError(
                    f"profile {self.profile.name}: not run: the subject claims {claims}; choose "
                    "with --backend and --device"
                )
        self.engine = make_engine(self._source(), self.rules, self.subject, claims, self.worlds)
        self.header = self._header(description, machine, claims, claimed_by)
        self.progress.begin()
        self.engine.show(self.progress)
        if self.records:
            limit = self._limit()
            recorded = {**self.header, "limit": asdict(limit) if limit else None}
            write_json(self.records / SESSION, recorded)
        try:
            self.engine.check_machine()
        finally:
            self.progress.clear()
        self.engine.announce(() if self.searches_claims else self.selected)

    def search_claims(self) -> list[Tried]:
        """Try claims, the strictest first. Raises: KitError, TargetError."""
        exact = self.engine
        assert exact is not None, "begin() comes first"

        def engine_for(claims: Claims) -> Engine:
            rules = with_needed(self.rules, SEARCHED)
            return Engine(exact.source, rules, self.subject, claims, self.worlds, exact.control)

        return search_claims(engine_for)

    def judge(self, number: str) -> Judgement:
        """Judge one rule."""
        assert self.engine is not None, "begin() comes first"
        try:
            self.judgements[number] = self.engine.judge(number)
        finally:
            self.progress.clear()
        return self.judgements[number]

    def left_out_causes(self) -> dict[str, str]:
        """Return the findings of rules that were left out, and that others were not run for."""
        if self.engine is None:
            return {}
        return left_out_causes(self.engine.judgements, self.judgements, self.engine.blamed())

    def add_failed_prerequisites(self) -> None:
        """Count rules that were left out, fail, and keep selected ones from being judged."""
        judged = self.engine.judgements if self.engine else {}
        for number in self.left_out_causes():
            if number in judged and judged[number].verdict is Verdict.FAIL:
                self.judgements[number] = judged[number]

    def conclude(self, plugins: list[str] | None = None) -> Conclusion:
        """Weigh all judgements, and write the certificate if there is one.

        Args:
            plugins: the pytest plugins of this run, for the certificate.

        Raises:
            KitError: the certificate could not be written.
        """
        files = self._note_files()
        self.add_failed_prerequisites()
        header = dict(self.header)
        if plugins:
            header["pytest_plugins"] = plugins
        header["command"] = self.options.command()
        if self.engine and self.has_whole_book:
            required = self.options.require_coverage
            measured = self.engine.coverage()
            header["coverage"] = entry(measured, self.engine.probes.tried, required=required)
            self.header["coverage"] = header["coverage"]
        header["reproduce"] = reproduce_commands(portable(header))
        interrupted = list(self.pool.interruptions) if self.pool else []
        incomplete = [*interrupted, *_changed_lines(files)]
        conclusion = conclude(
            self.rules, self.judgements, header, self.worlds, self.subject.kind, incomplete
        )
        if conclusion.verdict != "not certified":
            self.notes += interrupted
        if conclusion.certificate:
            self.certificate_path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.certificate_path, conclusion.certificate)
        else:
            # Another run may have written a certificate meanwhile; the report that follows is of
            # this run.
            self.notes += set_aside(self.request.paths)
        return conclusion

    @property
    def display_name(self) -> str:
        """The subject's name for people; a set-up's is followed by the hook that it registers."""
        hooks = self.header["subject"].get("registers", ()) if self.subject.setup else ()
        registers = f" (registers {', '.join(hooks)})" if hooks else ""
        return self.subject.name + registers

    def close(self) -> None:
        """Stop every process and remove every folder of this session."""
        self._until_closed.close()
        if self.pool:
            self.pool.close()

    @property
    def has_whole_book(self) -> bool:
        """Whether all rules for the subject are judged: some of them leave branches to others."""
        whole = select_rules(self.rules, (), self.subject.kind, self.profile.device)
        return self.selected == whole

    def rerun(self, number: str) -> str:
        """Return the command that judges one rule again."""
        attach = f" --attach {self.options.attach}" if self.options.attach else ""
        drawn = f" --seed {self.request.seed}"
        if set(self.request.world_sizes) != set(REQUIRED_WORLDS):
            drawn += f" --world-size {','.join(map(str, self.request.world_sizes))}"
        if self.request.steps:
            drawn += f" --steps {self.request.steps}"
        return (
            f"pytest --pyargs conformance {self.options.command()}{attach}{drawn} --rule {number}"
        )

    def reproducer(self, number: str) -> Reproducer | None:
        """Return the script that shows a failure without the kit.

        None means that the rule holds, or that its failed run is not an ordinary one.
        """
        judgement = self.judgements.get(number)
        if self.engine is None or judgement is None or judgement.verdict is not Verdict.FAIL:
            return None
        rule = self.rules[number]
        failed = str(Verdict.FAIL)
        for scenario, world in self.engine.plan.runs_of(rule):
            entry = judgement.runs.get(f"{scenario.name}@{world}")
            if entry is None or entry["verdict"] != failed:
                continue
            claims = self.engine.claims
            return reproducer(self.folder, self.subject, claims, rule, judgement, scenario, world)
        return None

    def _source(self) -> RunSource:
        seed = self.request.seed
        steps = self.request.steps
        limit = self._limit()
        if self.pool:
            return LocalSource(self.pool, self.records, self.profile, seed, steps, limit)
        folder = Path(str(self.options.replay))
        return ReplaySource(folder, self.profile, seed, steps, limit)

    def _limit(self) -> SizeLimit | None:
        """Return the largest number of ranks that a scenario may bring itself; None for any."""
        if self.request.recorded:
            recorded = self.request.recorded.get("limit")
            return SizeLimit(**recorded) if recorded else None
        if not set(REQUIRED_WORLDS) <= set(self.request.world_sizes):
            largest = max(*REQUIRED_WORLDS, *self.worlds)
            return SizeLimit(largest, "--world-size leaves such runs out", is_chosen=True)
        if self.pool and self.pool.capacity is not None:
            hosts = f"there are {self.pool.capacity} hosts"
            return SizeLimit(self.pool.capacity, hosts, is_chosen=False)
        if self._devices is not None:
            devices = f"each needs a GPU of its own, and there are {self._devices}"
            return SizeLimit(self._devices, devices, is_chosen=False)
        return None

    def _header(
        self,
        description: Mapping[str, Any],
        machine: Mapping[str, Any],
        claims: Claims,
        claimed_by: str,
    ) -> dict[str, Any]:
        """Return the parts of a certificate besides its rules."""
        profile = self.profile
        loaded = {key: description.get(key) for key in ("module", "distribution", "sha256")}
        found = {key: value for key, value in machine.items() if key != "variables"}
        header = {
            "kit": {**kit_identity(), "source_sha256": kit_digest()},
            "subject": {**self.subject.to_json(), **loaded},
            "claims": {"text": str(claims), "declared_by": claimed_by},
            "profile": {
                "name": profile.display_name(claims.chained and not profile.ordered),
                "backend": profile.backend,
                "device": profile.device,
                "world_sizes": list(self.worlds),
                **found,
            },
            # Ranks keep variables that are set already.
            "environment": {**dict(profile.environment), **machine.get("variables", {})},
            "seed": self.request.seed,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        if self.engine and (steps := self.engine.plan.steps_of_long_run):
            header["steps"] = steps
        if self.request.steps:
            header["requested_steps"] = self.request.steps
        if self.request.recorded:
            header["replayed_from"] = self.request.recorded["date"]
        return header

    def _note_files(self) -> SubjectFiles:
        """Enter the files of the subject's code, and the registered hooks, into the header."""
        runs = self.engine.runs if self.engine else []
        described = self.header["subject"]
        files = subject_files(self.subject, described, runs)
        registers = {"registers": files.hooks} if files.hooks else {}
        self.header["subject"] = {**described, "sha256": files.digests, **registers}
        return files

    def _describe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the description of the subject, and of the machine."""
        recorded = self.request.recorded
        if self.pool is None:
            assert recorded is not None
            require(self.options.require_profile, self.profile)
            machine = {
                key: value for key, value in recorded["profile"].items() if key not in _PROFILE_KEYS
            }
            machine["variables"] = recorded.get("environment", {})
            return {**recorded["subject"], "claims": recorded["claims"]["text"]}, machine
        greeting = self.pool.greeting()
        self._check_torch(greeting)
        self._drop_larger_worlds(self.pool.capacity)
        with profile_is_required(self.options):
            machine = self._resolve_profile(self.pool, greeting)
        description = self.pool.describe(self.subject, self.profile)
        if "error" in description:
            raise TargetError(description["error"])
        return description, machine

    def _check_torch(self, machine: Mapping[str, Any]) -> None:
        """Note the limits of this torch.

        Raises:
            ProfileError: it is too old.
        """
        version = machine["torch"]
        if reason := reason_unsupported(version):
            raise ProfileError(reason)
        if note := note_untested(version):
            self.notes.append(note)
        if lacking := machine.get(LACKS):
            self.notes.append(
                f"torch {version} lacks {', '.join(lacking)}: rules that need it end in a kit error"
            )
        for rule, lines in lines_of(version, self.profile.backend).items():
            if self.rules[rule].kind == self.subject.kind:
                self.notes += lines

    def _resolve_profile(self, pool: Ranks, machine: dict[str, Any]) -> dict[str, Any]:
        """Find out whether the machine can run the profile; return the certificate's description of
        it.
        """
        if self.profile == GLOO_CPU:
            if not machine["gloo"]:
                raise ProfileError("profile gloo-cpu: not run: this torch was built without gloo")
            require(self.options.require_profile, self.profile)
            return machine
        found = pool.probe_profile(self.profile)
        self.profile = resolve_profile(self.profile, found, self.worlds)
        if self.profile.backend == "nccl" and self.profile.name != SHARED:
            self._devices = found["devices"]
        require(self.options.require_profile, self.profile)
        machine = {**machine, **{key: found[key] for key in _MACHINE_KEYS if key in found}}
        if self.profile.environment:
            machine["environment"] = dict(self.profile.environment)
        if self.profile.imports:
            machine["imports"] = self.profile.imports
        return machine

    def _drop_larger_worlds(self, capacity: int | None) -> None:
        """Drop the world sizes for which there are not enough ranks.

        Raises: ProfileError, if none is left.
        """
        if capacity is None or capacity >= max(self.worlds):
            return
        larger = ", ".join(str(world) for world in self.worlds if world > capacity)
        attached = f"{capacity} host{'s are' if capacity > 1 else ' is'} attached"
        self.worlds = tuple(world for world in self.worlds if world <= capacity)
        if not self.worlds:
            raise ProfileError(
                f"--world-size {larger}: {attached}; start torchrun with more --nproc-per-node or "
                "--nnodes"
            )
        self.notes.append(f"world size {larger} was not run: {attached}")

    def _claims(self, description: Mapping[str, Any]) -> tuple[Claims, str]:
        """Return the claims, and their origin: the command line, the subject, the project, or
        nobody.
        """
        kind = self.subject.kind
        if self.searches_claims:
            return Claims(), "nobody: they are to be proposed"
        if self.request.claims is not None:
            return self.request.claims, "--claims"
        if description.get("claims"):
            return parse_claims(description["claims"], kind), "the subject"
        project = _project_claims(self.subject.name)
        if project:
            return parse_claims(project, kind), "pyproject.toml"
        return default_claims(kind, self.subject.arguments), KINDS[kind].default_reason


def _changed_lines(files: SubjectFiles) -> list[str]:
    """Return why a session whose subject was edited meanwhile gives no certificate."""
    if not files.changed:
        return []
    return [f"the subject's source changed during the session: {', '.join(files.changed)}"]


def select_rules(
    rules: Mapping[str, Rule], chosen: tuple[str, ...], kind: str = HOOK, device: str = "cpu"
) -> list[str]:
    """Return the numbers of the rules to judge.

    Args:
        rules: the rule book.
        chosen: the values of ``--rule``: rules (2.3) or sections (2), separated by commas; () for
            all.
        kind: the kind of subject.
        device: the type of device that the profile runs on.

    Raises:
        UsageError: a chosen rule does not exist, or no chosen rule applies to the subject or the
            device.
    """
    wanted = [part.strip() for text in chosen for part in text.split(",") if part.strip()]
    option = f"--rule {','.join(wanted)}"
    for part in wanted:
        if part not in rules and not any(rule.section == part for rule in rules.values()):
            raise UsageError(f"--rule {part}: there is no such rule; --list-rules lists them")
    of_kind = [
        number
        for number, rule in rules.items()
        if rule.kind == kind and (not wanted or number in wanted or rule.section in wanted)
    ]
    if wanted and not of_kind:
        other = next(
            rule.kind for rule in rules.values() if {rule.number, rule.section} & {*wanted}
        )
        sections = ", ".join(KINDS[kind].sections)
        raise UsageError(
            f"{option} applies to a subject of the kind {other}, not {kind}; {kind}: sections "
            f"{sections}"
        )
    found = [number for number in of_kind if rules[number].device in ("", device)]
    if of_kind and not found:
        needed = rules[of_kind[0]].device
        raise UsageError(
            f"{option} applies on {needed} only, and this run is on {device}; pass --device "
            f"{needed}"
        )
    return found


def _project_claims(name: str) -> str | None:
    """Read ``[tool.conformance] claims`` of the pyproject.toml in the current directory.

    It is one text, or a table of texts by target.
    """
    try:
        with open("pyproject.toml", "rb") as file:
            claims = tomllib.load(file).get("tool", {}).get("conformance", {}).get("claims")
    except FileNotFoundError:
        return None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"pyproject.toml: {error}") from error
    if isinstance(claims, dict):
        claims = claims.get(name.partition(",")[0])
    if claims is not None and not isinstance(claims, str):
        raise UsageError(
            "pyproject.toml: [tool.conformance] claims is a string, or a table of strings by target"
        )
    return claims
