"""One session: from a request to a conclusion and the files that hold it."""

import datetime
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.certificates.certificate import Conclusion, conclude, kit_identity
from conformance.errors import ProfileError, TargetError, UsageError
from conformance.hosts.ranks_protocol import Ranks
from conformance.judging.rule import Rule
from conformance.judging.verdict import Judgement
from conformance.records.files import write_json
from conformance.rules import book
from conformance.scenarios.profiles import GLOO_CPU, require, resolve_profile
from conformance.session.claim_search import Tried, search_claims
from conformance.session.engine import Engine, make_engine
from conformance.session.options import Options
from conformance.session.rank_source import ranks_for
from conformance.session.request import SESSION, Request, prepare_request, profile_is_required
from conformance.session.results import set_aside
from conformance.session.run_sources import LocalSource, ReplaySource, RunSource, new_records_folder
from conformance.subjects.claims import Claims, default_claims, parse_claims
from conformance.subjects.kinds import HOOK, KINDS

# Keys of a recorded profile that describe the request; the others describe the machine.
_PROFILE_KEYS = ("name", "backend", "device", "world sizes")
_MACHINE_KEYS = ("devices", "names", "nccl", "nccl of torch")


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

    @classmethod
    def of(cls, options: Options, pool: Ranks | None = None, *, runs: bool = True) -> "Session":
        """Return the session of a command line. Raises: UsageError, ProfileError."""
        return cls(prepare_request(options, runs=runs), pool)

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
        if self.records:
            write_json(self.records / SESSION, self.header)
        self.engine.check_machine()
        self.engine.announce(() if self.searches_claims else self.selected)

    def search_claims(self) -> list[Tried]:
        """Try claims, the strictest first. Raises: KitError, TargetError."""
        exact = self.engine
        assert exact is not None, "begin() comes first"

        def engine_for(claims: Claims) -> Engine:
            if claims == exact.claims:
                return exact
            return Engine(
                exact.source, self.rules, self.subject, claims, self.worlds, exact.control
            )

        return search_claims(engine_for)

    def judge(self, number: str) -> Judgement:
        """Judge one rule."""
        assert self.engine is not None, "begin() comes first"
        self.judgements[number] = self.engine.judge(number)
        return self.judgements[number]

    def conclude(self, plugins: list[str] | None = None) -> Conclusion:
        """Weigh all judgements, and write the certificate if there is one.

        Args:
            plugins: the pytest plugins of this run, for the certificate.

        Raises:
            KitError: the certificate could not be written.
        """
        header = dict(self.header)
        if plugins:
            header["pytest plugins"] = plugins
        header["command"] = self.options.command()
        interrupted = self.pool.interruptions if self.pool else []
        conclusion = conclude(
            self.rules, self.judgements, header, self.worlds, self.subject.kind, interrupted
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

    def close(self) -> None:
        """Stop every process and remove every folder of this session."""
        if self.pool:
            self.pool.close()

    def rerun(self, number: str) -> str:
        """Return the command that judges one rule again."""
        attach = f" --attach {self.options.attach}" if self.options.attach else ""
        return f"pytest --pyargs conformance {self.options.command()}{attach} --rule {number}"

    def _source(self) -> RunSource:
        if self.pool:
            return LocalSource(self.pool, self.records, self.profile)
        return ReplaySource(Path(str(self.options.replay)), self.profile)

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
        header = {
            "kit": kit_identity(),
            "subject": {**self.subject.to_json(), **loaded},
            "claims": {"text": str(claims), "said by": claimed_by},
            "profile": {
                "name": profile.display_name(claims.chained and not profile.ordered),
                "backend": profile.backend,
                "device": profile.device,
                "world sizes": list(self.worlds),
                **machine,
            },
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        if self.request.recorded:
            header["replayed from records of"] = self.request.recorded["date"]
        return header

    def _describe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the description of the subject, and of the machine."""
        recorded = self.request.recorded
        if self.pool is None:
            assert recorded is not None
            require(self.options.require_profile, self.profile)
            machine = {
                key: value for key, value in recorded["profile"].items() if key not in _PROFILE_KEYS
            }
            return {**recorded["subject"], "claims": recorded["claims"]["text"]}, machine
        greeting = self.pool.greeting()
        self._drop_larger_worlds(self.pool.capacity)
        with profile_is_required(self.options):
            machine = self._resolve_profile(self.pool, greeting)
        description = self.pool.describe(self.subject, self.profile)
        if "error" in description:
            raise TargetError(description["error"])
        return description, machine

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
