"""Notes which marks of the subject's own source files ran (``records/source_marks.py``).

A finder at the head of ``sys.meta_path`` gives the modules of the subject a loader that executes
their marked source. The subject's own files are those of the package that the target names, and of
the other packages of its distribution; for a module without a package, those in the folder that it
lies in. Torch, the standard library and the kit are never among them.

Why not a library. slipcover was tried first: on Python 3.11 it rewrites bytecode, and
``torch.compile`` raises an AssertionError on such a function, so that a right subject would be
refused. coverage.py and ``sys.settrace`` see no callback that a thread of Gloo runs. Marks are
statements of Python, which dynamo compiles like any others.

To mark a file costs some milliseconds. The first rank keeps the marked code in a folder of the
host's. Lanes learn from a rank which files there are, read their marked code, and hand it to all
ranks that they fork later. Nothing is executed for that.
"""

import contextlib
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import marshal
import os
import site
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from conformance.ranks.instruments.forgotten_modules import forget_package
from conformance.ranks.resolve import resolve
from conformance.records.files import COVERAGE
from conformance.records.source_marks import LIST_NAME, marked, sha256
from conformance.subjects.spec import CONTEXT_NAMES, SubjectSpec
from conformance.subjects.target import parse_target

_KIT = str(Path(__file__).parents[2])
# The code of each marked file with its number of marks, by path and digest of the source.
_MARKED: dict[tuple[str, str], tuple[CodeType, int]] = {}
# The folder in which all processes of a host keep marked code.
_KEPT: list[Path] = []
# The beginnings of the paths of a subject's own files.
_ROOTS: dict[SubjectSpec, set[str]] = {}


class Coverage:
    """Notes the marks that run in this process.

    Args:
        spec: the subject.
    """

    def __init__(self, spec: SubjectSpec) -> None:
        self._spec = spec
        self._ran: dict[str, tuple[str, str, list[int]]] = {}
        self._at_import: dict[str, list[int]] = {}
        self._unmarked: dict[str, str] = {}
        self._roots = tuple(sorted(_ROOTS.get(spec) or _roots(spec)))

    def install(self) -> None:
        """Have modules of the subject marked when they are imported from now on."""
        references = sys.modules.get("hooks_ref")
        if references and _top_folder(str(references.__file__)) in self._roots:
            # The host has imported the references, without marks. They are the subject's own if it
            # names them, or if its module takes the subject's function from them.
            forget_package("hooks_ref")
        sys.meta_path.insert(0, _Finder(self))

    def owns(self, path: str) -> bool:
        """Whether a source file is one of the subject's own."""
        return path.startswith(self._roots) and not _is_foreign(path, self._roots)

    def run(self, module: ModuleType, path: str, source: bytes) -> bool:
        """Execute the marked source of a module; return False if it cannot be marked."""
        try:
            code, count = _marked_code(path, source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self._unmarked[path] = f"{type(error).__name__}: {error}"
            return False
        # A module that is imported again goes on with its list.
        _, _, ran = self._ran.setdefault(path, (module.__name__, sha256(source), [0] * count))
        vars(module)[LIST_NAME] = ran
        try:
            exec(code, vars(module))
        finally:
            # A module that is only imported is not used.
            self._at_import[path] = _set_marks(ran)
            ran[:] = [0] * count
        return True

    def write(self, folder: Path) -> None:
        """Write the marks that ran, by file, into the folder of the rank."""
        files = {
            path: {
                "module": name,
                "sha256": digest,
                "ran": _set_marks(ran),
                "at_import": self._at_import.get(path, []),
            }
            for path, (name, digest, ran) in self._ran.items()
        }
        home, reason = self._home()
        body = {
            "files": files,
            "unmarked": self._unmarked,
            "roots": self._roots,
            "home": home,
            "reason": reason,
        }
        temporary = folder / f".{COVERAGE}"
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(body), encoding="utf-8")
            os.replace(temporary, folder / COVERAGE)

    def _home(self) -> tuple[str, str]:
        """Return the file of the subject's function, and why its marks are not noted, or ''."""
        try:
            function = resolve(self._spec).function
        except Exception as error:
            return "", f"the subject cannot be loaded: {error}"
        code = _code_of(function)
        if code is None:
            return "", "the subject is no function of Python with a source"
        path = code.co_filename
        if path in self._ran:
            return path, ""
        if path in self._unmarked:
            return path, f"{path} cannot be marked: {self._unmarked[path]}"
        if _is_foreign(path, ()):
            return path, f"the subject's code is not its own: {path}"
        if not os.path.isfile(path):
            return path, f"the subject's code has no source file: {path}"
        return path, f"{path} was imported before the subject"


