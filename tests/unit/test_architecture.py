"""What no import says: where children are started, where SQL stands, what never blocks."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKER = sorted((ROOT / "worker").rglob("*.py"))
MESSAGES = sorted((ROOT / "messages").rglob("*.py"))

_SQL = re.compile(
    r"\b(SELECT\s+.+\s+FROM\b|SELECT\s+\w+\(|INSERT\s+INTO\b|UPDATE\s+\w+\s+SET\b"
    r"|DELETE\s+FROM\b|CREATE\s+(TABLE|INDEX|FUNCTION|DATABASE)\b|ALTER\s+(TABLE|DATABASE)\b"
    r"|DROP\s+(TABLE|INDEX|DATABASE)\b|TRUNCATE\s|LOCK\s+TABLE\b)",
    re.DOTALL,
)
_CHILD_STARTERS = {
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
    "asyncio.subprocess.create_subprocess_exec",
    "asyncio.subprocess.create_subprocess_shell",
    "os.system",
    "os.popen",
    "os.fork",
    "os.forkpty",
    "pty.fork",
    "pty.spawn",
    "concurrent.futures.ProcessPoolExecutor",
}
_CHILD_PREFIXES = ("subprocess.", "multiprocessing.", "os.exec", "os.spawn", "os.posix_spawn")


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{dotted(value)}.{name}"
        case _:
            return ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """The full name behind each name that a module has imported."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                for alias in names:
                    local = alias.asname or alias.name.partition(".")[0]
                    found[local] = alias.name if alias.asname else local
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    found[alias.asname or alias.name] = f"{module}.{alias.name}"
    return found


def calls(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Each call's full name with its line."""
    known = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            first, dot, rest = name.partition(".")
            yield known.get(first, first) + dot + rest, node.lineno


def starts_child(name: str) -> bool:
    return (
        name in _CHILD_STARTERS
        or name.startswith(_CHILD_PREFIXES)
        or name.endswith((".subprocess_exec", ".subprocess_shell"))
    )


@pytest.mark.parametrize("path", WORKER + MESSAGES, ids=name_of)
def test_only_the_process_module_starts_children(path: pathlib.Path) -> None:
    if path == ROOT / "worker" / "process.py":
        return
    assert [(name, line) for name, line in calls(tree_of(path)) if starts_child(name)] == []


def test_the_process_module_never_uses_a_shell() -> None:
    found = {name for name, _ in calls(tree_of(ROOT / "worker" / "process.py"))}
    started = {name for name in found if starts_child(name)}
    assert started
    assert all(name.endswith("subprocess_exec") for name in started)


@pytest.mark.parametrize("path", WORKER, ids=name_of)
def test_nothing_blocks_the_event_loop_by_sleeping(path: pathlib.Path) -> None:
    # What runs in the copier's own process has no event loop to block.
    if path.parent == ROOT / "worker" / "transfer":
        return
    assert [line for name, line in calls(tree_of(path)) if name == "time.sleep"] == []


@pytest.mark.parametrize("path", WORKER + MESSAGES, ids=name_of)
def test_there_is_no_sql_outside_its_folder(path: pathlib.Path) -> None:
    tree = tree_of(path)
    found = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if _SQL.search(node.value)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM jobs",
        "WITH x AS (SELECT 1) SELECT a\nFROM x",
        "SELECT now()",
        "INSERT INTO x VALUES (1)",
        "UPDATE jobs SET a = 1",
        "DELETE FROM jobs",
        "CREATE TABLE x ()",
        'DROP DATABASE IF EXISTS "',
    ],
)
def test_the_search_for_sql_finds_some(text: str) -> None:
    assert _SQL.search(text)


@pytest.mark.parametrize("path", WORKER, ids=name_of)
def test_a_statement_is_run_by_the_store_alone(path: pathlib.Path) -> None:
    if path.is_relative_to(ROOT / "worker" / "store"):
        return
    methods = {
        ".fetch",
        ".fetchrow",
        ".fetchval",
        ".execute",
        ".executemany",
        ".copy_records_to_table",
    }
    known = imported_names(tree_of(path))
    if not any(full.startswith("asyncpg") for full in known.values()):
        return
    assert [
        (name, line)
        for name, line in calls(tree_of(path))
        if name.endswith(tuple(methods)) or name.startswith("asyncpg.connect")
    ] == []


@pytest.mark.parametrize("path", WORKER + MESSAGES, ids=name_of)
def test_a_module_stays_readable_in_one_sitting(path: pathlib.Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 450


@pytest.mark.parametrize("path", WORKER + MESSAGES, ids=name_of)
def test_a_module_says_what_it_is_for(path: pathlib.Path) -> None:
    assert ast.get_docstring(tree_of(path))


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in WORKER
        if path.parent.name in ("drivers", "targets", "connectors", "transfer", "storage_daemon")
    ],
    ids=name_of,
)
def test_what_touches_storage_knows_errors_and_redaction_alone(path: pathlib.Path) -> None:
    used = {
        full
        for full in imported_names(tree_of(path)).values()
        if full.partition(".")[0] in ("messages", "sql", "asyncpg", "aio_pika")
    }
    assert used <= {"messages.errors", "messages.redaction"}
