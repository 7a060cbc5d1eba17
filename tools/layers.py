"""Print the packages, layers, imports and circles of ``conformance``, and check its contract.

A module imports another at one of three times: when it is loaded (``load``), when a function
runs (``call``), or never, under ``if TYPE_CHECKING`` (``typing``). The contract, see ``FORBIDDEN``,
holds for imports at load and in calls, and there may be no circle of modules at load. Imports
for typing alone are reported and allowed.

``from conformance.x import y`` imports the module ``conformance.x.y`` if there is one, otherwise
``conformance.x``. An import of a module also runs the packages above it; these imports are not
counted, so that ``conformance/__init__.py`` may import from any package.

The layer of a module is the length of the longest chain of imports below it: modules of layer 0
import no other module, and modules of layer n import at least one of layer n - 1. All modules of
a circle share a layer.

The script reads the source and imports none of it. It exits with 1 if the contract is broken.
"""

import argparse
import ast
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT_PACKAGE = "conformance"

_JUDGING_MAY_NOT = frozenset({"ranks", "hosts", "session", "cli"})
# The code that judges knows nothing of the code that runs beside a subject. They share records,
# subjects and scenarios.
FORBIDDEN: Mapping[str, frozenset[str]] = {
    "judging": _JUDGING_MAY_NOT,
    "rules": _JUDGING_MAY_NOT,
    "certificates": _JUDGING_MAY_NOT,
    "ranks": frozenset({"judging", "rules", "hosts", "session"}),
}

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Import:
    """One import of a module of the same package.

    Attributes:
        importer: the module that holds the import.
        imported: the imported module.
        line: the line of the import.
        when: ``load``, ``call`` or ``typing``.
    """

    importer: str
    imported: str
    line: int
    when: str


def list_modules(root: Path, package: str = ROOT_PACKAGE) -> dict[str, Path]:
    """Return the files of a package's modules, by dotted name."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        modules[".".join(parts)] = path
    return modules


def package_of(module: str, packages: Iterable[str]) -> str:
    """Return the package directly below the root that holds a module.

    A module that lies in none of the packages stands for itself. Together these modules would
    form a circle with every package: some are imported by all, others import all.
    """
    parts = module.split(".")
    if len(parts) > 1 and parts[1] in packages:
        return parts[1]
    return parts[-1]


def list_packages(modules: Mapping[str, Path]) -> list[str]:
    """Return the names of the packages directly below the root."""
    found = set()
    for module, path in modules.items():
        parts = module.split(".")
        if len(parts) > 2 or (len(parts) == 2 and path.name == "__init__.py"):
            found.add(parts[1])
    return sorted(found)


def _is_type_checking(test: ast.expr) -> bool:
    if isinstance(test, ast.Attribute):
        return test.attr == "TYPE_CHECKING"
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


class _Finder(ast.NodeVisitor):
    """Collect the imported names of a module, with their lines and times."""

    def __init__(self, module: str, is_package: bool, known: Iterable[str]) -> None:
        self.found: list[tuple[str, int, str]] = []
        self._when = "load"
        self._known = set(known)
        self._package = module.split(".")
        if not is_package:
            self._package.pop()

    def _visit_at(self, when: str, nodes: Iterable[ast.AST]) -> None:
        before = self._when
        # An import in a function below ``if TYPE_CHECKING`` stays an import for typing.
        self._when = before if before == "typing" else when
        for node in nodes:
            self.visit(node)
        self._when = before

    def visit_If(self, node: ast.If) -> None:
        if not _is_type_checking(node.test):
            self.generic_visit(node)
            return
        self._visit_at("typing", node.body)
        for part in node.orelse:
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_at("call", node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_at("call", node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_at("call", [node.body])

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            above = self._package[: len(self._package) - (node.level - 1)]
            base = ".".join([*above, base] if base else above)
        for alias in node.names:
            name = f"{base}.{alias.name}"
            self._add(name if name in self._known else base, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in {"import_module", "__import__"} and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                self._add(argument.value, node.lineno)
        self.generic_visit(node)

    def _add(self, name: str, line: int) -> None:
        if name in self._known:
            self.found.append((name, line, self._when))


def find_imports(
    module: str, source: str, known: Iterable[str], *, is_package: bool = False
) -> list[Import]:
    """Return the imports of known modules in a module's source, in their order."""
    finder = _Finder(module, is_package, known)
    finder.visit(ast.parse(source))
    return [
        Import(module, imported, line, when)
        for imported, line, when in sorted(finder.found, key=lambda found: found[1])
        if imported != module
    ]


def read_imports(modules: Mapping[str, Path]) -> list[Import]:
    """Return the imports between modules, from their files."""
    imports = []
    for module, path in modules.items():
        source = path.read_text(encoding="utf-8")
        is_package = path.name == "__init__.py"
        imports += find_imports(module, source, modules, is_package=is_package)
    return imports


def make_graph(
    nodes: Iterable[str], imports: Iterable[Import], times: Sequence[str] = ("load",)
) -> Graph:
    """Return for each module the modules that it imports at one of some times."""
    graph: Graph = {node: set() for node in nodes}
    for item in imports:
        if item.when in times:
            graph[item.importer].add(item.imported)
    return graph


def merge_packages(graph: Graph, packages: Sequence[str]) -> Graph:
    """Return for each package the other packages that its modules import."""
    merged: Graph = {}
    for module, imported in graph.items():
        package = package_of(module, packages)
        targets = merged.setdefault(package, set())
        targets.update(package_of(target, packages) for target in imported)
    for package, targets in merged.items():
        targets.discard(package)
    return merged


