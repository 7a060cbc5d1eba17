"""From the strings that name a subject to its objects. Runs in ranks only: it imports user code."""

import ast
import difflib
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from conformance.errors import TargetError
from conformance.subjects.spec import CONTEXT_NAMES, Subject, SubjectSpec
from conformance.subjects.target import Target, parse_target

_ALIASES = {
    "pg": "process_group",
    "group": "process_group",
    "module": "model",
    "ddp": "model",
    "ddp_model": "model",
}
Context = dict[str, Callable[[], Any]]
"""The values of a rank by name, each made when it is first needed."""


@dataclass
class Factory:
    """A function with arguments, called in each rank once the process group exists."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]

    def make(self, context: Context) -> Any:
        """Call the function with its arguments and the context values in its signature."""
        try:
            return call_with_names(self.function, self.kwargs, context)
        except TypeError as error:
            name = getattr(self.function, "__name__", self.function)
            missing = missing_arguments(self.function, {*self.kwargs, *context})
            if missing and not self._unknown():
                given = f"; the kit gives {', '.join(sorted(context))}" if context else ""
                raise TargetError(
                    f"{name} requires {', '.join(missing)}: add it to the target "
                    f"({name},{missing[0]}=...){given}"
                ) from error
            raise TargetError(f"calling {name} failed: {error}") from error

    def _unknown(self) -> bool:
        """Whether an argument is in no signature."""
        parameters = list(_parameters_of(self.function))
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        return not takes_any and bool(self.kwargs.keys() - {one.name for one in parameters})

    def needs_context(self) -> bool:
        """Whether the signature names a value that only a rank has."""
        names = (parameter.name for parameter in _parameters_of(self.function))
        return any(name not in self.kwargs and _canonical(name) in CONTEXT_NAMES for name in names)

    def names(self, name: str) -> bool:
        """Whether the target has an argument for a context value."""
        return any(
            _canonical(parameter.name) == name for parameter in _parameters_of(self.function)
        )

    def requires_a_list(self, name: str) -> bool:
        """Whether the annotation of the argument for a context value is a list or a sequence."""
        return any(
            _canonical(parameter.name) == name and _is_of_lists(parameter.annotation)
            for parameter in _parameters_of(self.function)
        )

    def has_none_for(self, name: str) -> bool:
        """Whether None is the default of the argument for a context value."""
        return any(
            _canonical(parameter.name) == name and parameter.default is None
            for parameter in _parameters_of(self.function)
        )


# Names of classes whose objects can be read again; an iterator can be read once.
_LISTS = {"List", "list", "Tuple", "tuple", "Collection", "Sequence", "MutableSequence"}
_LISTS |= {"ParameterList"}


def _is_of_lists(annotation: Any) -> bool:
    """Return whether an annotation takes lists or sequences and, except for None, nothing else."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):  # as under ``from __future__ import annotations``
        try:
            return _is_text_of_lists(ast.parse(annotation.strip(), mode="eval").body)
        except SyntaxError:
            return False
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        members = [one for one in typing.get_args(annotation) if one is not types.NoneType]
        return all(_is_of_lists(one) for one in members)
    return getattr(origin or annotation, "__name__", "") in _LISTS


def _is_text_of_lists(node: ast.expr) -> bool:
    """Return the same of the parsed text of an annotation."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _is_of_lists(node.value)
    if isinstance(node, ast.BinOp):
        return _are_all_of_lists([node.left, node.right])
    name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
    name = name.rpartition(".")[2]
    if isinstance(node, ast.Subscript) and name in ("Optional", "Union"):
        members = node.slice
        return _are_all_of_lists(members.elts if isinstance(members, ast.Tuple) else [members])
    return name in _LISTS


def _are_all_of_lists(members: list[ast.expr]) -> bool:
    return all(
        _is_text_of_lists(one)
        for one in members
        if not (isinstance(one, ast.Constant) and one.value is None)
    )


@dataclass
class Resolved:
    """A subject as objects: a hook with its state, a set-up function, or another kind's target.

    Attributes:
        hook: a hook, or a factory of one.
        state: the state, a factory of it, or the name of a context value.
        setup: the set-up function.
        target: the target of another kind, with its arguments.
        claims: the claims beside the subject.
        module: the module that the subject was imported from.
    """

    hook: Any = None
    state: Any = None
    setup: Callable[..., Any] | None = None
    target: Factory | None = None
    claims: str | None = None
    module: str = ""

    @property
    def function(self) -> Any:
        """The object that holds the subject's code."""
        made = self.target or self.hook or self.setup
        return made.function if isinstance(made, Factory) else made


