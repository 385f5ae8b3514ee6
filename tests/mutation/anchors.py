"""Where a planted bug stands: a function of the package by its dotted name, and a piece of its syntax tree.

Formatting, comments and what else the file holds do not matter.
"""

from __future__ import annotations

import ast
import builtins
import copy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "relpos_np"


class Bug(NamedTuple):
    """Replace `right`, an expression or statements, by `wrong` in what `at` names, as in "schemes.shaw:Shaw.lower".

    "if x: ..." stands for the head of a statement whatever its body. `shown` is code that fails with the bug and not
    without it, run with the names of `shown.py`.
    """

    name: str
    at: str
    right: str
    wrong: str
    shown: str = ""


class AnchorError(Exception):
    """The code of a bug is gone, or stands there more than once."""


def file_of(bug: Bug) -> str:
    """The file of a bug below the root, with slashes."""
    module = bug.at.partition(":")[0].replace(".", "/")
    is_folder = (ROOT / PACKAGE / module).is_dir()
    return f"{PACKAGE}/{module}/__init__.py" if is_folder else f"{PACKAGE}/{module}.py"


def planted(bug: Bug, root: Path = ROOT) -> str:
    """The source of a bug's file with the bug in it.

    Raises
    ------
    AnchorError
        If there is no such function, or what is to be replaced does not stand in it exactly once.
    """
    path = root / file_of(bug)
    if not path.exists():
        raise AnchorError(f"{bug.name!r}: there is no file {file_of(bug)}{_elsewhere(bug, root)}")
    source = path.read_text(encoding="utf-8")
    name = bug.at.partition(":")[2]
    anchor = _named(ast.parse(source), name.split("."))
    if anchor is None:
        raise AnchorError(f"{bug.name!r}: there is no {name} in {file_of(bug)}{_elsewhere(bug, root)}")
    right, wrong = _parsed(bug.right), _parsed(bug.wrong or "pass")
    if isinstance(right, ast.expr) and not isinstance(wrong, ast.expr):
        right = [ast.Expr(right)]
    if _same(right, wrong):
        raise AnchorError(f"{bug.name!r}: nothing is replaced")
    count = sum(1 for _ in _places(anchor, right))
    if count != 1:
        others = "" if count else _elsewhere(bug, root)
        raise AnchorError(f"{bug.name!r}: {bug.right!r} stands {count} times, not once, in {bug.at}{others}")
    holder, field, place = next(_places(anchor, right))
    if unknown := _names(wrong) - _names(anchor) - _names(ast.parse(source).body) - set(dir(builtins)):
        raise AnchorError(f"{bug.name!r}: {bug.at} knows no {', '.join(sorted(unknown))}")
    value = getattr(holder, field)
    if isinstance(place, slice):
        statements = [ast.Expr(wrong)] if isinstance(wrong, ast.expr) else wrong
        if _is_head(statements[0]):
            statements[0].body, statements[0].orelse = value[place][0].body, value[place][0].orelse
        value[place] = statements
    elif place is None:
        setattr(holder, field, wrong)
    else:
        value[place] = wrong
    lines = source.splitlines(keepends=True)
    first = min([anchor.lineno, *(one.lineno for one in getattr(anchor, "decorator_list", []))]) - 1
    # Nested as deeply as it stood: indenting its text would change strings of several lines.
    nested: ast.stmt = anchor
    for _ in range(depth := anchor.col_offset // 4):
        nested = ast.If(ast.Constant(True), [nested], [])
    rewritten = ast.unparse(ast.fix_missing_locations(nested)).split("\n", depth)[depth].lstrip("\n") + "\n"
    changed = "".join([*lines[:first], rewritten, *lines[anchor.end_lineno :]])
    ast.parse(changed)
    return changed


def _parsed(code: str) -> ast.expr | list[ast.stmt]:
    """An expression, or else statements."""
    try:
        return ast.parse(code.strip(), mode="eval").body
    except SyntaxError:
        return ast.parse(textwrap.dedent(code)).body


def _names(code: ast.AST | list[ast.stmt]) -> set[str]:
    """Names that code reads or binds; of a list of statements, what they bind."""
    if isinstance(code, ast.AST):
        nodes = list(ast.walk(code))
        found = {node.id for node in nodes if isinstance(node, ast.Name)}
        return found | {node.arg for node in nodes if isinstance(node, ast.arg)}
    found = set()
    for node in code:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        else:
            found |= _names(node)
    return found


def _is_head(statement: ast.stmt) -> TypeGuard[ast.If | ast.For | ast.While]:
    """Whether its body is "..."."""
    return isinstance(statement, ast.If | ast.For | ast.While) and ast.unparse(statement.body) == "..."


def _dump(node: ast.AST, head: bool = False) -> str:
    """The same for a name that is read and one that is written to; `head` leaves out the body of a statement."""
    if head and isinstance(node, ast.If | ast.For | ast.While):
        node = copy.copy(node)
        node.body = node.orelse = []
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")


def _same(a: ast.expr | list[ast.stmt], b: ast.expr | list[ast.stmt]) -> bool:
    dumps = [[_dump(one) for one in (x if isinstance(x, list) else [x])] for x in (a, b)]
    return dumps[0] == dumps[1]


def _named(tree: ast.AST, names: list[str]) -> ast.stmt | None:
    """A function, a class or an assignment below a node, also inside `if` and `with`."""
    found = None
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt):
            continue
        own: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own = [target.id for target in targets if isinstance(target, ast.Name)]
        if names[0] in own:
            found = _named(node, names[1:]) if names[1:] else node
        elif not own:
            found = _named(node, names) or found
    return found


def _places(tree: ast.AST, right: ast.expr | list[ast.stmt]) -> Iterator[tuple[ast.AST, str, int | slice | None]]:
    """Where an expression or a run of statements stands: the node that holds it, its field, and the place in a list."""
    head = isinstance(right, list) and _is_head(right[0])
    wanted = _dump(right) if isinstance(right, ast.expr) else [_dump(one, head) for one in right]
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(wanted, str):
                items = [(None, value)] if isinstance(value, ast.expr) else []
                items += list(enumerate(value)) if isinstance(value, list) else []
                yield from ((node, field, n) for n, one in items if isinstance(one, ast.expr) and _dump(one) == wanted)
            elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                dumps = [_dump(one, head) for one in value]
                for n in range(len(dumps) - len(wanted) + 1):
                    if dumps[n : n + len(wanted)] == wanted:
                        yield node, field, slice(n, n + len(wanted))


def _elsewhere(bug: Bug, root: Path) -> str:
    """Which other functions hold what is to be replaced: code moves more often than it goes."""
    right = _parsed(bug.right)
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        module = path.relative_to(root / PACKAGE).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
        for name, node in _functions(ast.parse(path.read_text(encoding="utf-8"))):
            if any(True for _ in _places(node, right)):
                found.append(f"{module}:{name}")
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"; it stands in {', '.join(found[:4])}{more}" if found else "; it stands nowhere else either"


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions, not those inside other functions, with their dotted names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        else:
            yield from _functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)