def find_components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, imported ones first (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = len(index)
        lowest[node] = index[node]
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], index[target])
        if lowest[node] == index[node]:
            start = stack.index(node)
            components.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def find_circles(graph: Graph) -> list[list[str]]:
    """Return the components of more than one node."""
    return [component for component in find_components(graph) if len(component) > 1]


def assign_layers(graph: Graph) -> dict[str, int]:
    """Return the layer of each node: the longest chain of imports below it."""
    layers: dict[str, int] = {}
    for component in find_components(graph):
        below = {target for node in component for target in graph[node]} - set(component)
        layer = max((layers[target] + 1 for target in below), default=0)
        layers.update(dict.fromkeys(component, layer))
    return layers


def find_chain(graph: Graph, starts: Iterable[str], targets: Iterable[str]) -> list[str]:
    """Return the shortest chain of imports from one of some modules to one of others, or none."""
    wanted = set(targets)
    seen = set(starts)
    queue = deque([start] for start in sorted(seen))
    while queue:
        chain = queue.popleft()
        if chain[-1] in wanted:
            return chain
        for target in sorted(graph[chain[-1]] - seen):
            seen.add(target)
            queue.append([*chain, target])
    return []


def find_breaches(
    modules: Mapping[str, Path],
    imports: Iterable[Import],
    forbidden: Mapping[str, frozenset[str]] = FORBIDDEN,
) -> list[str]:
    """Return one line for each breach of the contract."""
    imports = list(imports)
    packages = list_packages(modules)
    breaches = [
        f"{ROOT_PACKAGE}/{package}/ does not exist, so its contract is void"
        for package in forbidden
        if package not in packages
    ]
    for item in imports:
        source = package_of(item.importer, packages)
        target = package_of(item.imported, packages)
        if item.when != "typing" and target in forbidden.get(source, frozenset()):
            breaches.append(
                f"{item.importer}:{item.line} imports {item.imported} ({item.when}): {source} may "
                f"not import {target}"
            )
    for circle in find_circles(make_graph(modules, imports)):
        breaches.append(f"circle of {len(circle)} modules: {', '.join(circle)}")
    return breaches


def find_indirect_imports(
    graph: Graph, packages: Sequence[str], forbidden: Mapping[str, frozenset[str]] = FORBIDDEN
) -> list[list[str]]:
    """Return the chains of modules by which one package loads a forbidden one through a third."""
    inside: dict[str, set[str]] = {}
    for module in graph:
        inside.setdefault(package_of(module, packages), set()).add(module)
    chains = []
    for package, targets in forbidden.items():
        for target in sorted(targets):
            chain = find_chain(graph, inside.get(package, ()), inside.get(target, ()))
            if len(chain) > 2:
                chains.append(chain)
    return chains


def _layer_lines(layers: Mapping[str, int]) -> Iterator[str]:
    for layer in sorted(set(layers.values()), reverse=True):
        names = sorted(name for name in layers if layers[name] == layer)
        yield f"  {layer:2}  {', '.join(names)}"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return ["", title, *(list(lines) or ["  none"])]


def describe(modules: Mapping[str, Path], imports: Sequence[Import]) -> str:
    """Return the packages, layers, circles and breaches as text."""
    packages = list_packages(modules)
    at_load = make_graph(modules, imports)
    at_any_time = make_graph(modules, imports, ("load", "call"))
    package_graph = merge_packages(at_load, packages)
    module_layers = assign_layers(at_load)
    package_layers = assign_layers(package_graph)
    load_circles = find_circles(at_load)

    sizes: dict[str, int] = {}
    for module in modules:
        name = package_of(module, packages)
        sizes[name] = sizes.get(name, 0) + 1
    pairs = {
        when: len({(item.importer, item.imported) for item in imports if item.when == when})
        for when in ("load", "call", "typing")
    }

    lines = [
        f"{len(modules)} modules in {len(packages)} packages; "
        f"{len(set(package_layers.values()))} layers of packages, "
        f"{len(set(module_layers.values()))} of modules",
        f"imports between modules: {pairs['load']} at load, {pairs['call']} in calls, "
        f"{pairs['typing']} for typing",
    ]
    lines += _section(
        "Packages, the number of their modules, and the packages that they load:",
        (
            f"  {name:16} {sizes[name]:3}  {', '.join(sorted(package_graph[name]))}"
            for name in sizes
        ),
    )
    lines += _section("Layers of packages:", _layer_lines(package_layers))
    lines += _section("Layers of modules:", _layer_lines(module_layers))
    lines += _section(
        "Circles of packages at load:",
        (f"  {', '.join(circle)}" for circle in find_circles(package_graph)),
    )
    lines += _section(
        "Circles of modules at load:", (f"  {', '.join(circle)}" for circle in load_circles)
    )
    lines += _section(
        "Circles of modules with imports in calls:",
        (f"  {', '.join(c)}" for c in find_circles(at_any_time) if c not in load_circles),
    )
    lines += _section(
        "Imports for typing:",
        (
            f"  {item.importer}:{item.line} imports {item.imported}"
            for item in imports
            if item.when == "typing"
        ),
    )
    lines += _section(
        "Forbidden packages that are loaded through a third (allowed):",
        (f"  {' -> '.join(chain)}" for chain in find_indirect_imports(at_load, packages)),
    )
    lines += _section(
        "Breaches of the contract:", (f"  {line}" for line in find_breaches(modules, imports))
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the layers, or with ``--check`` only the breaches; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Show and check the layers of conformance/.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--check", action="store_true", help="print only breaches of the contract")
    options = parser.parse_args(arguments)

    modules = list_modules(options.root)
    imports = read_imports(modules)
    breaches = find_breaches(modules, imports)
    if options.check:
        for breach in breaches:
            print(breach)
    else:
        print(describe(modules, imports))
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