def resolve(spec: SubjectSpec) -> Resolved:
    """Import the subject that ``spec`` names.

    Raises:
        TargetError: a module or attribute is missing, or the object cannot be registered.
    """
    if spec.target is not None:
        return _resolve_target(spec.target, f"--{spec.kind}")
    if spec.hook:
        option = "--hook"
        text = spec.hook
    else:
        option = "--setup"
        text = str(spec.setup)
    target = parse_target(text, option)
    value, claims = _load(target, option)
    state = _load_state(spec.state)
    resolved = Resolved(state=state, claims=claims, module=target.module)
    if isinstance(value, Subject):
        resolved.hook = value.hook
        resolved.setup = value.setup
        resolved.state = state if spec.state else value.state
        resolved.claims = value.claims or claims
    elif spec.setup:
        resolved.setup = _member(value)
    elif isinstance(value, tuple) and len(value) == 2 and callable(value[1]):
        resolved.hook = value[1]
        resolved.state = state if spec.state else value[0]
    else:
        resolved.hook = value
    if resolved.setup is None and not isinstance(resolved.hook, Factory):
        resolved.hook = _callable(resolved.hook, f"{option} {text}")
    return resolved


def _resolve_target(text: str, option: str) -> Resolved:
    """Import a target as it is, with its arguments; the driver of its kind calls it."""
    target = parse_target(text, option)
    value, module = _lookup(target, option)
    if target.kwargs and not callable(value):
        raise TargetError(f"{option} {text}: {_article(value)} cannot be called with arguments")
    claims = _claims_beside(value, module, target)
    return Resolved(target=Factory(value, target.kwargs), claims=claims, module=target.module)


def is_one_object(resolved: Resolved) -> bool:
    """Whether the subject names an existing object, which two models then share."""
    hook = resolved.hook
    state = resolved.state
    is_made = resolved.setup is not None or isinstance(hook, Factory) or _is_function(hook)
    state_is_made = state is None or isinstance(state, (str, Factory)) or callable(state)
    return not is_made or not state_is_made


def _is_function(hook: Any) -> bool:
    """Whether a hook is a function without a state of its own, perhaps with bound arguments.

    A bound method shares its object, and a bound list or dict may be a state.
    """
    if isinstance(hook, functools.partial):
        bound = (*hook.args, *hook.keywords.values())
        fixed = (bool, int, float, str, bytes, type(None), enum.Enum, torch.dtype)
        is_fixed = (isinstance(one, fixed) or _is_function(one) for one in bound)
        return _is_function(hook.func) and all(is_fixed)
    return inspect.isroutine(hook) and not inspect.ismethod(hook)


def make_hook(resolved: Resolved, context: Context, option: str) -> tuple[Any, Any]:
    """Return (hook, state); a factory is called here, once the process group exists."""
    hook, make = _hook_and_maker(resolved, context, option)
    return hook, make()


def _hook_and_maker(
    resolved: Resolved, context: Context, option: str
) -> tuple[Any, Callable[[], Any]]:
    """Return the hook, which a factory makes, and a function that makes its state."""
    make = functools.partial(make_state, resolved.state, context)
    if not isinstance(resolved.hook, Factory):
        return resolved.hook, make
    made = _member(resolved.hook.make(context))
    if isinstance(made, Subject):
        described = replace(resolved, hook=made.hook, state=resolved.state or made.state)
        return _hook_and_maker(described, context, option)
    if isinstance(made, tuple) and len(made) == 2:
        state, hook = made
        return _callable(hook, option), make if resolved.state is not None else lambda: state
    return _callable(made, option), make


def _callable(hook: Any, option: str) -> Any:
    if not callable(hook):
        raise TargetError(
            f"{option}: {_article(hook)} is no hook; "
            "name a callable (state, bucket) -> Future[Tensor]"
        )
    return hook


def _require_no_factory(hook: Any, target: str) -> None:
    """Raise an error if a hook takes what factories take, and no bucket."""
    names = [parameter.name for parameter in _parameters_of(hook)]
    if names and all(_canonical(name) in CONTEXT_NAMES for name in names):
        raise TargetError(
            f"--hook {target} takes ({', '.join(names)}), and not (state, bucket): if it makes a "
            f"hook, call it: --hook {shlex.quote(f'{target}()')}"
        )


def make_state(state: Any, context: Context) -> Any:
    """Return the state: a context value by name, the result of a factory, or the object itself."""
    if isinstance(state, str) and state in CONTEXT_NAMES:
        return context[_canonical(state)]()
    if isinstance(state, Factory):
        return state.make(context)
    # Other callables are states themselves: an object of a class with __call__ may be one.
    if inspect.isfunction(state) or inspect.isclass(state) or isinstance(state, functools.partial):
        return call_with_names(state, {}, context)
    return state


def call_with_names(function: Callable[..., Any], kwargs: dict[str, Any], context: Context) -> Any:
    """Call ``function`` with ``kwargs`` and the context values that its signature names.

    A value that is in ``kwargs``, or bound by a partial, is not taken from the context.
    """
    bound = function.keywords if isinstance(function, functools.partial) else ()
    given = {*kwargs, *bound}
    positional = []
    named = dict(kwargs)
    for parameter in _parameters_of(function):
        name = _canonical(parameter.name)
        if parameter.name in given or name not in context or _is_variadic(parameter):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(context[name]())
        else:
            named[parameter.name] = context[name]()
    return function(*positional, **named)


