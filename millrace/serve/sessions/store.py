"""Sessions in the database. Every function that takes a connection runs inside one transaction."""

from __future__ import annotations

import sqlite3
import time

import msgspec

from millrace.errors import CacheFull, Conflict, NotFound
from millrace.serve.generate.messages import Message
from millrace.serve.http.ids import new_id
from millrace.serve.http.queries import Page

MAX_SESSIONS = 10_000
"""Of one tenant."""
FULL_RETRY_S = 60.0


class LastTurn(msgspec.Struct):
    """Where the prompt tokens of a turn came from."""

    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    """Of the cached ones: those that were not on the device when the turn arrived."""
    computed_tokens: int
    output_tokens: int
    at: float
    recomputed_tokens: int = 0
    """Of the computed ones: those that an earlier turn had computed."""


class Session(msgspec.Struct, kw_only=True):
    id: str
    model: str
    created_at: float
    used_at: float
    """By the last turn, or renewed."""
    ttl_s: float
    expires_at: float
    priority: int | None = None
    max_bytes: int = 0
    metadata: dict[str, str] = {}
    messages: list[Message] = []
    token_ids: list[int] = []
    """Of the last turn: its prompt and its answer."""
    text: str = ""
    """Of these tokens."""
    turns: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    last_turn: LastTurn | None = None

    @property
    def handle(self) -> str:
        return handle_of(self.id)

    def use(self, ttl_s: float | None = None) -> None:
        """Its time begins again."""
        self.used_at = time.time()
        self.ttl_s = ttl_s or self.ttl_s
        self.expires_at = self.used_at + self.ttl_s


def handle_of(session_id: str) -> str:
    """Name of the handle that keeps its keys and values."""
    return f"session:{session_id}"


def new_session(name: str | None, **fields: object) -> Session:
    session = Session(id=name or new_id("sess_"), created_at=time.time(), used_at=0.0, expires_at=0.0, **fields)  # type: ignore[arg-type]
    session.use()
    return session


_decoder = msgspec.msgpack.Decoder(Session)


def add(database: sqlite3.Connection, session: Session, owner: str) -> None:
    now = time.time()
    [held] = database.execute(
        "SELECT COUNT(*) FROM sessions WHERE owner = ? AND expires_at > ?", (owner, now)
    ).fetchone()
    if held >= MAX_SESSIONS:
        raise CacheFull(
            f"This tenant has {held} sessions, as many as are allowed. Delete one, or wait until one expires.",
            retry_after_s=FULL_RETRY_S,
        )
    database.execute("DELETE FROM sessions WHERE owner = ? AND id = ? AND expires_at <= ?", (owner, session.id, now))
    if database.execute("SELECT 1 FROM sessions WHERE owner = ? AND id = ?", (owner, session.id)).fetchone():
        raise Conflict(
            f"There is a session {session.id!r} already. Continue it, delete it, or choose another id.", param="id"
        )
    database.execute(
        "INSERT INTO sessions (id, owner, expires_at, body) VALUES (?, ?, ?, ?)",
        (session.id, owner, session.expires_at, msgspec.msgpack.encode(session)),
    )


def get(database: sqlite3.Connection, session_id: str, owner: str) -> Session:
    row = database.execute(
        "SELECT body FROM sessions WHERE id = ? AND owner = ? AND expires_at > ?", (session_id, owner, time.time())
    ).fetchone()
    if row is None:
        raise NotFound(
            f"There is no session {session_id[:128]!r}: it was deleted, has expired, or was never made.",
            param="session_id",
        )
    return _decoder.decode(row["body"])


def put(database: sqlite3.Connection, session: Session, owner: str) -> None:
    database.execute(
        "UPDATE sessions SET expires_at = ?, body = ? WHERE id = ? AND owner = ?",
        (session.expires_at, msgspec.msgpack.encode(session), session.id, owner),
    )


def renew(database: sqlite3.Connection, session_id: str, owner: str, ttl_s: float | None) -> Session:
    session = get(database, session_id, owner)
    session.use(ttl_s)
    put(database, session, owner)
    return session


def end_turn(
    database: sqlite3.Connection,
    session_id: str,
    owner: str,
    number: int,
    messages: list[Message],
    token_ids: list[int],
    text: str,
    turn: LastTurn,
) -> None:
    """Keep a turn that began when the session had `number` turns."""
    session = get(database, session_id, owner)
    if session.turns != number:
        raise Conflict(
            f"Another turn of the session {session_id!r} ended meanwhile, so this one is not part of it. Send its turns"
            " one after the other, or fork the session.",
            param="session_id",
        )
    session.messages, session.token_ids, session.text = messages, token_ids, text
    session.turns, session.last_turn = number + 1, turn
    session.hit_tokens += turn.cached_tokens
    session.prompt_tokens += turn.prompt_tokens
    session.use()
    put(database, session, owner)


def fork(
    database: sqlite3.Connection, session_id: str, owner: str, ttl_s: float | None, new_name: str | None
) -> Session:
    session = get(database, session_id, owner)
    made = msgspec.structs.replace(session, id=new_name or new_id("sess_"), created_at=time.time())
    made.use(ttl_s)
    add(database, made, owner)
    return made


def delete(database: sqlite3.Connection, session_id: str, owner: str) -> Session:
    session = get(database, session_id, owner)
    database.execute("DELETE FROM sessions WHERE id = ? AND owner = ?", (session_id, owner))
    return session


def forget(database: sqlite3.Connection, owner: str) -> int:
    """Delete all sessions of this owner. Returns how many there were."""
    return database.execute("DELETE FROM sessions WHERE owner = ?", (owner,)).rowcount


def listing(database: sqlite3.Connection, owner: str, page: Page) -> tuple[list[Session], bool]:
    """The sessions of a page, and whether there are more."""
    order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
    bound, values = "", [owner, time.time()]
    if page.after is not None:
        get(database, page.after, owner)
        bound = f" AND number {beyond} (SELECT number FROM sessions WHERE id = ? AND owner = ?)"
        values += [page.after, owner]
    rows = database.execute(
        f"SELECT body FROM sessions WHERE owner = ? AND expires_at > ?{bound} ORDER BY number {order} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()
    return [_decoder.decode(row["body"]) for row in rows[: page.limit]], len(rows) > page.limit
