"""Many adapters in one batch: each answer is that of a model with this adapter merged into its weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapter_files import ATTENTION, MLP, greedy, merged, write_adapter
from helpers.engine_stats import stats_after
from helpers.tiny_models import config_of, make_reference

from millrace import LLM, SamplingParams
from millrace.bench.errors import BenchError
from millrace.bench.micro.replay import replay_log
from millrace.config import RunConfig, load_config
from millrace.engine.adapters.build import check_adapters
from millrace.errors import ConfigError, ModelNotFound
from millrace.models.spec.families import spec_from_config
from millrace.models.weights.random_weights import RandomWeights
from millrace.observe.histograms import SEQUENCE, TTFT, Histograms
from millrace.params.grammar import Grammar
from millrace.plan.scheduler import Scheduler
from millrace.plan.shapes.declared import OwnSizes

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "eos_token_id": 299,
    "bos_token_id": 298,
}
SHAPES: tuple[dict[str, Any], ...] = (
    {"rank": 4, "targets": ("q_proj", "v_proj")},
    {"rank": 16, "targets": (*ATTENTION, *MLP), "dtype": torch.bfloat16},
    {"rank": 1, "targets": MLP},
    {"rank": 33, "targets": ("k_proj", "o_proj", "up_proj"), "alpha": 40.0},
    {"rank": 64, "targets": ATTENTION, "rslora": True},
    {"rank": 8, "targets": (*ATTENTION, *MLP), "rank_pattern": {"q_proj": 2, "down_proj": 24}},
    {"rank": 8, "targets": ("v_proj", "gate_proj"), "alpha_pattern": {"v_proj": 64.0}},
    {"rank": 12, "targets": (*ATTENTION, *MLP), "layers": (1,)},
    {"rank": 5, "targets": ("down_proj",), "alpha": 50.0},
)
OUTPUT = 10


class Adapted:
    """A tiny model, its adapters, and the right answers."""

    def __init__(self, folder: Path) -> None:
        import transformers

        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.source = f"random:{folder / 'config.json'}"
        config = transformers.LlamaConfig(**{name: value for name, value in CONFIG.items() if name != "architectures"})
        self.base = transformers.LlamaForCausalLM(config).float().eval()
        weights = RandomWeights(folder / "config.json", CONFIG, seed=0)
        self.base.load_state_dict({name: weights.get(name) for name in self.base.state_dict()})
        self.folders = {
            f"a{index}": write_adapter(folder / f"a{index}", self.base, seed=index, size=1.5, **shape)
            for index, shape in enumerate(SHAPES)
        }
        self.models = {"": self.base, **{name: merged(self.base, path) for name, path in self.folders.items()}}
        rng = random.Random(0)
        shared = [rng.randrange(300, 500) for _ in range(20)]
        self.prompts = [[*shared[: rng.randrange(4, 20)], rng.randrange(300, 500)] for _ in range(3)]
        self.right = {
            name: [greedy(model, prompt, OUTPUT) for prompt in self.prompts] for name, model in self.models.items()
        }

    @property
    def setting(self) -> str:
        return ",".join(f"{name}={path}" for name, path in self.folders.items())

    def llm(self, **settings: Any) -> LLM:
        return LLM(self.source, **{"dtype": "float32", "adapters": self.setting, "kv_tokens": 4000, **settings})

    def check_letters(self, llm: LLM) -> None:
        """The same under a grammar that allows ten letters."""
        letters, prompt = range(ord("a"), ord("z") + 1), self.prompts[0]
        params = [SamplingParams(**GREEDY, adapter=name, grammar=Grammar("regex", "[a-z]{10}")) for name in self.models]
        found = llm.generate([prompt] * len(params), params)
        right = [greedy(model, prompt, OUTPUT, letters) for model in self.models.values()]
        assert [generation.token_ids[:OUTPUT] for generation in found] == right

    def compare(self, name: str, index: int, found: list[int], near: float) -> None:
        """With the merged model's answer, up to the first token that is `near` as likely there as the one found."""
        right = self.right[name][index]
        at = next((at for at, (one, other) in enumerate(zip(found, right, strict=True)) if one != other), None)
        if at is None:
            return
        with torch.inference_mode():
            logits = self.models[name](torch.tensor([[*self.prompts[index], *right[:at]]])).logits[0, -1]
        assert logits.max() - logits[found[at]] < near, (name, index, found, right)

    def check(self, llm: LLM, near: float = 0.0, **sampling: Any) -> None:
        """All prompts with all adapters and the base, in one call."""
        asked = [(name, index) for index in range(len(self.prompts)) for name in self.models]
        params = [SamplingParams(**GREEDY | sampling, adapter=name) for name, _ in asked]
        found = llm.generate([self.prompts[index] for _, index in asked], params)
        for (name, index), generation in zip(asked, found, strict=True):
            self.compare(name, index, generation.token_ids, near)


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    torch.manual_seed(0)
    return Adapted(tmp_path_factory.mktemp("adapted"))