def missing_arguments(function: Callable[..., Any], names: Collection[str]) -> list[str]:
    """Return the arguments that a call requires and that are not among ``names``."""
    return [
        parameter.name
        for parameter in _parameters_of(function)
        if parameter.default is parameter.empty
        and not _is_variadic(parameter)
        and _canonical(parameter.name) not in names
    ]


def _parameters_of(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    """Return the parameters of a function; none if its signature cannot be read."""
    if not inspect.isfunction(function):
        return _signature_of(function)
    # A strategy is called in each micro-batch, and to read a signature takes half of the call.
    if function not in _PARAMETERS:
        _PARAMETERS[function] = _signature_of(function)
    return _PARAMETERS[function]


_PARAMETERS: WeakKeyDictionary[Callable[..., Any], tuple[inspect.Parameter, ...]] = (
    WeakKeyDictionary()
)


def _signature_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()


def _is_variadic(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _canonical(name: str) -> str:
    return _ALIASES.get(name, name)


def describe(spec: SubjectSpec) -> dict[str, Any]:
    """Return the subject's description for a certificate: module, digests, distribution, claims."""
    resolved = resolve(spec)
    module = importlib.import_module(resolved.module)
    if isinstance(resolved.hook, Factory) and not resolved.hook.needs_context():
        # It can be called here too, so that its errors show before any rank starts. What makes its
        # state may need a rank.
        _hook_and_maker(resolved, {}, f"--hook {spec.hook}")
    elif inspect.isroutine(resolved.hook):
        _require_no_factory(resolved.hook, str(spec.hook))
    function = resolved.function
    # The code may lie in another module than the one that the target names.
    while isinstance(function, functools.partial):
        function = function.func
    owner = inspect.getmodule(inspect.unwrap(function)) if callable(function) else None
    digests = {}
    for source in (module, owner):
        path = getattr(source, "__file__", None)
        if source is not None and path:
            with open(path, "rb") as file:
                digests[source.__name__] = hashlib.sha256(file.read()).hexdigest()
    return {
        "module": resolved.module,
        "sha256": digests,
        "distribution": _distribution(resolved.module),
        "claims": resolved.claims,
    }


def _load(target: Target, option: str) -> tuple[Any, str | None]:
    """Import a target, bind its arguments, and read the claims beside it."""
    value, module = _lookup(target, option)
    claims = _claims_beside(value, module, target)
    # A set-up is called in any case, for each model: its arguments are bound.
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
    """Import a target; return its object and its module."""
    try:
        module = importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        # The target's own module is missing, or a package above it; else an import inside of it.
        if error.name and (
            target.module == error.name or target.module.startswith(error.name + ".")
        ):
            raise TargetError(
                f"{option} {target}: there is no module {error.name!r} on the path; "
                "run from where it can be imported"
            ) from error
        raise TargetError(
            f"{option} {target}: importing {target.module} failed: {error}"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        hint = ""
        if "process group twice" in str(error):
            hint = (
                "; importing it starts a training: put that below "
                "if __name__ == '__main__':, or the hook in a module of its own"
            )
        raise TargetError(
            f"{option} {target}: importing {target.module} raised {reason}{hint}"
        ) from error
    value = module
    for name in target.attribute.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise TargetError(f"{option} {target}: {_suggestion(value, name)}") from None
    return value, module


def _suggestion(owner: Any, name: str) -> str:
    near = difflib.get_close_matches(name, dir(owner), n=3)
    suggestion = f"; did you mean {', '.join(near)}?" if near else ""
    return f"no attribute {name!r}{suggestion}"


def _claims_beside(value: Any, module: Any, target: Target) -> str | None:
    """Read ``__conformance__`` of the object or its module: one text, or a dict by attribute."""
    declared = getattr(value, "__conformance__", None) or getattr(module, "__conformance__", None)
    if isinstance(declared, dict):
        declared = declared.get(target.attribute)
    if declared is not None and not isinstance(declared, str):
        raise TargetError(
            f"__conformance__ beside {target} must be a string of claims "
            "or a dict of such strings by attribute"
        )
    return declared


def _member(value: Any) -> Any:
    """Return the callable of an enum's member, as in torch's DDPCommHookType; else the value."""
    return value.value if isinstance(value, enum.Enum) and callable(value.value) else value


def _distribution(module: str) -> str | None:
    packages = importlib.metadata.packages_distributions()
    for name in packages.get(module.partition(".")[0], []):
        return f"{name} {importlib.metadata.version(name)}"
    return None


def _article(value: Any) -> str:
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{article} {name}"
