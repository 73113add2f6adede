"""Answers questions from documents: an embedder finds them, a reranker orders them, a model for text answers.

    python examples/rag.py                       # starts Millrace with three real models (about 260 MB of downloads)
    python examples/rag.py --url http://127.0.0.1:8000 "Who built the mill?"
    python examples/rag.py --compare             # each question four times: with a cold prefix cache, with a warm one,
                                                 # and with its passages marked as documents, in two orders

Every answer ends with its sources. The passages stand before the question in the prompt, best last, so questions about
the same passages share a prefix and the second one skips most of its prefill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODELS = ("smollm2", "minilm", "reranker")
START_S = 900.0
DOCUMENTS = {
    "mill.txt": "The old mill at Harwell was built in 1742 by the carpenter Thomas Reed. Its wheel has a diameter of"
    " six metres and turns eight times a minute.",
    "race.txt": "A millrace is the narrow channel that leads water from the river to the wheel. At Harwell it is 120"
    " metres long and lined with oak.",
    "bakery.txt": "The bakery in Harwell opens at six in the morning. It sells rye bread on Mondays and Thursdays.",
    "school.txt": "The village school has 84 pupils in four classes. Its head teacher is Anna Fields.",
    "bridge.txt": "The stone bridge across the river was finished in 1810, after a flood had destroyed the wooden one.",
    "museum.txt": "The museum in the old mill is open from April to October. A ticket costs four pounds.",
}
QUESTIONS = ("Who built the old mill, and when?", "How long is the millrace?")


@dataclass(frozen=True)
class Passage:
    name: str
    text: str
    score: float


class Server:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path} answered {error.code}: {error.read().decode()}") from None

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextlib.contextmanager
def served(url: str) -> Iterator[Server]:
    """The server at `url`, or one that this program starts and stops."""
    if url:
        yield Server(url)
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "millrace", "serve", *MODELS, "--port", str(port)])
    server, end = Server(f"http://127.0.0.1:{port}"), time.monotonic() + START_S
    try:
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("The server did not start; its output above says why.")
            time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Index:
    """The documents' vectors, and a search in two steps: by cosine, then by the reranker."""

    def __init__(self, server: Server, documents: dict[str, str]) -> None:
        self._server, self._names, self._texts = server, list(documents), list(documents.values())
        self._vectors = self._embed(self._texts)

    def search(self, question: str, num_near: int, num_best: int) -> list[Passage]:
        [query] = self._embed([question])
        cosines = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in self._vectors]
        near = sorted(range(len(cosines)), key=lambda index: -cosines[index])[:num_near]
        ranked = self._server.post(
            "/v1/rerank",
            model=MODELS[2],
            query=question,
            documents=[self._texts[index] for index in near],
            top_n=num_best,
        )
        best = [(near[result["index"]], result["relevance_score"]) for result in ranked["results"]]
        return [Passage(self._names[index], self._texts[index], score) for index, score in best]

    def _embed(self, texts: list[str]) -> list[list[float]]:
        return [data["embedding"] for data in self._server.post("/v1/embeddings", model=MODELS[1], input=texts)["data"]]


def ask(server: Server, question: str, passages: list[Passage], salt: str, marks: bool = False) -> dict[str, Any]:
    """`salt`: prompts share their prefixes only with those of the same salt. `marks`: a passage is reused wherever it
    stood before, and the answer is an approximation."""
    texts = [f"[{passage.name}] {passage.text}" for passage in reversed(passages)]
    order = "Answer in one sentence from these passages."
    mark = {"cache": {"type": "document"}}
    parts = [{"type": "text", "text": order}, *({"type": "text", "text": text, **mark} for text in texts)]
    return server.post(
        "/v1/chat/completions",
        model=MODELS[0],
        messages=[
            {"role": "system", "content": parts if marks else "\n\n".join([order, *texts])},
            {"role": "user", "content": question},
        ],
        max_tokens=48,
        temperature=0,
        cache_salt=salt,
    )


def show(answer: dict[str, Any], passages: list[Passage]) -> None:
    print(answer["choices"][0]["message"]["content"].strip())
    for passage in passages:
        print(f"  source: {passage.name} (relevance {passage.score:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--url", default="", help="a running server; by default one is started")
    parser.add_argument(
        "--compare", action="store_true", help="ask without and with reuse of the prefix, and of passages"
    )
    args = parser.parse_args()
    with served(args.url) as server:
        index = Index(server, DOCUMENTS)
        for number, question in enumerate(args.questions):
            passages = index.search(question, num_near=4, num_best=2)
            print(f"\n{question}", flush=True)
            # A salt that nobody used before shares nothing; the second question with it shares the whole prefix.
            salt = f"rag-{time.time_ns()}-{number}"
            for label in ("cold prefix", "warm prefix", "documents", "reordered documents") if args.compare else ("",):
                shown = passages[::-1] if label.startswith("reordered") else passages
                began = time.perf_counter()
                answer = ask(server, question, shown, salt, marks=label.endswith("documents"))
                elapsed = time.perf_counter() - began
                if label != "warm prefix":
                    show(answer, shown)
                if label:
                    usage = answer["usage"]
                    details = usage.get("prompt_tokens_details") or {}
                    reused = details.get("cached_tokens", 0) + details.get("document_tokens", 0)
                    print(f"  {label}: {reused} of {usage['prompt_tokens']} tokens reused, {elapsed:.2f} s")


if __name__ == "__main__":
    main()
