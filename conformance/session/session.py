"""One session: from the options of a command line to a conclusion and the files that say so."""

import datetime
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.certificates.certificate import Conclusion, conclude, kit_identity
from conformance.errors import ProfileError, TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.hosts.ranks_protocol import Ranks
from conformance.hosts.remote.pool import AttachedPool
from conformance.judging.rule import Rule
from conformance.judging.verdict import Judgement
from conformance.records.files import write_json
from conformance.rules import book
from conformance.scenarios.profiles import GLOO_CPU, recorded_profile, require, resolve_profile
from conformance.session.claim_search import Tried, propose
from conformance.session.engine import Engine, Source, make_engine
from conformance.session.options import Options
from conformance.session.preflight import (
    certificate_path,
    check,
    parse_worlds,
    profile_asked,
    required,
    results_folder,
    set_aside,
    subject_of,
)
from conformance.session.run_sources import LocalSource, ReplaySource, new_records_folder
from conformance.subjects.claims import AUTO, Claims, default_claims, parse_claims
from conformance.subjects.kinds import HOOK
from conformance.subjects.spec import SubjectSpec
from conformance.subjects.target import parse_target

SESSION = "session.json"


class Session:
    """Judges one subject and concludes. A context manager.

    The constructor checks everything that can be checked without running anything. Before that, it sets aside the certificate and
    the report of an earlier run, unless ``collect_only``: whatever stops this run must not leave them as its results.

    Raises:
        UsageError: the options cannot be run as written.
        ProfileError: this machine cannot run the profile.
    """

    def __init__(self, options: Options, pool: Ranks | None = None, *, collect_only: bool = False) -> None:
        self.options = options
        self.rules = book()
        self.notes: list[str] = [] if collect_only else set_aside(options)
        self._kept: dict[str, Any] = {}
        if options.replay and not options.attach:
            self._kept = _read_kept(Path(options.replay))
            kept = self._kept["subject"]
            named = {name: kept[name] for name in ("hook", "state", "setup")}
            if kept.get("target"):
                named[kept["kind"]] = kept["target"]
            if self._kept["claims"].get("said by") == "--claims":
                named["claims"] = options.claims or self._kept["claims"]["text"]
            worlds = ",".join(map(str, self._kept["profile"]["world sizes"]))
            profile = self._kept["profile"]
            self.options = options = replace(
                options, **named, world_size=worlds, backend=profile["backend"], device=profile["device"], backend_import=None
            )
            if not collect_only:
                self.notes += set_aside(options)  # now that the records have named the subject
        check(options)
        self.subject: SubjectSpec = subject_of(options)
        self.profile = recorded_profile(self._kept["profile"]) if self._kept else profile_asked(options)
        self.selected = select_rules(self.rules, options.rule, self.subject.kind, self.profile.device)
        self.worlds = parse_worlds(options.world_size)
        self.folder = results_folder(self.subject, options.claims)
        self.certificate_path = certificate_path(options, self.subject)
        self.records = new_records_folder(Path(options.records)) if options.records else None
        self.pool = None if options.replay else pool or ranks_for(options)
        self.engine: Engine | None = None
        self.judgements: dict[str, Judgement] = {}
        self.header: dict[str, Any] = {}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the host; it imports torch while the caller goes on."""
        if self.pool:
            self.pool.start()

    def begin(self) -> None:
        """Find out whether the machine can run the profile, load the subject in a rank, settle its claims, certify the machine.

        Raises:
            ProfileError: it cannot, or the subject is not for this profile.
            TargetError: the subject cannot be loaded.
            KitError: the machine is not fit to judge.
        """
        described, machine = self._describe()
        claims, said_by = (Claims(), "nobody: they are to be proposed") if self.proposes else self._claims(described)
        profile, replayed = self.profile, Path(str(self.options.replay))
        source: Source = LocalSource(self.pool, self.records, profile) if self.pool else ReplaySource(replayed, profile)
        with required(self.options):
            if not profile.takes(claims.backends, claims.devices):
                raise ProfileError(f"profile {profile.name}: not run: the subject claims {claims}; --backend and --device say which")
        self.engine = make_engine(source, self.rules, self.subject, claims, self.worlds)
        self.header = {
            "kit": kit_identity(),
            "subject": {**self.subject.to_json(), **{key: described.get(key) for key in ("module", "distribution", "sha256")}},
            "claims": {"text": str(claims), "said by": said_by},
            "profile": {
                "name": profile.display_name(claims.chained and not profile.ordered),
                "backend": profile.backend,
                "device": profile.device,
                "world sizes": list(self.worlds),
                **machine,
            },
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **({"replayed from records of": self._kept["date"]} if self._kept else {}),
        }
        if self.records:
            write_json(self.records / SESSION, self.header)
        self.engine.check_machine()
        self.engine.expect(() if self.proposes else self.selected)

    @property
    def proposes(self) -> bool:
        """Whether claims are to be proposed, and nothing is to be certified."""
        return self.options.claims == AUTO

    def propose(self) -> list[Tried]:
        """Find claims that the subject would hold. Raises: KitError, TargetError."""
        exact = self.engine
        assert exact is not None, "begin() comes first"

        def engine(claims: Claims) -> Engine:
            return exact if claims == exact.claims else Engine(exact.source, self.rules, self.subject, claims, self.worlds, exact.control)

        return propose(engine)

    def judge(self, number: str) -> Judgement:
        """Judge one rule."""
        assert self.engine is not None, "begin() comes first"
        self.judgements[number] = self.engine.judge(number)
        return self.judgements[number]

    def conclude(self, plugins: list[str] | None = None) -> Conclusion:
        """Weigh what was judged, and write the certificate when there is one.

        Raises:
            KitError: the certificate could not be written.
        """
        header = {**self.header, **({"pytest plugins": plugins} if plugins else {}), "command": self.options.command()}
        interrupted = self.pool.interruptions if self.pool else []
        conclusion = conclude(self.rules, self.judgements, header, self.worlds, self.subject.kind, interrupted)
        if conclusion.verdict != "not certified":
            self.notes += interrupted
        if conclusion.certificate:
            self.certificate_path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.certificate_path, conclusion.certificate)
        else:
            # A run beside this one may have written a certificate since; the report that follows is of this run.
            self.notes += set_aside(self.options)
        return conclusion

    def close(self) -> None:
        """Stop every process and remove every folder of this session."""
        if self.pool:
            self.pool.close()

    def rerun(self, number: str) -> str:
        """Return the command that judges one rule again."""
        attach = f" --attach {self.options.attach}" if self.options.attach else ""
        return f"pytest --pyargs conformance {self.options.command()}{attach} --rule {number}"

    def _describe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.pool is None:
            subject, profile = self._kept["subject"], self._kept["profile"]
            machine = {key: profile[key] for key in profile if key not in ("name", "backend", "device", "world sizes")}
            require(self.options.require_profile, self.profile)
            return {**subject, "claims": self._kept["claims"]["text"]}, machine
        machine = self.pool.greeting()
        self._leave_out_larger_worlds()
        with required(self.options):
            machine = self._settle_profile(self.pool, machine)
        described = self.pool.describe(self.subject, self.profile)
        if "error" in described:
            raise TargetError(described["error"])
        return described, machine

    def _settle_profile(self, pool: Ranks, machine: dict[str, Any]) -> dict[str, Any]:
        """Find out what the machine can run; return what the certificate says of it."""
        if self.profile == GLOO_CPU:
            if not machine["gloo"]:
                raise ProfileError("profile gloo-cpu: not run: this torch was built without gloo")
        else:
            seen = pool.probe_profile(self.profile)
            self.profile = resolve_profile(self.profile, seen, self.worlds)
            said: dict[str, Any] = {name: seen[name] for name in ("devices", "names", "nccl", "nccl of torch") if name in seen}
            settings = {"environment": dict(self.profile.environment)} if self.profile.environment else {}
            machine = {**machine, **said, **settings, **({"imports": self.profile.imports} if self.profile.imports else {})}
        require(self.options.require_profile, self.profile)
        return machine

    def _leave_out_larger_worlds(self) -> None:
        """Keep to the world sizes for which there are ranks. Raises: ProfileError, when there is none."""
        capacity = self.pool.capacity if self.pool else None
        if capacity is None or capacity >= max(self.worlds):
            return
        larger = ", ".join(str(world) for world in self.worlds if world > capacity)
        there = f"{capacity} host{'s are' if capacity > 1 else ' is'} attached"
        self.worlds = tuple(world for world in self.worlds if world <= capacity)
        if not self.worlds:
            raise ProfileError(f"--world-size {larger}: {there}; start torchrun with more --nproc-per-node or --nnodes")
        self.notes.append(f"world size {larger} was not run: {there}")

    def _claims(self, described: Mapping[str, Any]) -> tuple[Claims, str]:
        """Return the claims and who made them: the command line, the subject, the project, or nobody."""
        kind = self.subject.kind
        if self.options.claims:
            return parse_claims(self.options.claims, kind), "--claims"
        if described.get("claims"):
            return parse_claims(described["claims"], kind), "the subject"
        project = _project_claims(self.subject.name)
        if project:
            return parse_claims(project, kind), "pyproject.toml"
        if kind == HOOK:
            return Claims(), "nobody: exact is the default"
        return default_claims(kind, parse_target(str(self.subject.target), f"--{kind}").kwargs), "the arguments of the target"


def select_rules(rules: Mapping[str, Rule], chosen: tuple[str, ...], kind: str = HOOK, device: str = "cpu") -> list[str]:
    """Return the numbers of the rules for such a subject on such a device chosen by ``--rule``: all, a rule (2.3) or a section (2).

    Raises:
        UsageError: there is no such rule, or none of those chosen speaks of such a subject, or of such a device.
    """
    wanted = [part.strip() for text in chosen for part in text.split(",") if part.strip()]
    for part in wanted:
        if part not in rules and not any(rule.section == part for rule in rules.values()):
            raise UsageError(f"--rule {part}: there is no such rule; --list-rules lists them")
    of_kind = [number for number, rule in rules.items() if rule.kind == kind and (not wanted or {number, rule.section} & {*wanted})]
    found = [number for number in of_kind if rules[number].device in ("", device)]
    if of_kind and not found:
        needed = rules[of_kind[0]].device
        raise UsageError(f"--rule {','.join(wanted)}: that speaks of {needed} alone, and this run is on {device}; pass --device {needed}")
    if wanted and not found:
        raise UsageError(f"--rule {','.join(wanted)}: that does not speak of a subject of this kind ({kind})")
    return found


def _read_kept(folder: Path) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads((folder / SESSION).read_text())
        kept["subject"], kept["profile"], kept["claims"]["text"], kept["date"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--replay {folder}: no readable {SESSION} in it; --records DIR writes one") from error
    return kept


def _project_claims(name: str) -> str | None:
    """Read ``[tool.conformance] claims`` of the pyproject.toml in the current directory: a text, or texts by target."""
    try:
        with open("pyproject.toml", "rb") as file:
            said = tomllib.load(file).get("tool", {}).get("conformance", {}).get("claims")
    except FileNotFoundError:
        return None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"pyproject.toml: {error}") from error
    if isinstance(said, dict):
        said = said.get(name.partition(",")[0])
    if said is not None and not isinstance(said, str):
        raise UsageError("pyproject.toml: [tool.conformance] claims is a string, or a table of strings by target")
    return said


def ranks_for(options: Options) -> Ranks:
    """Return where the ranks of a session come from."""
    return AttachedPool(options.attach, options.deadline, options.attach_wait) if options.attach else Pool(options.deadline)
