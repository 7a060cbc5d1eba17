"""From the strings of a subject to the hook itself. Runs in ranks only: it imports the user's code."""

import enum
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from conformance.errors import TargetError
from conformance.subjects.kinds import HOOK
from conformance.subjects.spec import CONTEXT_NAMES, Case, Subject, SubjectSpec
from conformance.subjects.target import Target, parse_target

_ALIASES = {"pg": "process_group", "group": "process_group", "module": "model", "ddp": "model", "ddp_model": "model"}


@dataclass
class Resolved:
    """The subject as objects: either a hook with a way to make its state, or a set-up function."""

    hook: Any = None
    state: Any = None
    setup: Callable[..., Any] | None = None
    claims: str | None = None
    module: str = ""


def resolve(spec: SubjectSpec) -> Resolved:
    """Import what ``spec`` names.

    Raises:
        TargetError: a module or attribute is missing, or is nothing that can be registered.
    """
    option, text = ("--hook", spec.hook) if spec.hook else ("--setup", spec.setup)
    target = parse_target(str(text), option)
    value, claims = _load(target, option)
    state = _load_state(spec.state)
    if isinstance(value, Subject):
        resolved = Resolved(value.hook, state if spec.state else value.state, value.setup, value.claims or claims, target.module)
    elif spec.setup:
        resolved = Resolved(setup=_member(value), claims=claims, state=state, module=target.module)
    elif isinstance(value, tuple) and len(value) == 2 and callable(value[1]):
        resolved = Resolved(value[1], state if spec.state else value[0], None, claims, target.module)
    else:
        resolved = Resolved(value, state, None, claims, target.module)
    if resolved.setup is None and not isinstance(resolved.hook, Factory):
        resolved.hook = _callable(resolved.hook, f"{option} {text}")
    return resolved


def resolve_other(spec: SubjectSpec) -> "Factory":
    """Import what names a subject of another kind than hook; with ``function`` and ``kwargs`` as they are in its target.

    Raises:
        TargetError: a module or attribute is missing.
    """
    option = f"--{spec.kind}"
    target = parse_target(str(spec.target), option)
    value, _ = _lookup(target, option)
    if target.kwargs and not callable(value):
        raise TargetError(f"{option} {spec.target}: {_article(value)} cannot be called with arguments")
    return Factory(value, target.kwargs)


def is_one_object(resolved: Resolved) -> bool:
    """Whether the subject names an object that is there already: two models that it is registered on share it."""
    hook, state = resolved.hook, resolved.state
    made_anew = resolved.setup is not None or isinstance(hook, Factory) or (inspect.isroutine(hook) and not inspect.ismethod(hook))
    return not made_anew or not (state is None or isinstance(state, (str, Factory)) or callable(state))


def make_hook(resolved: Resolved, context: dict[str, Callable[[], Any]], option: str) -> tuple[Any, Any]:
    """Return (hook, state); a factory is called here, in the rank, once the process group exists."""
    if not isinstance(resolved.hook, Factory):
        return resolved.hook, make_state(resolved.state, context)
    made = _member(resolved.hook.make(context))
    if isinstance(made, Subject):
        return make_hook(replace(resolved, hook=made.hook, state=resolved.state or made.state), context, option)
    if isinstance(made, tuple) and len(made) == 2:
        return _callable(made[1], option), made[0] if resolved.state is None else make_state(resolved.state, context)
    return _callable(made, option), make_state(resolved.state, context)


def _callable(hook: Any, named: str) -> Any:
    if not callable(hook):
        raise TargetError(f"{named}: {_article(hook)} is no hook; name a callable (state, bucket) -> Future[Tensor]")
    return hook


def make_state(state: Any, context: dict[str, Callable[[], Any]]) -> Any:
    """Return the state: a context value by name, the result of a factory, or the object itself."""
    if isinstance(state, str) and state in CONTEXT_NAMES:
        return context[_ALIASES.get(state, state)]()
    if isinstance(state, Factory):
        return state.make(context)
    if inspect.isfunction(state) or inspect.isclass(state) or isinstance(state, functools.partial):
        return call_with_names(state, {}, context)
    return state


def call_with_names(function: Callable[..., Any], kwargs: dict[str, Any], context: dict[str, Callable[[], Any]]) -> Any:
    """Call ``function`` with ``kwargs`` and those context values that its signature names and that it was not given."""
    given = {*kwargs, *(function.keywords if isinstance(function, functools.partial) else ())}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return function(**kwargs)
    positional, named = [], dict(kwargs)
    for parameter in parameters:
        name = _ALIASES.get(parameter.name, parameter.name)
        if parameter.name in given or name not in context or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(context[name]())
        else:
            named[parameter.name] = context[name]()
    return function(*positional, **named)