def test_adapters_change_answers(adapted: Adapted) -> None:
    answers = [tuple(map(tuple, right)) for right in adapted.right.values()]
    assert len(set(answers)) == len(answers), "adapters without an effect prove nothing"


def test_objectives_and_shares_by_adapter(adapted: Adapted) -> None:
    """Requests of an adapter that has an objective are timed apart; shares are those of adapters, also without keys."""
    settings = {"slos": "adapter a1: ttft p95 < 1 s; e2e p90 < 9 s", "share_by": "adapter"}
    with adapted.llm(**settings) as llm:
        names = ["", "a1", "a1", "a2"]
        params = [SamplingParams(**GREEDY, adapter=name) for name in names]
        llm.generate([adapted.prompts[0]] * len(names), params)
        stats = stats_after(llm, len(names))
    assert list(stats.adapter_histograms) == ["a1"]
    counts = Histograms(stats.adapter_histograms["a1"]).values[[TTFT, SEQUENCE], :, :-1].sum(axis=(1, 2))
    assert counts.tolist() == [2, 2]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="as it is"),
        pytest.param({"token_budget": 7, "block_size": 4}, id="prompts in parts"),
        pytest.param({"kv_tokens": 120, "block_size": 4, "max_running": 12}, id="preemption"),
        pytest.param({"max_adapters": 2}, id="two slots for nine adapters"),
        pytest.param({"max_adapters": 3, "adapter_memory": 0.01}, id="read again from the disk"),
        pytest.param({"speculate": "ngram", "draft_tokens": 3}, id="drafts"),
        pytest.param({"kv_tokens": 200, "kv_host_gib": 0.05, "block_size": 4}, id="host tier"),
        pytest.param(
            {"speculate": "ngram", "kv_tokens": 200, "kv_host_gib": 0.05, "block_size": 4, "max_adapters": 3},
            id="few slots, drafts, preemption and a host tier",
        ),
        pytest.param(
            {"tensor_parallel": 2, "speculate": "ngram", "kv_tokens": 200, "block_size": 4, "max_adapters": 3},
            id="two ranks, few slots, drafts, preemption",
        ),
        pytest.param({"tensor_parallel": 3, "device": "cpu"}, id="three ranks, two of them with one KV head"),
    ],
)
def test_each_answer_is_that_of_the_merged_model(adapted: Adapted, settings: dict[str, Any]) -> None:
    with adapted.llm(**settings) as llm:
        adapted.check(llm)
        adapted.check(llm)  # Again, with prefixes cached: those of other adapters are not found.
        adapted.check_letters(llm)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="graphs"),
        pytest.param({"token_budget": 16, "block_size": 16, "kv_tokens": 480}, id="prompts in parts, preemption"),
        pytest.param({"speculate": "suffix", "max_adapters": 3, "mirror": True}, id="drafts, few slots, a mirror"),
        pytest.param({"dtype": "bfloat16", "kv_host_gib": 0.05}, id="bfloat16, host tier"),
    ],
)
def test_each_answer_on_a_gpu_is_that_of_the_merged_model(adapted: Adapted, settings: dict[str, Any]) -> None:
    """Up to near ties: where an answer differs, the merged model's two tokens are about as likely."""
    near = 0.02 if settings.get("dtype") is None else 0.5
    with adapted.llm(device="cuda", **settings) as llm:
        for _ in range(3):  # The first steps at a shape run uncaptured.
            adapted.check(llm, near=near)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_64_adapters_in_one_step(adapted: Adapted, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the plans: the adapters of a step's rows are those of their admissions."""
    slots: dict[int, int] = {}
    most, compose = [0], Scheduler.compose

    def count(scheduler: Scheduler, *arguments: Any) -> Any:
        plan = compose(scheduler, *arguments)
        slots.update({admission.row: admission.adapter for admission in plan.admitted})
        most[0] = max(most[0], len({slots[row] for row in plan.rows.tolist()} - {0}))
        has_adapters = any(slots[row] for row in plan.rows.tolist())
        if device == "cpu":  # A GPU's keys stand for more.
            assert plan.shape.key == (OwnSizes.WITH_ADAPTERS if has_adapters else OwnSizes.PLAIN)
        return plan

    monkeypatch.setattr(Scheduler, "compose", count)
    names = [f"n{index}" for index in range(64)]
    paths = list(adapted.folders.values())
    setting = ",".join(f"{name}={copied(paths[index % 9], index)}" for index, name in enumerate(names))
    with adapted.llm(adapters=setting, max_adapters=64, max_running=80, device=device) as llm:
        params = [SamplingParams(**GREEDY | {"max_tokens": 40}, adapter=name) for name in names]
        llm.generate([adapted.prompts[0]] * 64, params)
        found = llm.generate([adapted.prompts[0]] * 64, params)  # All are on the device now.
    for index, generation in enumerate(found):
        name = f"a{index % 9}"
        adapted.compare(name, 0, generation.token_ids[:OUTPUT], near=0.02 if device == "cuda" else 0.0)
    assert most[0] == 64


def copied(folder: Path, number: int) -> Path:
    """The same adapter as other content: another digest."""
    target = folder.parent / f"copy{number}"
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, "revision": str(number)}))
    return target


