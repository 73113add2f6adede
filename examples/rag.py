"""Answers questions from documents: an embedder finds them, a reranker orders them, a model for text answers.

    python examples/rag.py                       # starts Millrace with three real models (about 260 MB of downloads)
    python examples/rag.py --url http://127.0.0.1:8000 "Who built the mill?"
    python examples/rag.py --compare             # each question four times: with a cold prefix cache, with a warm one,
                                                 # and with its passages marked as documents, in two orders; a table
                                                 # of times to the first token follows

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
    " six metres and turns eight times a minute. It ground wheat and barley for eleven villages, and its miller was"
    " paid with every sixteenth sack. In 1871 a steam engine was placed beside the wheel, because the river carried"
    " too little water in dry summers. The engine was sold in 1919, and the wheel has turned alone ever since. The"
    " roof was covered with slate in 1933, after a storm had torn away the thatch. Two of the four pairs of stones"
    " are still in their places.",
    "race.txt": "A millrace is the narrow channel that leads water from the river to the wheel. At Harwell it is 120"
    " metres long and lined with oak. A gate of iron at its upper end keeps branches and ice away, and a second gate"
    " lets the water back into the river when the wheel has to stand still. The boards under water are older than the"
    " mill above them. They are inspected every spring, when the channel is empty for a week, and about one in thirty"
    " is replaced. Trout live in the deep part below the bridge, and children are not allowed to swim there.",
    "bakery.txt": "The bakery in Harwell opens at six in the morning. It sells rye bread on Mondays and Thursdays and"
    " white bread on all days but Sunday. Its oven is heated with beech wood and holds ninety loaves. The baker,"
    " Clara Holm, learned her trade in the city and took over the shop from her uncle. Flour comes from the mill of"
    " the next valley, because the mill of Harwell grinds for visitors only. On market days a queue reaches as far as"
    " the church, and the cakes with plums are sold out before noon.",
    "school.txt": "The village school has 84 pupils in four classes. Its head teacher is Anna Fields. The building"
    " was a barn until 1902, and its bell still rings at eight. In the garden the pupils grow beans, onions and"
    " apples, which are cooked in the kitchen of the school. Every class spends one day of the summer at the mill and"
    " learns how grain becomes flour. A library of three thousand books is open to all people of the village on"
    " Wednesday afternoons. The school bus comes from the station at a quarter to eight.",
    "bridge.txt": "The stone bridge across the river was finished in 1810, after a flood had destroyed the wooden one."
    " It has three arches, of which the middle one is nine metres wide. The stones were brought by boat from a quarry"
    " at the coast. Carts paid a toll of two pence until 1868. The lamp at its northern end was lit with oil, then"
    " with gas, and since 1951 with electricity. Lorries of more than seven tonnes have to take the road through the"
    " forest. In winter the bridge is often covered with ice before the roads are.",
    "museum.txt": "The museum in the old mill is open from April to October. A ticket costs four pounds. On the ground"
    " floor visitors see the gears, on the first floor the stones and on the second the sacks and the scales. A film"
    " of twelve minutes shows the last miller at his work. Groups of more than ten people should write a week before"
    " they come. The shop sells flour in small bags, postcards and a book on the history of the village. Dogs may"
    " come in on a lead, and the ground floor can be reached by wheelchair.",
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
        with self._asked(path, body) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        with self._asked(path, {**body, "stream": True}) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def _asked(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            return urllib.request.urlopen(request, timeout=600)
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


@dataclass(frozen=True)
class Answer:
    text: str
    usage: dict[str, Any]
    first_s: float
    """Until the first token."""
    whole_s: float

    def reused(self, kind: str) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get(f"{kind}_tokens", 0))


def ask(server: Server, question: str, passages: list[Passage], salt: str | None, marks: bool = False) -> Answer:
    """`salt`: prompts share their prefixes only with those of the same salt. `marks`: a passage is reused wherever it
    stood before, and the answer is an approximation."""
    texts = [f"[{passage.name}] {passage.text}" for passage in reversed(passages)]
    order = "Answer in one sentence from these passages."
    mark = {"cache": {"type": "document"}}
    parts = [{"type": "text", "text": order}, *({"type": "text", "text": text, **mark} for text in texts)]
    chunks = server.stream(
        "/v1/chat/completions",
        model=MODELS[0],
        messages=[
            {"role": "system", "content": parts if marks else "\n\n".join([order, *texts])},
            {"role": "user", "content": question},
        ],
        max_tokens=48,
        temperature=0,
        cache_salt=salt,
        stream_options={"include_usage": True},
    )
    usage: dict[str, Any] = {}
    words: list[str] = []
    began, first_s = time.perf_counter(), 0.0
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        if "error" in chunk:
            raise SystemExit(f"The answer broke off: {chunk['error']['message']}")
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                first_s = first_s or time.perf_counter() - began
                words.append(choice["delta"]["content"])
    return Answer("".join(words).strip(), usage, first_s, time.perf_counter() - began)


def show(answer: Answer, passages: list[Passage]) -> None:
    print(answer.text)
    for passage in passages:
        print(f"  source: {passage.name} (relevance {passage.score:.3f})", flush=True)


def compare(server: Server, question: str, passages: list[Passage]) -> list[str]:
    """Rows of the table: the same question with and without reuse. A salt that nobody used before shares nothing."""
    salt, rows = f"rag-{time.time_ns()}", []
    for how in ("cold prefix", "warm prefix", "documents, new", "documents, again", "documents, other order"):
        marks = how.startswith("documents")
        shown = passages[::-1] if how.endswith("order") else passages
        answer = ask(server, question, shown, salt + "-documents" * marks, marks)
        if how != "warm prefix":  # Its answer is that with the cold one.
            print(f"{how}:", end=" ")
            show(answer, shown)
        reused = answer.reused("cached"), answer.reused("document")
        numbers = f"{answer.usage['prompt_tokens']:>8}{reused[0]:>8}{reused[1]:>11}"
        rows.append(f"{question:34.34} {how:24}{numbers}{answer.first_s:>15.2f}{answer.whole_s:>9.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--url", default="", help="a running server; by default one is started")
    parser.add_argument(
        "--compare", action="store_true", help="ask without and with reuse of the prefix, and of passages"
    )
    args = parser.parse_args()
    rows = []
    with served(args.url) as server:
        index = Index(server, DOCUMENTS)
        for question in args.questions:
            passages = index.search(question, num_near=4, num_best=2)
            print(f"\n{question}", flush=True)
            if args.compare:
                rows += compare(server, question, passages)
            else:
                show(ask(server, question, passages, None), passages)
    if rows:
        print(f"\n{'question':34} {'reuse':24}  prompt  prefix  documents  first token, s  all, s")
        print("\n".join(rows))


if __name__ == "__main__":
    main()