def asks_for(function: Callable[..., Any], names: Collection[str]) -> list[str]:
    """Return what a function cannot be called without and that is none of ``names``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    needed = (p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [name for name in needed if _ALIASES.get(name, name) not in names]


def describe(spec: SubjectSpec) -> dict[str, Any]:
    """Return what a certificate says of the subject: its module, file digest, distribution and claims."""
    if spec.kind != HOOK:
        target, made = parse_target(str(spec.target), f"--{spec.kind}"), resolve_other(spec)
        resolved = Resolved(made.function, claims=_claims_beside(made.function, sys.modules[target.module], target), module=target.module)
    else:
        resolved = resolve(spec)
    module = importlib.import_module(resolved.module)
    function = resolved.hook.function if isinstance(resolved.hook, Factory) else resolved.hook or resolved.setup
    if isinstance(resolved.hook, Factory) and not resolved.hook.needs_context():
        make_hook(resolved, {}, f"--hook {spec.hook}")
    while isinstance(function, functools.partial):
        function = function.func
    owner = inspect.getmodule(inspect.unwrap(function)) if callable(function) else None
    files = {}
    for source in (module, owner):
        path = getattr(source, "__file__", None)
        if source is not None and path:
            with open(path, "rb") as file:
                files[source.__name__] = hashlib.sha256(file.read()).hexdigest()
    return {
        "module": resolved.module,
        "sha256": files,
        "distribution": _distribution(resolved.module),
        "claims": resolved.claims,
    }


@dataclass
class Factory:
    """A target that is called in each rank once the group exists."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]

    def make(self, context: dict[str, Callable[[], Any]]) -> Any:
        try:
            return call_with_names(self.function, self.kwargs, context)
        except TypeError as error:
            raise TargetError(f"calling {getattr(self.function, '__name__', self.function)} failed: {error}") from error

    def needs_context(self) -> bool:
        """Whether its signature names anything that only a rank has."""
        try:
            names = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return False
        return any(name not in self.kwargs and _ALIASES.get(name, name) in CONTEXT_NAMES for name in names)


def _load(target: Target, option: str) -> tuple[Any, str | None]:
    """Import a target, call it if it is to be called, and read the claims beside it."""
    value, module = _lookup(target, option)
    claims = _claims_beside(value, module, target)
    if option != "--setup" and (target.call or inspect.isclass(value)):
        value = Factory(value, target.kwargs)
    elif target.kwargs:
        value = functools.partial(value, **target.kwargs)
    return _member(value), claims


def _load_state(text: str | None) -> Any:
    if text is None or text in CONTEXT_NAMES:
        return text
    target = parse_target(text, "--state")
    value, _ = _lookup(target, "--state")
    return Factory(value, target.kwargs) if callable(value) else value


def _lookup(target: Target, option: str) -> tuple[Any, Any]:
    try:
        module = importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        if error.name and (target.module == error.name or target.module.startswith(error.name + ".")):
            raise TargetError(
                f"{option} {target}: there is no module {error.name!r} on the path; run from where it can be imported"
            ) from error
        raise TargetError(f"{option} {target}: importing {target.module} failed: {error}") from error
    except Exception as error:
        raise TargetError(f"{option} {target}: importing {target.module} raised {type(error).__name__}: {error}") from error
    value = module
    for name in target.attribute.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise TargetError(f"{option} {target}: {_suggestion(value, name)}") from None
    return value, module


def _suggestion(owner: Any, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, dir(owner), n=3)
    return f"no attribute {name!r}" + (f"; did you mean {', '.join(near)}?" if near else "")


def _claims_beside(value: Any, module: Any, target: Target) -> str | None:
    """Read ``__conformance__`` on the object, or on its module: one text, or a dict by attribute."""
    said = getattr(value, "__conformance__", None) or getattr(module, "__conformance__", None)
    if isinstance(said, dict):
        said = said.get(target.attribute)
    if said is not None and not isinstance(said, str):
        raise TargetError(f"__conformance__ beside {target} must be a string of claims or a dict of them by attribute")
    return said


def _member(value: Any) -> Any:
    """An enum of partials, as torch's DDPCommHookType: its member's value is the callable."""
    return value.value if isinstance(value, enum.Enum) and callable(value.value) else value


def _distribution(module: str) -> str | None:
    for name in importlib.metadata.packages_distributions().get(module.partition(".")[0], []):
        return f"{name} {importlib.metadata.version(name)}"
    return None


def _article(value: Any) -> str:
    name = type(value).__name__
    return f"a{'n' if name[0].lower() in 'aeiou' else ''} {name}"


__all__ = ["Case", "Resolved", "call_with_names", "describe", "make_state", "resolve"]