def test_the_mirror_and_the_step_log_draw_the_same_with_adapters(adapted: Adapted, tmp_path: Path) -> None:
    """With few slots, so that they are filled anew between steps."""
    file = tmp_path / "steps.log"
    with adapted.llm(mirror=True, max_adapters=3, speculate="ngram", step_log=str(file)) as llm:
        adapted.check(llm)
        stats = stats_after(llm, len(adapted.models) * len(adapted.prompts)).mirror
        assert stats is not None
        assert (stats.is_up, stats.differences) == (True, 0)
        assert stats.steps > 10
    done = replay_log(file, RunConfig())
    assert done.num_steps >= stats.steps
    assert done.num_different == 0
    first = adapted.folders["a0"]
    (weights,) = first.glob("*.safetensors")
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(BenchError, match="has changed since"):
            replay_log(file, RunConfig())
    finally:
        weights.write_bytes(content)


def test_an_unknown_adapter_is_refused_with_the_list(adapted: Adapted) -> None:
    with adapted.llm() as llm, pytest.raises(ModelNotFound, match=r"no adapter 'nobody'; this model has 'a0', 'a1'"):
        llm.generate("x", adapter="nobody")


@pytest.mark.parametrize(
    ("settings", "device", "says"),
    [
        ({}, {"is_encoder": True}, "the model is an encoder"),
        ({}, {"spec": "qwen3_next_dense"}, "the model has recurrent layers"),
        ({}, {"spec": "deepseek_v3"}, "the model has latent attention"),
        ({"adapters.adapter_dir": "/no/such"}, {}, "--adapter-dir /no/such: there is no such directory"),
        ({"adapters.adapters": "a=/no/such"}, {}, "The adapter 'a' cannot be served: /no/such: there is no such"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused_by_name(
    settings: dict[str, Any], device: dict[str, Any], says: str
) -> None:
    if "spec" in device:
        device = {"spec": spec_from_config(config_of(make_reference(device["spec"])))}
    config = load_config(None, {"adapters.max_adapters": 4, **settings}).config
    with pytest.raises(ConfigError, match=says):
        check_adapters(config, **device)
