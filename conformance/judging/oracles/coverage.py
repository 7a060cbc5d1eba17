"""Determine which branches of a subject's own files no run took.

A mark that no rank of any run has noted never ran. An arm is untaken if the statement that decides
ran, and the arm did not: of nested arms only the outermost is named. These are counted, and not
named one by one:

at import       arms at the level of a module, such as ``if TYPE_CHECKING`` and ``except
                ImportError``: they depend on the machine, and not on a run;
only raise      arms whose only effect is an exception, such as the validation of arguments, and
                functions that only raise, such as abstract methods;
not used        functions that were never entered, and that no code that ran refers to by name.

A function that was never entered is named once if it is a method of a class with a method that was
entered, if a function that was entered defines it, or if one refers to its name.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.records.source_marks import Arm, Function, Marks, enclosing, marks_of

_LONGEST_SOURCE = 120


@dataclass(frozen=True)
class SourceFile:
    """One of the subject's own files, with the marks that ran in any run.

    Attributes:
        module: the name of the module.
        path: its path on this machine.
        sha256: the digest of its source.
        source: its text.
        ran: the marks that ran after the module was imported.
        at_import: the marks that ran while it was imported.
    """

    module: str
    path: str
    sha256: str
    source: bytes
    ran: frozenset[int]
    at_import: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """The path below the folder that Python imports from."""
        below = self.module.replace(".", "/")
        return f"{below}/__init__.py" if self.path.endswith("__init__.py") else f"{below}.py"


@dataclass(frozen=True)
class Untaken:
    """A branch that no run took.

    Attributes:
        file: the name of the file.
        line: the line of the decision.
        source: its text.
        side: how it never went.
        arm: the arm.
    """

    file: str
    line: int
    source: str
    side: str
    arm: Arm

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source}  ({self.side})"


@dataclass(frozen=True)
class NeverCalled:
    """A function that no run entered."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.function} was never called"


@dataclass
class FileCoverage:
    """The coverage of one file.

    Attributes:
        file: the file.
        marks: the meaning of its marks.
    """

    file: SourceFile
    marks: Marks
    entered: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        functions = self.marks.functions
        ran = self.file.ran
        self.entered = {function.entry for function in functions if function.entry in ran}
        # A factory that was called at import made a function that was entered later; so did the
        # constructor of an object.
        entered = [function for function in functions if function.entry in self.entered]
        around = {outer.entry for function in entered for outer in enclosing(function)}
        owners = {function.owner for function in entered if function.is_method}
        for function in functions:
            is_used = function.entry in around or (function.is_method and function.owner in owners)
            if is_used and function.entry in self.file.at_import:
                self.entered.add(function.entry)

    @property
    def ran(self) -> frozenset[int]:
        """The marks that ran, at import or later."""
        return self.file.ran | self.file.at_import

    @property
    def lines(self) -> int:
        """The number of lines with statements in functions that were entered."""
        return len(self._lines(self.marks.lines))

    @property
    def lines_ran(self) -> int:
        """The number of these lines that ran."""
        return len(self._lines(self.ran))

    def _lines(self, marks: Iterable[int]) -> set[int]:
        """Return the lines of the marks that stand before statements of entered functions."""
        return {
            self.marks.lines[mark]
            for mark in marks
            if self.marks.functions_of_lines.get(mark) in self.entered
        }

    @property
    def branches(self) -> int:
        """The number of branches in functions that were entered."""
        return len(self._used_arms())

    @property
    def branches_taken(self) -> int:
        """The number of these branches that a run took."""
        ran = self.ran
        return sum(arm.mark in ran for arm in self._used_arms())

    def _used_arms(self) -> list[Arm]:
        return [arm for arm in self.marks.arms if arm.function and self.has_entered(arm.function)]

    def has_entered(self, function: Function) -> bool:
        return function.entry in self.entered


@dataclass
class Coverage:
    """The coverage of all files of a subject.

    Attributes:
        files: the files with a function that was entered; the others were only imported.
        imported: the others, which were only imported.
        untaken: the branches that no run took.
        never_called: the functions that no run entered.
        at_import, only_raise, not_used: the numbers of branches without a name, see above.
    """

    files: list[FileCoverage] = field(default_factory=list)
    imported: list[SourceFile] = field(default_factory=list)
    untaken: list[Untaken] = field(default_factory=list)
    never_called: list[NeverCalled] = field(default_factory=list)
    at_import: int = 0
    only_raise: int = 0
    not_used: int = 0

    @property
    def only_imported(self) -> int:
        """The number of files that were only imported."""
        return len(self.imported)

    @property
    def lines(self) -> list[str]:
        """The named branches and functions, one line each."""
        return [*map(str, self.untaken), *map(str, self.never_called)]


