"""The grammars that ship as examples: what they derive is SQL to SQLite, and Python to Python."""

from __future__ import annotations

import ast
import contextlib
import keyword
import random
import re
import sqlite3
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import numpy as np
import pytest

from structgen.grammar.compiler import Grammar, compile_constraint
from structgen.request import Ebnf
from tests.grammar.derivatives import vocabulary_of

VOCABULARY = vocabulary_of([bytes([byte]) for byte in range(256)])
KEYWORDS = re.compile(rf"\b({'|'.join(each for each in keyword.kwlist if len(each) < 3)})\b")
MOST = 300  # characters of a random text


@cache
def grammar(name: str) -> Grammar:
    text = files("structgen").joinpath(f"examples/grammars/{name}.ebnf").read_text(encoding="utf-8")
    return compile_constraint(Ebnf(text), VOCABULARY)


def derived(name: str, seed: int) -> str | None:
    """A random text that the masks let through; None if it is not whole soon enough."""
    draw = random.Random(seed)
    matcher = grammar(name).matcher()
    row = np.zeros(matcher.words, np.int32)
    text = bytearray()
    while len(text) < MOST:
        if matcher.complete and (matcher.finished or draw.random() < 0.5):
            return text.decode()
        matcher.fill(row)
        allowed = [byte for byte in range(128) if row[byte >> 5] >> (byte & 31) & 1]
        # Signs as likely as letters, and few quotes: names and texts that never end say little.
        signs = [byte for byte in allowed if not chr(byte).isalnum()]
        plain = [byte for byte in signs if chr(byte) not in "'\"" or len(signs) < 5]
        byte = draw.choice(plain if plain and draw.random() < 0.5 else allowed)
        matcher.accept(byte)
        text.append(byte)
    return None


class TestSql:
    @pytest.fixture
    def database(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(":memory:")) as found:
            found.execute("CREATE TABLE users (id, name, age)")
            found.execute("CREATE TABLE orders (id, user_id, price)")
            yield found

    @pytest.mark.parametrize(
        "query",
        [
            "SELECT 1;",
            "SELECT * FROM users LIMIT 10;",
            "SELECT name, age * 2 + 1 AS n FROM users AS u WHERE u.age > 18 AND NOT name LIKE 'a';",
            "SELECT DISTINCT u.name FROM users AS u LEFT JOIN orders AS o ON u.id = o.user_id;",
            "SELECT name, COUNT(*), AVG(age) FROM users GROUP BY name HAVING COUNT(*) > 3;",
            "SELECT id FROM users UNION ALL SELECT id FROM orders ORDER BY id DESC LIMIT 5;",
            "SELECT name FROM users WHERE id IN (SELECT user_id FROM orders WHERE price > 9.5);",
            "SELECT name FROM users WHERE (age IS NOT NULL OR name = 'it''s') AND id NOT IN (1);",
            "SELECT n FROM (SELECT LOWER(name) AS n FROM users) AS u WHERE n BETWEEN 'a' AND 'c';",
            "SELECT name FROM users WHERE EXISTS (SELECT 1 FROM orders WHERE user_id = users.id);",
        ],
    )
    def test_has_the_queries_that_people_write(
        self, query: str, database: sqlite3.Connection
    ) -> None:
        database.execute(query)

        assert grammar("sql").accepts(query)

    @pytest.mark.parametrize(
        "query",
        [
            "SELECT 1",
            "SELECT;",
            "SELECT * FROM;",
            "DROP TABLE users;",
            "SELECT 1; DROP TABLE users;",
            "SELECT name FROM users WHERE;",
            "SELECT 'a\nb';",
            "SELECT (1;",
        ],
    )
    def test_has_nothing_else(self, query: str) -> None:
        assert not grammar("sql").accepts(query)

    def test_derives_nothing_that_sqlite_cannot_read(self, database: sqlite3.Connection) -> None:
        texts = [text for seed in range(40) if (text := derived("sql", seed)) is not None]
        faults = []
        for text in texts:
            try:
                database.execute(f"EXPLAIN {text}")
            except sqlite3.Error as error:
                faults.append(str(error))

        # A name may be a keyword in small letters, which SQLite takes for one.
        syntax = re.compile('(?!near "[a-z])(?=.*(syntax|token|incomplete))')
        assert len(texts) >= 10
        assert [each for each in faults if syntax.match(each)] == []


class TestPython:
    @pytest.mark.parametrize(
        "text",
        [
            "pass\n",
            "x = 1\ny += x ** 2, -3.5\n",
            "def f():\n    return\n",
            'def area(r: float, unit: str = "cm") -> list[float]:\n    return [r * r, 2]\n',
            "for x in items:\n    if not x.done and x.size > 3:\n        total += x.size\n",
            "while True:\n    pass\nelse:\n    x = 'it\\'s'\n",
            "d = {'a': [1, 2], 'b': f(x, key=None)[0].y}\nassert 'a' in d\n",
            "def f(a):\n    if a:\n        return 1\n    else:\n        return [x for x in a]\n",
        ],
    )
    def test_has_the_programs_that_people_write(self, text: str) -> None:
        ast.parse(text)

        assert grammar("python").accepts(text)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "pass",
            "x = \n",
            "if x:\npass\n",
            "if x:\n  pass\n",
            "def f(:\n    pass\n",
            "x = (1\n",
            "import os\n",
            "x = 'a\n",
            "def f():\n    return\n      pass\n",
        ],
    )
    def test_has_nothing_else(self, text: str) -> None:
        assert not grammar("python").accepts(text)

    def test_derives_nothing_that_python_cannot_read(self) -> None:
        texts = [text for seed in range(50) if (text := derived("python", seed)) is not None]
        # A name may be a keyword there, as the grammar says.
        plain = [text for text in texts if not KEYWORDS.search(re.sub(r"(['\"]).*?\1", "", text))]

        assert len(plain) >= 6
        for text in plain:
            ast.parse(text)
