"""Further studies: latency against throughput, host tier, KV formats, learned lengths."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from millrace.load.lengths import Lengths
from millrace.load.svg import Line, plot
from millrace.plan.queue.learned_lengths import LearnedLengths
from millrace.plan.request import Request
from millrace.simulate.profile import Profile
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.studies.findings import CHAT, Findings, Study, milliseconds, run_settings, tokens_per_s


def pareto(profile: Profile, seed: int) -> Findings:
    """Every load with every number of rows; the front is what nothing else beats in both."""
    rows: list[tuple[object, ...]] = []
    points: list[tuple[float, float]] = []
    for max_rows in (8, 32, 128):
        for rate in (1.0, 4.0, 16.0):
            requests = replace(CHAT, rate=rate, seconds=6.0, seed=seed).requests()
            done = run_settings(requests, profile, f"max_running={max_rows}", seed)
            points.append((tokens_per_s(done), milliseconds(done, "tpot", 50)))
            rows.append((max_rows, rate, *points[-1], milliseconds(done, "ttft", 99)))
    front = sorted(one for one in points if not any(_beats(other, one) for other in points))
    marked = [(*row, "yes" if point in front else "") for row, point in zip(rows, points, strict=True)]
    lines = [
        Line("front", [x for x, _ in front], [y for _, y in front]),
        Line("all", [x for x, _ in points], [y for _, y in points], dots=True),
    ]
    return Findings(
        ("most rows", "requests/s", "tokens/s", "TPOT p50 ms", "TTFT p99 ms", "on the front"),
        marked,
        [plot("TPOT against throughput", lines, "tokens/s", "ms")],
        f"{len(front)} of {len(points)} settings are on the front, from {front[0][0]:,.0f} tokens/s at"
        f" {front[0][1]:.2f} ms per token to {front[-1][0]:,.0f} tokens/s at {front[-1][1]:.2f} ms.",
    )


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] <= other[1]


def host_tier(profile: Profile, seed: int) -> Findings:
    """One conversation comes back after another has taken the pool."""
    rows: list[tuple[object, ...]] = []
    for length in (2048, 4096, 16384):
        pool = 2 * length
        blocks = length // 512
        requests = [
            SimulatedRequest(5.0 * at, length + 100, 2, tuple(1000 * (at % 3) + block for block in range(blocks + 1)))
            for at in range(9)
        ]
        found = []
        for gib in (0, 16):
            done = run_settings(requests, profile, f"kv_tokens={pool},kv_host_gib={gib},noise=off", seed)
            found.append((float(np.median(done.outcome.values("ttft")[-3:])) * 1e3, done.counts.loaded_tokens))
        rows.append((length, found[0][0], found[1][0], found[1][1], found[0][0] / found[1][0]))
    lengths, columns = [float(str(row[0])) for row in rows], np.array([row[1:] for row in rows], float)
    lines = [
        Line("computed again", lengths, columns[:, 0].tolist()),
        Line("host tier", lengths, columns[:, 1].tolist()),
    ]
    return Findings(
        ("tokens of the prefix", "TTFT ms, computed again", "TTFT ms, host tier", "tokens loaded", "times faster"),
        rows,
        [plot("First token of a prefix that was evicted", lines, "tokens", "ms", log_x=True)],
        f"Loading a prefix of {lengths[-1]:,.0f} tokens gives the first token {columns[-1, 3]:.1f} times as soon as"
        f" computing it again, one of {lengths[0]:,.0f} tokens {columns[0, 3]:.1f} times, at"
        f" {profile.copy_bytes_per_s / 1e9:.0f} GB/s between host and device.",
    )


def kv_formats(profile: Profile, seed: int) -> Findings:
    load = replace(CHAT, rate=6.0, seconds=6.0, prompt=Lengths("lognormal", 3000, 0.6), seed=seed)
    requests, rows = load.requests(), []
    pool = max(8192, profile.kv_tokens // 24)
    for name in ("full", "packed", "fp8"):
        done = run_settings(requests, msgspec.structs.replace(profile, kv_tokens=pool), f"kv_dtype={name}", seed)
        figures = (milliseconds(done, "ttft", 99), milliseconds(done, "tpot", 50), tokens_per_s(done))
        rows.append((name, *figures, done.counts.preemptions))
    first, last = rows[0], rows[-1]
    lines = [Line("TPOT p50", range(len(rows)), [float(str(row[2])) for row in rows])]
    return Findings(
        ("format", "TTFT p99 ms", "TPOT p50 ms", "tokens/s", "preemptions"),
        rows,
        [plot("TPOT by format (full, packed, fp8)", lines, "format", "ms")],
        f"With a pool of {pool:,} tokens in 16 bits, fp8 changes the TTFT p99 from {first[1]:.0f} to {last[1]:.0f} ms"
        f" and the throughput from {first[3]:.0f} to {last[3]:.0f} tokens/s. Priced by bytes alone:"
        " `millrace study kv-quality` measures speed and loss.",
    )


def learned_lengths(profile: Profile, seed: int) -> Findings:
    """Errors on the second half of each workload; every request is predicted before it is learned from."""
    rows = []
    for name, has_pattern in (("two applications of one tenant", True), ("lengths without a pattern", False)):
        lengths, errors, count = LearnedLengths(), [0.0, 0.0], 0
        for number, request in enumerate(_applications(seed, has_pattern=has_pattern)):
            if number >= 400:
                count += 1
                errors[0] += abs(lengths.averages.predict(request) - request.num_output)
                errors[1] += abs(lengths.regressor.predict(request) - request.num_output)
            lengths.observe(request, float(number))
        rows.append((name, errors[0] / count, errors[1] / count, "yes" if lengths.wins else "no"))
    lines = [Line(kind, (0, 1), [float(row[at]) for row in rows]) for at, kind in ((1, "averages"), (2, "regressor"))]
    return Findings(
        ("workload", "error of averages, tokens", "error of the regressor, tokens", "used"),
        rows,
        [plot("Mean error, with and without a pattern", lines, "workload", "tokens")],
        f"Where prompts tell applications apart, the regressor's mean error is {rows[0][2]:.0f} tokens against"
        f" {rows[0][1]:.0f} of the averages; where lengths follow nothing it does not count. The requests are drawn at"
        " random, so this shows the mechanism, not the gain on a service's own traffic.",
    )


def _applications(seed: int, *, has_pattern: bool) -> list[Request]:
    rng, found = np.random.default_rng(seed), []
    for number in range(800):
        application, length = int(rng.integers(2)), int(rng.integers(100, 900))
        own = rng.integers(10, 1000, length)
        request = Request(id=number, prompt=np.append(np.full(48, application), own).astype(np.int32), max_tokens=4000)
        mean = (30 if application else length) if has_pattern else 200
        request.num_output = max(1, int(mean * rng.lognormal(0.0, 0.4)))
        found.append(request)
    return found


MORE_STUDIES = {
    "pareto": Study(
        "Latency against throughput",
        "Which loads and numbers of rows give the best throughput for each time per token?",
        "Poisson arrivals for 6 s at three rates, each with three limits of rows.",
        pareto,
    ),
    "host-tier": Study(
        "What reloading from the host tier costs",
        "Is it faster to load an evicted prefix than to compute it again?",
        "Three conversations take turns in a pool that holds less than two; the last three turns count.",
        host_tier,
    ),
    "kv-formats": Study(
        "KV formats and throughput",
        "What does a smaller KV cache give?",
        "Poisson arrivals, 6 requests/s for 6 s, prompts of 3,000 tokens (median), in a 24th of the profile's pool.",
        kv_formats,
    ),
    "learned-lengths": Study(
        "Learned output lengths",
        "When does a regressor predict output lengths better than averages?",
        "800 requests, the second half of which counts; nothing is priced.",
        learned_lengths,
    ),
}