def analyse(sources: Iterable[SourceFile]) -> Coverage:
    """Return what no run took.

    Raises:
        SyntaxError, ValueError, RecursionError: a source cannot be parsed.
    """
    found = Coverage()
    for source in sources:
        # A package may import many modules that the subject does not use.
        covered = FileCoverage(source, marks_of(source.source)) if source.ran else None
        if covered and covered.entered:
            found.files.append(covered)
        else:
            found.imported.append(source)
    used_names = names_in_entered_functions(found.files)
    for file in found.files:
        _add_arms(file, found)
        _add_functions(file, used_names, found)
    return found


# --- arms -----------------------------------------------------------------------------------------


def _add_arms(file: FileCoverage, found: Coverage) -> None:
    ran = file.ran
    lines = file.file.source.decode("utf-8", errors="replace").splitlines()
    # Parts of a condition are not named beside the whole of it.
    hidden: list[tuple[int, int]] = []
    # Arms with statements come first: an operand belongs to the statement around it.
    for arm in sorted(file.marks.arms, key=lambda arm: (not arm.body, arm.line)):
        if arm.mark in ran or (arm.reached is not None and arm.reached not in ran):
            continue
        if arm.function is None:
            found.at_import += 1
            continue
        if not file.has_entered(arm.function):
            continue
        if any(begin <= arm.line <= end for begin, end in hidden):
            continue
        end = max(arm.line, *(test.end_lineno or 0 for test in arm.tests), 0)
        hidden.append((arm.line, end))
        if _only_raises(arm.body):
            found.only_raise += 1
            continue
        text = " ".join(line.strip() for line in lines[arm.line - 1 : end])
        if len(text) > _LONGEST_SOURCE:
            text = f"{text[:_LONGEST_SOURCE]}..."
        found.untaken.append(Untaken(file.file.name, arm.line, text, arm.side, arm))
    found.untaken.sort(key=lambda untaken: (untaken.file, untaken.line))


def _only_raises(body: Iterable[ast.stmt]) -> bool:
    """Whether the only effect of some statements is an exception."""
    statements = list(body)
    if not statements:
        return False
    *before, last = statements
    harmless = (ast.Assign, ast.AnnAssign)
    return isinstance(last, ast.Raise) and all(isinstance(one, harmless) for one in before)


# --- functions ------------------------------------------------------------------------------------


def _add_functions(file: FileCoverage, used_names: set[str], found: Coverage) -> None:
    used_classes = {
        function.owner
        for function in file.marks.functions
        if function.is_method and file.has_entered(function)
    }
    for function in file.marks.functions:
        if file.has_entered(function) or _is_inside_one_that_is_named(file, function):
            continue
        if _is_abstract(function.node):
            found.only_raise += 1
        elif _is_relevant(file, function, used_names, used_classes):
            found.never_called.append(NeverCalled(file.file.name, function.line, function.name))
        else:
            found.not_used += 1


def _is_inside_one_that_is_named(file: FileCoverage, function: Function) -> bool:
    """Whether the function around it was never entered either."""
    return function.outer is not None and not file.has_entered(function.outer)


def _is_relevant(
    file: FileCoverage, function: Function, used_names: set[str], used_classes: set[str]
) -> bool:
    if function.is_method:
        return function.owner in used_classes
    if function.outer is not None:
        # A lambda or a function inside an arm that was not taken is named with the arm.
        return True
    return function.name in used_names


def _is_abstract(node: ast.AST) -> bool:
    """Whether a function only raises, or has no statement but its docstring."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return False
    statements = [
        statement
        for statement in body
        if not isinstance(statement, ast.Pass)
        and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    return not statements or _only_raises(statements)


def names_in_entered_functions(files: Iterable[FileCoverage]) -> set[str]:
    """Return the names that occur in functions that were entered."""
    return {
        name
        for file in files
        for function in file.marks.functions
        if file.has_entered(function)
        for name in names_in(function.node)
    }


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names and attributes in a piece of code."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


@dataclass
class Merged:
    """The marks of one file that ran on any rank.

    Attributes:
        module: the name of the module.
        sha256: the digest of its source.
        ran: the marks that ran after it was imported.
        at_import: the marks that ran while it was imported.
    """

    module: str
    sha256: str
    ran: set[int] = field(default_factory=set)
    at_import: set[int] = field(default_factory=set)


def merge(records: Iterable[Mapping[str, Any]]) -> dict[str, Merged]:
    """Return the marks that ran on any rank, by path.

    Args:
        records: the records of ranks (``RankRecord.coverage``).
    """
    merged: dict[str, Merged] = {}
    for record in records:
        for path, entry in record["files"].items():
            kept = merged.setdefault(path, Merged(entry["module"], entry["sha256"]))
            # A file that changed between two runs has other marks: only the first ones count.
            if kept.sha256 == entry["sha256"]:
                kept.ran.update(entry["ran"])
                kept.at_import.update(entry["at_import"])
    return merged
