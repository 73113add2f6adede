"""Compiling in threads: each grammar once, within bounds, errors as sentences."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest
from helpers.served import command_line

from millrace.errors import BadRequest, Overloaded
from millrace.params.grammar import MAX_GRAMMAR_BYTES, Grammar
from millrace.text.grammar import compiler as compiler_module
from millrace.text.grammar.check import GrammarCheck
from millrace.text.grammar.check_pool import CheckPool
from millrace.text.grammar.compiler import GrammarCompiler, GrammarError, Unusable
from millrace.text.grammar.problems import sentence_of

CHECK = GrammarCheck()
SLOW = Grammar("json_schema", '{"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}')
"""Two multiples in one number: their least common multiple has a state for each remainder."""


def numbered(number: int, size: int = 0) -> Grammar:
    return Grammar("json_schema", f'{{"const": {number}}}'.ljust(size))


def length_of(grammar: Grammar) -> int:
    return len(grammar.source)


def test_each_grammar_is_compiled_once() -> None:
    compiler = GrammarCompiler(length_of)
    results = [compiler.submit(numbered(index % 3)).result(60) for index in range(9)]
    assert results == [12] * 9
    assert (compiler.num_compiled, compiler.num_hits) == (3, 6)
    compiler.close()


def test_scopes_share_nothing() -> None:
    compiler = GrammarCompiler(length_of)
    for scope in ("a", "b", "a"):
        compiler.submit(numbered(1), scope).result(60)
    assert (compiler.num_compiled, compiler.num_hits) == (2, 1)
    compiler.close()


@pytest.mark.parametrize(("limits", "size"), [({"max_cached": 2}, 0), ({"max_cached_bytes": 250}, 100)])
def test_the_least_recently_used_is_forgotten(
    limits: dict[str, int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "resident_bytes", lambda: 0)  # other tests' threads use memory too
    compiler = GrammarCompiler(length_of, **limits)
    for number in (1, 2, 1, 3):  # 2 is the least recently used when 3 comes
        compiler.submit(numbered(number, size)).result(60)
    assert compiler.num_compiled == 3
    compiler.submit(numbered(1, size)).result(60)
    assert compiler.num_compiled == 3
    compiler.submit(numbered(2, size)).result(60)
    assert compiler.num_compiled == 4
    compiler.close()


def test_a_wrong_grammar_is_remembered_and_a_failure_is_not() -> None:
    calls = []

    def build(grammar: Grammar) -> None:
        calls.append(grammar)
        if grammar == numbered(1):
            raise GrammarError("It is wrong.")
        raise OSError("the disk is gone")

    compiler = GrammarCompiler(build)
    assert [compiler.submit(numbered(1)).result(60) for _ in range(2)] == [Unusable("It is wrong.")] * 2
    assert len(calls) == 1
    for _ in range(2):
        assert isinstance(compiler.submit(numbered(2)).exception(60), OSError)
    assert len(calls) == 3
    compiler.close()


def test_too_many_waiting_grammars_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_PENDING", 3)
    go_on = threading.Event()
    compiler = GrammarCompiler(lambda grammar: go_on.wait(60))
    waiting = [compiler.submit(numbered(number)) for number in range(3)]
    assert compiler.submit(numbered(0)) is waiting[0]
    with pytest.raises(Overloaded, match="3 grammars"):
        compiler.submit(numbered(3))
    go_on.set()
    assert all(future.result(60) for future in waiting)
    assert compiler.submit(numbered(3)).result(60)
    compiler.close()


def test_a_tenant_delays_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with many slow grammars leaves a thread to others, who take turns, and cannot fill the queue."""
    monkeypatch.setattr(compiler_module, "MAX_PENDING_PER_SCOPE", 3)
    go_on, is_busy, begun = threading.Event(), threading.Event(), []

    def build(grammar: Grammar) -> bool:
        begun.append(grammar)
        if not grammar.source.startswith('{"const": 1'):
            return True
        is_busy.set()
        return go_on.wait(60)

    compiler = GrammarCompiler(build)
    slow = [compiler.submit(numbered(10 + number), "hostile") for number in range(3)]
    with pytest.raises(Overloaded, match="Of yours, 3 grammars"):
        compiler.submit(numbered(19), "hostile")
    assert is_busy.wait(60)
    for number in range(4):
        assert compiler.submit(numbered(number + 20), "a").result(60)
        assert compiler.submit(numbered(number + 20), "b").result(60)
    assert begun[0] == numbered(10)
    assert numbered(11) not in begun
    go_on.set()
    assert all(future.result(60) for future in slow)
    compiler.close()


def test_scopes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "NUM_THREADS", 1)
    go_on, begun = threading.Event(), []

    def build(grammar: Grammar) -> bool:
        begun.append(grammar.source[10])
        return go_on.wait(60)

    compiler = GrammarCompiler(build)
    asked = ((0, ""), (1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "c"), (6, "b"))
    futures = [compiler.submit(numbered(number), scope) for number, scope in asked]
    go_on.set()
    assert all(future.result(60) for future in futures)
    assert begun == ["0", "1", "4", "5", "2", "6", "3"]
    compiler.close()


