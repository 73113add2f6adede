"""A process that checks grammars: `python -m millrace.text.grammar.check_server`.

Each line on standard input is a grammar in JSON. The reply is a line: what is wrong with it, or null. A grammar that
takes too much memory or CPU time ends this process; its client ends it when one takes too long. It exits when its
input has ended.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from pathlib import Path

import msgspec

from millrace.params.grammar import Grammar
from millrace.text.grammar.check import GrammarCheck
from millrace.text.grammar.compiler import GrammarError

MAX_BYTES = 512 << 20
"""Memory for one grammar, beyond what the process takes for itself."""
MAX_CPU_S = 2.0
"""CPU time for one grammar; the largest real ones take a tenth of a second. Others wait behind it."""


def main() -> None:
    for one in (signal.SIGINT, signal.SIGTERM):  # For the server, which answers what it has begun, then ends this.
        signal.signal(one, signal.SIG_IGN)
    check = GrammarCheck()
    check.check(Grammar("json_object"))
    _limit_memory()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # Ends the process, also if its client was killed.
        problem = _problem(check, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(problem) + b"\n")
        sys.stdout.buffer.flush()


def _problem(check: GrammarCheck, line: bytes) -> str | None:
    try:
        check.check(msgspec.json.decode(line, type=Grammar))
    except GrammarError as error:
        return str(error)
    return None


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):  # Other systems than Linux have no such file, and no limit.
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = num_pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