class _Finder:
    """Finds the modules of the subject as Python would, and has them marked."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the subject's own modules; None leaves others to Python."""
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is None:
                continue
            is_source = type(spec.loader) is SourceFileLoader
            if is_source and spec.origin and self._coverage.owns(spec.origin):
                spec.loader = _Loader(name, spec.origin, self._coverage)
            return spec
        return None


class _Loader(SourceFileLoader):
    """Executes the marked source of a module."""

    def __init__(self, name: str, path: str, coverage: Coverage) -> None:
        super().__init__(name, path)
        self._coverage = coverage

    def exec_module(self, module: ModuleType) -> None:
        if not self._coverage.run(module, self.path, self.get_data(self.path)):
            super().exec_module(module)


def _set_marks(ran: list[int]) -> list[int]:
    """Return the marks that ran."""
    return [mark for mark, has_run in enumerate(ran) if has_run]


def learn(folder: Path, spec: SubjectSpec) -> None:
    """Mark the files that a rank has noted, so that ranks that are forked later need not.

    Args:
        folder: the folder of that rank.
        spec: the subject.
    """
    try:
        noted = json.loads((folder / COVERAGE).read_text(encoding="utf-8"))
        paths = [str(path) for path in noted["files"]]
        roots = {str(root) for root in noted["roots"]}
        home = str(noted["home"]) if noted["reason"] else ""
    except (OSError, ValueError, KeyError, TypeError):
        return
    # A target may be imported from a package that it does not name.
    if os.path.isfile(home) and not _is_foreign(home, ()):
        roots.add(_top_folder(home))
    _ROOTS.setdefault(spec, set()).update(roots)
    for path in paths:
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            _marked_code(path, Path(path).read_bytes())


def keep_marked_code(folder: Path) -> None:
    """Keep marked code in ``folder`` from now on."""
    with contextlib.suppress(OSError):
        folder.mkdir()
        _KEPT[:] = [folder]


def _marked_code(path: str, source: bytes) -> tuple[CodeType, int]:
    key = (path, sha256(source))
    if key not in _MARKED:
        files = [folder / sha256(repr(key).encode()) for folder in _KEPT]
        _MARKED[key] = _read_code(files) or _write_code(files, *_mark(path, source))
    return _MARKED[key]


def _mark(path: str, source: bytes) -> tuple[CodeType, int]:
    tree, count = marked(source)
    with warnings.catch_warnings():
        # Python itself warns when the source is imported without marks.
        warnings.simplefilter("ignore", SyntaxWarning)
        return compile(tree, path, "exec", dont_inherit=True), count


def _read_code(files: Iterable[Path]) -> tuple[CodeType, int] | None:
    for file in files:
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            code, count = marshal.loads(file.read_bytes())
            return code, count
    return None


def _write_code(files: Iterable[Path], code: CodeType, count: int) -> tuple[CodeType, int]:
    for file in files:
        temporary = file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            temporary.write_bytes(marshal.dumps((code, count)))
            os.replace(temporary, file)
    return code, count