def test_a_grammar_that_takes_much_memory_is_forgotten_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [0]

    def build(grammar: Grammar) -> int:
        used[0] += 100_000 if "7" in grammar.source else 0
        return used[0]

    monkeypatch.setattr(compiler_module, "resident_bytes", lambda: used[0])
    compiler = GrammarCompiler(build, max_cached_bytes=500)
    compiler.submit(numbered(1)).result(60)
    compiler.submit(numbered(7)).result(60)
    compiler.submit(numbered(2)).result(60)
    assert compiler.num_compiled == 3
    compiler.submit(numbered(7)).result(60)
    assert compiler.num_compiled == 4
    compiler.close()


def test_a_large_source_is_refused() -> None:
    Grammar("json_schema", "é" * (MAX_GRAMMAR_BYTES // 2))
    with pytest.raises(BadRequest, match=str(MAX_GRAMMAR_BYTES + 1)):
        Grammar("json_schema", "é" * (MAX_GRAMMAR_BYTES // 2) + "x")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"if": {}, "then": {}}', "The schema uses 'if', 'then', which is not supported; remove it."),
        ('{"format": "iri", "type": "string"}', "the format 'iri', which is not supported"),
        (
            '{"$ref": "#/$defs/x", "$defs": {"x": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}}',
            "may overlap (at #/$defs/x), which is not supported; use 'anyOf'.",
        ),
        ('{"const": 1e999}', "Out of range float"),
        ("{", "is not a JSON object"),
        ("null", "is not a JSON object"),
    ],
)
def test_errors_are_sentences(schema: str, said: str) -> None:
    with pytest.raises(GrammarError) as raised:
        CHECK.check(Grammar("json_schema", schema))
    assert said in str(raised.value)
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "integer", "format": "int64"}',
        '{"type": ["number", "null"], "format": "date"}',
        '{"type": "object", "properties": {"p": {"type": "string", "format": "password"}, "q": {"format": "path"}}}',
    ],
)
def test_formats_that_json_schema_does_not_define_are_labels(schema: str) -> None:
    CHECK.check(Grammar("json_schema", schema))


def test_a_reference_without_its_hash() -> None:
    CHECK.check(Grammar("json_schema", '{"items": {"$ref": "/$defs/x"}, "$defs": {"x": {"type": "string"}}}'))
    with pytest.raises(GrammarError, match="y"):
        CHECK.check(Grammar("json_schema", '{"items": {"$ref": "/$defs/y"}, "$defs": {"x": {"type": "string"}}}'))


def test_an_unknown_type_is_answered_with_those_there_are() -> None:
    with pytest.raises(GrammarError, match="has the type 'objekt'.*'integer'"):
        CHECK.check(Grammar("json_schema", '{"type": "array", "items": {"type": "objekt"}}'))


def test_a_long_error_is_cut() -> None:
    assert len(sentence_of("x" * 5000, "schema")) < 400


@pytest.mark.live
def test_a_grammar_that_takes_too_long_costs_only_its_sender() -> None:
    pool = CheckPool(limit_s=60.0)  # The process itself ends after some CPU time.
    compiler = GrammarCompiler(pool, on_close=pool.close)
    slow = compiler.submit(SLOW)
    quick = compiler.submit(Grammar("json_schema", '{"type": "integer"}'))
    wrong = compiler.submit(Grammar("json_schema", '{"not": {}}'))
    assert quick.result(60) is None
    assert wrong.result(60) == Unusable("The schema uses 'not', which is not supported; remove it.")
    refused = slow.result(60)
    assert isinstance(refused, Unusable)
    assert "too much time or memory" in refused.message
    assert compiler.submit(Grammar("choice", '["a"]')).result(60) is None
    compiler.close()


@pytest.mark.live
def test_a_check_that_does_not_answer_in_time_is_refused() -> None:
    pool = CheckPool(limit_s=0.0)
    with pytest.raises(GrammarError, match="too much time or memory"):
        pool(numbered(1))
    pool.close()


@pytest.mark.live
def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    pool, others = CheckPool(limit_s=60.0), check_processes()
    pool(Grammar("json_object"))
    [process] = check_processes() - others
    resource.prlimit(process, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    with pytest.raises(GrammarError, match="too much time or memory"):
        pool(Grammar("json_schema", json.dumps({"enum": [f"value {number}" for number in range(7000)]})))
    pool(numbered(1))
    pool.close()


@pytest.mark.live
def test_a_check_process_that_somebody_ended_is_replaced() -> None:
    pool, others = CheckPool(limit_s=60.0), check_processes()
    pool(numbered(1))
    [process] = check_processes() - others
    os.kill(process, signal.SIGTERM)  # As a service manager does with all processes of a server that shall drain.
    pool(numbered(2))
    assert check_processes() - others == {process}
    os.kill(process, signal.SIGKILL)
    pool(numbered(3))
    [process] = check_processes() - others
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as other:
        checked = other.submit(pool, numbered(4))
        os.kill(process, signal.SIGKILL)  # The check has begun, or begins now.
        checked.result(60)
    assert len(check_processes() - others) == 1
    pool.close()
    assert not check_processes() - others


def check_processes() -> set[int]:
    """Ids of this process's children that check grammars and run, without those of servers of other tests."""
    return {child.pid for child in psutil.Process().children() if "check_server" in command_line(child.pid)}


@pytest.mark.live
def test_a_check_whose_client_was_killed_ends() -> None:
    code = "from millrace.text.grammar import check_server; check_server.MAX_CPU_S = 0.3; check_server.main()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(SLOW) + b"\n")
        process.stdin.close()
        assert process.wait(60) == -signal.SIGPROF
