"""House rules that no linter knows. Each returns messages; none means the rule holds.

Run as a script it prints them all and fails if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "sparseengine"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# The neutral method and words that are plain English; the latter count as names in strings only.
NEUTRAL = {"full", "dense", "vanilla"}
ENGLISH = {"random"}


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sizes() -> list[str]:
    """Files of at most 500 lines, functions of at most 60."""
    found = []
    for path in python_files("src", "tests", "scripts", "examples"):
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{_name(path)}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    where = f"{_name(path)}:{node.lineno} {node.name}"
                    found.append(f"{where}: {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def method_names() -> list[str]:
    """No sparse method is named outside methods/: nothing there may depend on which one it is."""
    from sparseengine.methods import METHODS
    from sparseengine.methods.prefill import PATTERNS

    registries = (METHODS, PATTERNS)
    names = {n for r in registries for m in r for n in (m, *r.aliases(m))} - NEUTRAL
    words = re.compile(r"(?<![A-Za-z])(" + "|".join(sorted(names - ENGLISH)) + r")(?![A-Za-z])")
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "methods"):
            continue
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            match = words.search(line.lower())
            if match:
                found.append(f"{_name(path)}:{number}: names the method {match[1]!r}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and node.value in ENGLISH & names:
                found.append(f"{_name(path)}:{node.lineno}: names the method {node.value!r}")
    return found


def environment() -> list[str]:
    """env.py alone reads the process environment."""
    reads = re.compile(r"os\.environ|os\.getenv|from os import .*(environ|getenv)")
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == PACKAGE / "env.py":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if reads.search(line):
                found.append(f"{_name(path)}:{number}: reads the environment; use env.py")
    return found


def blanket_excepts() -> list[str]:
    """No `except:` and no `except Exception` that swallows what it caught."""
    found = []
    for path in python_files("src", "scripts"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ExceptHandler):
                continue
            name = node.type.id if isinstance(node.type, ast.Name) else ""
            is_blanket = node.type is None or name in ("Exception", "BaseException")
            if is_blanket and not any(isinstance(n, ast.Raise) for n in ast.walk(node)):
                found.append(f"{_name(path)}:{node.lineno}: blanket except")
    return found


def environment_names() -> list[str]:
    """At most 12 environment names, each setting an existing parameter or none."""
    from sparseengine.config import BY_PATH
    from sparseengine.env import VARIABLES

    found = [] if len(VARIABLES) <= 12 else [f"{len(VARIABLES)} environment names, at most 12"]
    paths = [v.path for v in VARIABLES if v.path is not None]
    return found + [f"env.py: no parameter {p!r}" for p in paths if p not in BY_PATH]


RULES = (sizes, method_names, environment, blanket_excepts, environment_names)


def main() -> int:
    messages = [message for rule in RULES for message in rule()]
    for message in messages:
        print(message)
    print(f"house rules: {len(RULES)} checked, {len(messages)} broken")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