def _modules(spec: SubjectSpec) -> list[str]:
    """Return the modules that the strings of a subject name."""
    targets = [spec.hook, spec.setup, spec.target]
    if spec.state and spec.state not in CONTEXT_NAMES:
        targets.append(spec.state)
    return [parse_target(text, "").module for text in targets if text]


def _roots(spec: SubjectSpec) -> set[str]:
    """Return the beginnings of the paths of a subject's own files."""
    tops = {module.partition(".")[0] for module in _modules(spec)}
    roots = set()
    for top in _with_distribution(tops):
        roots |= set(_roots_of(top))
    return roots


def _with_distribution(tops: Iterable[str]) -> set[str]:
    """Return names of packages, and those of the other packages of their distributions."""
    found = set(tops)
    if all(_lies_in_project(top) for top in found):
        # Reading the metadata of all distributions takes a tenth of a second.
        return found
    packages = importlib.metadata.packages_distributions()
    own = {name for top in found for name in packages.get(top, ())}
    return found | {top for top, names in packages.items() if own & set(names)}


def _lies_in_project(top: str) -> bool:
    return not any(_is_installed(root) for root in _roots_of(top))


@functools.cache
def _roots_of(top: str) -> tuple[str, ...]:
    """Return the folders of a package, or the folder of a module without a package."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return ()
    if spec is None:
        return ()
    if spec.submodule_search_locations is not None:
        return tuple(os.path.join(folder, "") for folder in spec.submodule_search_locations)
    if not spec.origin or not spec.origin.endswith(".py"):
        return ()
    if _is_installed(spec.origin):
        return (spec.origin,)
    return (os.path.join(os.path.dirname(spec.origin), ""),)


def _top_folder(path: str) -> str:
    """Return the folder of the outermost package that holds a file, or the file itself."""
    found = path
    folder = os.path.dirname(path)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        found = os.path.join(folder, "")
        folder = os.path.dirname(folder)
    return found


def _is_installed(path: str) -> bool:
    return any(path.startswith(folder) for folder in _installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of installed packages and of the standard library."""
    named = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = {*named, *site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.join(folder, "") for folder in folders if folder)


@functools.cache
def _folders_of_others() -> tuple[tuple[str, str], str]:
    """Return the folders of torch and the kit, and the folder of the standard library."""
    torch = os.path.dirname(str(sys.modules["torch"].__file__))
    standard = str(sysconfig.get_path("stdlib"))
    return (os.path.join(torch, ""), os.path.join(_KIT, "")), os.path.join(standard, "")


def _is_foreign(path: str, roots: tuple[str, ...]) -> bool:
    """Whether a file belongs to Python, torch, the kit, or a package inside a project's folder."""
    torch_and_kit, standard = _folders_of_others()
    if path.startswith(torch_and_kit):
        return True
    is_package = "site-packages" in path or "dist-packages" in path
    if path.startswith(standard) and not is_package:
        return True
    # A virtual environment may lie in the folder of a project.
    return is_package and not any(_is_installed(root) for root in roots) and bool(roots)


def _code_of(function: Any) -> CodeType | None:
    """Return the code behind a callable, or None if no Python code is found."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.ismethod(function):
        function = function.__func__
    function = _unwrapped(function)
    if inspect.isclass(function):
        return code_of_class(function)
    code = getattr(function, "__code__", None)
    if code is None and callable(function):
        code = getattr(_unwrapped(type(function).__call__), "__code__", None)
    return code if isinstance(code, CodeType) else None


def code_of_class(found: type) -> CodeType | None:
    """Return the code of any method that a class itself defines.

    torch.optim.Optimizer wraps the ``step`` of a class when the first object is made.
    """
    for value in vars(found).values():
        method = getattr(value, "__func__", value)
        code = getattr(_unwrapped(method), "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def _unwrapped(function: Any) -> Any:
    """Return the function behind decorators such as contextlib.contextmanager."""
    if callable(function):
        with contextlib.suppress(ValueError):
            return inspect.unwrap(function)
    return function
