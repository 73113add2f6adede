"""Routing decisions, without a network."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from millrace.errors import ConfigError
from millrace.gateway.fleet import Fleet, NoReplica
from millrace.gateway.routing.block_keys import block_keys
from millrace.gateway.routing.candidates import CHUNK_BYTES, CHUNK_TOKENS, Asked, Candidate, Moment
from millrace.gateway.routing.decisions import Decision, DecisionLog, Outcome, read_log
from millrace.gateway.routing.policies import POLICIES, policy_named
from millrace.gateway.routing.prefix_map import PrefixMap, chain_of
from millrace.gateway.routing.replay import replay_log
from millrace.gateway.routing.request_facts import facts_of
from millrace.gateway.settings import (
    GatewaySettings,
    ReplicaSettings,
    gateway_settings,
    parse_replicas,
    read_fleet,
    replica_name,
)
from millrace.plan.kv.block_hash import block_hash, root_hash

ASKED = Asked("id", "m", prompt_tokens=1000, output_tokens=100)


def three(**changes: dict[str, float | int | str | bool]) -> tuple[Candidate, ...]:
    return tuple(msgspec.structs.replace(Candidate(name), **changes.get(name, {})) for name in ("a", "b", "c"))


def chosen(policy: str, candidates: tuple[Candidate, ...], asked: Asked = ASKED, **moment: float | str) -> str:
    return policy_named(policy).choose(asked, candidates, Moment(**moment)).replica  # type: ignore[arg-type]


def test_round_robin_takes_turns() -> None:
    assert [chosen("round-robin", three(), turn=turn) for turn in range(4)] == ["a", "b", "c", "a"]


def test_least_tokens_counts_weight() -> None:
    loads = {"a": {"outstanding_tokens": 300}, "b": {"outstanding_tokens": 500, "weight": 2.0}}
    assert chosen("least-tokens", three(**loads, c={"outstanding_tokens": 301})) == "b"


def test_equal_replicas_take_turns() -> None:
    assert {chosen("least-tokens", three(), turn=turn) for turn in range(3)} == {"a", "b", "c"}


def test_power_of_two_never_takes_the_busiest_and_draws_every_pair() -> None:
    candidates = three(a={"outstanding_tokens": 9}, b={"outstanding_tokens": 5})
    seen = Counter(chosen("power-of-two", candidates, draw=draw / 60) for draw in range(60))
    assert seen == {"c": 40, "b": 20}


def test_weighted_follows_the_weights() -> None:
    candidates = three(a={"weight": 2.0})
    assert Counter(chosen("weighted", candidates, draw=draw / 40) for draw in range(40)) == {"a": 20, "b": 10, "c": 10}


def test_prefix_weighs_saved_tokens_against_load() -> None:
    near = three(b={"matched_tokens": 900, "outstanding_tokens": 800})
    assert chosen("prefix", near) == "b"
    busy = three(b={"matched_tokens": 900, "outstanding_tokens": 1900})
    assert chosen("prefix", busy) != "b", "a popular prefix spreads"


def test_fetched_tokens_cost_what_could_be_computed_meanwhile() -> None:
    def candidates(fetch: int, speed: float) -> tuple[Candidate, ...]:
        holder = {"matched_tokens": 900, "outstanding_tokens": 500, "tokens_per_s": 1000.0}
        idle = {"fetch_tokens": fetch, "fetch_tokens_per_s": speed, "tokens_per_s": 1000.0}
        return three(a=holder, b=idle, c={"outstanding_tokens": 9000, "tokens_per_s": 1000.0})

    for policy in ("prefix", "least-time"):
        assert chosen(policy, candidates(0, 0.0)) == "a"
        assert chosen(policy, candidates(900, 0.0)) == "a", "nobody knows what a fetch costs there"
        assert chosen(policy, candidates(900, 10_000.0)) == "b"
        assert chosen(policy, candidates(900, 1100.0)) == "a", "waiting is cheaper"
    slow = candidates(900, 10.0)[1]
    assert slow.missing_work(1000, 2) == 2000, "never more than computing"
    assert candidates(5000, 10_000.0)[1].missing_work(1000, 2) == 100


def test_session_stays_and_moves_little() -> None:
    sessions = [msgspec.structs.replace(ASKED, session=str(number)) for number in range(200)]
    before = [chosen("session", three(), asked) for asked in sessions]
    assert before == [chosen("session", three(), asked, turn=5) for asked in sessions]
    after = [chosen("session", three()[:2], asked) for asked in sessions]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "c")
    assert set(before) == {"a", "b", "c"}


def test_model_prefers_where_it_is_loaded() -> None:
    candidates = three(a={"has_model": False}, b={"has_model": False}, c={"outstanding_tokens": 99})
    assert chosen("model", candidates) == "c"


def test_nearest_spills_when_it_is_busy() -> None:
    candidates = three(a={"region": "eu", "outstanding_tokens": 4000}, b={"region": "us"})
    assert chosen("nearest", candidates, region="eu") == "a"
    busy = three(a={"region": "eu", "outstanding_tokens": 40_000}, b={"region": "us"}, c={"outstanding_tokens": 1})
    assert chosen("nearest", busy, region="eu") == "b"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_decision_is_pure_and_explained(policy: str) -> None:
    candidates = three(a={"outstanding_tokens": 5}, b={"matched_tokens": 64})
    asked = msgspec.structs.replace(ASKED, session="s")
    one, other = (policy_named(policy).choose(asked, candidates, Moment(3, 0.4, "eu")) for _ in range(2))
    assert one == other
    assert one.reason


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'best'.*round-robin"):
        policy_named("best")


# ── prefixes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_chains_agree_as_far_as_texts_do() -> None:
    text = bytes(range(256)) * 8
    whole, other = chain_of(text), chain_of(text[: 3 * CHUNK_BYTES] + b"x" * 999)
    assert len(whole) == 8
    assert whole[:3] == other[:3]
    assert not set(whole[3:]) & set(other[3:])
    assert not set(whole) & set(chain_of(text, b"another tenant"))


def test_what_was_sent_is_remembered_and_forgotten() -> None:
    prefixes, chain = PrefixMap(max_chunks=10), chain_of(b"a" * 8 * CHUNK_BYTES)
    prefixes.sent_to("a", chain)
    assert prefixes.matched_tokens("a", chain) == 8 * CHUNK_TOKENS
    assert prefixes.matched_tokens("b", chain) == 0
    prefixes.sent_to("a", chain_of(b"b" * 6 * CHUNK_BYTES))
    assert prefixes.matched_tokens("a", chain) == 0, "the oldest chunks went, and a prefix begins with them"
    prefixes.forget("a")
    assert prefixes.matched_tokens("a", chain_of(b"b" * 6 * CHUNK_BYTES)) == 0


def test_events_correct_the_memory() -> None:
    prefixes, chain = PrefixMap(), chain_of(b"a" * 4 * CHUNK_BYTES)
    keys = [f"{number:016x}" for number in range(16)]
    prefixes.sent_to("a", chain)
    prefixes.learn_keys(chain, 4 * CHUNK_BYTES, 256, keys, 16)
    held = prefixes.follow("a")
    assert held.apply(7, "snapshot", "device", keys)
    assert prefixes.matched_tokens("a", chain) == 4 * CHUNK_TOKENS
    assert held.apply(8, "evicted", "device", keys[8:])
    assert prefixes.matched_tokens("a", chain) == 2 * CHUNK_TOKENS
    assert held.apply(9, "filled", "host", keys[8:12])
    assert prefixes.matched_tokens("a", chain) == 3 * CHUNK_TOKENS, "a block in host memory counts"
    assert held.apply(10, "cleared", "device", [])
    assert prefixes.matched_tokens("a", chain) == 0
    assert not held.apply(12, "filled", "device", keys), "event 11 is missing"


def test_events_show_what_another_gateway_sent() -> None:
    prefixes, chain = PrefixMap(), chain_of(b"a" * 2 * CHUNK_BYTES)
    prefixes.learn_keys(chain, 2 * CHUNK_BYTES, 128, [f"{number}" for number in range(8)], 16)
    prefixes.follow("b").apply(1, "snapshot", "device", [f"{number}" for number in range(8)])
    assert prefixes.matched_tokens("b", chain) == 2 * CHUNK_TOKENS


def test_keys_are_those_of_the_engine() -> None:
    import numpy as np

    tokens = list(range(100, 148))
    expected, parent = [], root_hash(b"")
    for start in range(0, 48, 16):
        parent = block_hash(parent, np.array(tokens[start : start + 16], np.int32).tobytes())
        expected.append(parent.hex()[:16])
    assert block_keys(tokens, 16) == expected
    assert block_keys(tokens[:47], 16) == expected[:2]


# ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def fleet_of(*settings: ReplicaSettings, policy: str = "prefix") -> Fleet:
    fleet = Fleet(GatewaySettings(policy=policy), clock=lambda: 100.0)
    for one in settings:
        fleet.add(one).health.succeeded(100.0)
    return fleet


def asked_for(prompt: str, **fields: object) -> Asked:
    body = msgspec.json.encode({"prompt": prompt, "max_tokens": 10, **fields})
    return facts_of("/v1/completions", body, {}, "id", "", 1000).asked


def test_stampede_of_equal_prompts_goes_together() -> None:
    fleet = fleet_of(*(ReplicaSettings(f"http://{name}:1") for name in "abcd"))
    asked = asked_for("x" * 20_000)
    chosen = [fleet.choose(asked, fleet.decisions.begin("id", ""))[0].name for _ in range(32)]
    assert len(set(chosen)) == 1


def test_what_can_be_fetched_is_known_from_events_and_answers() -> None:
    fleet = fleet_of(ReplicaSettings("http://a:1"), ReplicaSettings("http://b:1"))
    asked = asked_for("x" * CHUNK_BYTES * 10)
    keys = [f"k{number}" for number in range(40)]
    fleet.prefixes.learn_keys(asked.chain, CHUNK_BYTES * 10, CHUNK_TOKENS * 10, keys, 16)
    holder, other = fleet.prefixes.follow("a:1"), fleet.replicas["b:1"]
    fleet.prefixes.follow("b:1").apply(1, "snapshot", "device", [])
    other.load.tokens_per_s = 1000.0

    def fetchable() -> tuple[int, float]:
        record = fleet.decisions.begin("id", "")
        replica, attempt = fleet.choose(asked, record)
        replica.remove(attempt)
        found = record.decisions[0].candidates[1]
        return found.fetch_tokens, found.fetch_tokens_per_s

    holder.apply(1, "snapshot", "host", keys)
    other.has_fetched("fetched: 600 tokens in 0.100 s")
    assert fetchable() == (0, 6000.0), "host memory gives nothing"
    holder.apply(2, "filled", "device", keys)
    assert fetchable() == (CHUNK_TOKENS * 10, 6000.0)
    other.has_fetched("unneeded: nothing")
    other.has_fetched("fetched: 300 tokens in 0.100 s")
    assert fetchable() == (CHUNK_TOKENS * 10, pytest.approx(5100.0))
    other.has_fetched("failed: nothing; no connection")
    assert fetchable() == (0, 0.0)


def test_long_jobs_stay_apart() -> None:
    fleet = fleet_of(ReplicaSettings("http://a:1"), ReplicaSettings("http://b:1", long_jobs=True))
    short, long = asked_for("x"), asked_for("x", max_tokens=5000)
    for _ in range(4):
        assert fleet.choose(short, fleet.decisions.begin("i", ""))[0].name == "a:1"
        assert fleet.choose(long, fleet.decisions.begin("i", ""))[0].name == "b:1"
    assert all(asked_for("x", **fields).is_long for fields in ({"priority": "batch"}, {"service_tier": "flex"}))
    fleet.replicas["a:1"].is_draining = True
    assert fleet.choose(short, fleet.decisions.begin("i", ""))[0].name == "b:1", "better than none"


def test_why_no_replica_is_said() -> None:
    fleet = fleet_of(ReplicaSettings("http://a:1"), ReplicaSettings("http://b:1"))
    fleet.replicas["a:1"].is_draining = True
    fleet.replicas["b:1"].health.eject(100.0, "it burns")
    with pytest.raises(NoReplica, match=r"a:1 drains; b:1 is ejected \(it burns\)"):
        fleet.choose(ASKED, fleet.decisions.begin("i", ""))


def test_decisions_are_logged_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fleet = fleet_of(*(ReplicaSettings(f"http://{name}:1") for name in "abc"), policy="round-robin")
    fleet.decisions = DecisionLog(str(path))
    for number in range(60):
        record = fleet.decisions.begin(f"{number}", "")
        asked = msgspec.structs.replace(asked_for(f"{number % 5}" * 8000), id=f"{number}")
        replica, attempt = fleet.choose(asked, record)
        replica.remove(attempt)
        fleet.decisions.ended(record, Outcome(f"{number}", replica.name, "200", 0.0, 0.0))
    fleet.decisions.close()
    with path.open("ab") as file:
        file.write(b'{"at": 1')  # What a kill leaves.
    entries = list(read_log(path))
    assert sum(isinstance(one, Decision) for one in entries) == 60
    results = {one.policy: one for one in replay_log(path)}
    assert results["round-robin"].num_moved == 0, "the same policy decides the same"
    assert results["prefix"].hit_rate > 1.1 * results["round-robin"].hit_rate
    assert all(one.num_requests == 60 for one in results.values())


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_replicas_by_kind() -> None:
    one, other = parse_replicas("http://a:1/, vllm=http://b:2")
    assert (one.url, one.kind, other.url, other.kind) == ("http://a:1", "millrace", "http://b:2", "vllm")
    for wrong in ("ftp://a", "a:1", "sglang=http://a:1"):
        with pytest.raises(ConfigError):
            parse_replicas(wrong)


def test_passwords_in_urls_are_not_shown() -> None:
    (one,) = parse_replicas("http://user:secret@a:1")
    assert (one.url, replica_name(one)) == ("http://user:secret@a:1", "a:1")
    for wrong in ("ftp://user:secret@a", "user:secret@a", "http://user:se/secret@a", "http://user:secret@[a"):
        with pytest.raises(ConfigError) as raised:
            parse_replicas(wrong)
        assert "secret" not in raised.value.message


def test_fleet_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[gateway]\npolicy = "session"\n\n[[replicas]]\nurl = "http://a:1"\nweight = 2\n')
    tree, replicas = read_fleet(path)
    assert gateway_settings(tree, {"port": 1}).policy == "session"
    assert replicas[0].weight == 2
    with pytest.raises(ConfigError, match="polcy"):
        gateway_settings({"polcy": "x"}, {})
