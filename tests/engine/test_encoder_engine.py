"""An encoder in the engine: the same loop and cycle as a decoder's, with its own planner and runner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fake_channel import FakeChannel
from helpers.tiny_encoders import make_model, save_encoder, write_modules

from millrace.config import load_config
from millrace.engine.build import build_engine
from millrace.errors import ConfigError, ModelError
from millrace.link.messages import Abort, EngineReady, Finish, NewRequest, StepTokens, ToEngine, pack_tokens
from millrace.ops.cpp.native import native_missing
from millrace.params.sampling import SamplingParams

needs_kernels = pytest.mark.skipif(bool(native_missing(torch.device("cpu"))), reason="no C++ kernels")
TEXTS = [[2, 5, 6, 7, 3], [2, 9, 3], [2, *range(10, 60), 3], [2, 11, 12, 13, 3]]


def run_engine(folder: Path, *messages: ToEngine, **settings: object) -> tuple[dict[int, Finish], EngineReady]:
    """The terminal event of each request."""
    channel = FakeChannel(messages)
    chosen = {"model.source": str(folder), "run.device": "cpu", "run.threads": 1, "server.in_process": True}
    config = load_config(None, {**chosen, **{key.replace("__", "."): value for key, value in settings.items()}}).config
    threads = torch.get_num_threads()
    engine, ready = build_engine(config, channel)
    engine.run()
    torch.set_num_threads(threads)
    steps = [message for _, message in channel.sent if isinstance(message, StepTokens)]
    return {finish.id: finish for step in steps for finish in step.finished}, ready


def request(request_id: int, token_ids: list[int], **params: int) -> NewRequest:
    chosen = SamplingParams(temperature=0.0, max_tokens=0, pooling="model", **params)
    return NewRequest(id=request_id, prompt=pack_tokens(np.array(token_ids)), params=chosen, arrival=0.0)


def vector(finish: Finish) -> np.ndarray:
    return np.frombuffer(finish.vector, np.float32)


@pytest.mark.parametrize("token_budget", [8, 2048])
def test_vectors_are_those_of_transformers_however_texts_are_batched(token_budget: int, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    write_modules(folder, "Pooling", "Normalize")
    messages = [request(index, text) for index, text in enumerate(TEXTS)]
    found, ready = run_engine(folder, *messages, plan__token_budget=token_budget, plan__max_running=3)
    assert (ready.max_context, ready.vocab_size, ready.model_name) == (64, 96, "m")
    model = make_model("bert")
    for index, text in enumerate(TEXTS):
        mean = model(torch.tensor([text])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector(found[index]), mean / np.linalg.norm(mean), atol=1e-5)
        assert (found[index].reason, found[index].prompt_tokens, found[index].output_tokens) == ("stop", len(text), 0)


def test_logits_of_a_pair_are_not_normalised(tmp_path: Path) -> None:
    kind = "ForSequenceClassification"
    folder = save_encoder(tmp_path / "m", "bert", kind, num_labels=3)
    pair = [2, 5, 6, 3, 7, 8, 3]
    found, _ = run_engine(folder, request(0, pair, second_from=4))
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    expected = make_model("bert", kind, num_labels=3)(torch.tensor([pair]), token_type_ids=types).logits[0]
    np.testing.assert_allclose(vector(found[0]), expected.numpy(), atol=1e-4)


def test_a_request_can_be_aborted(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    found, _ = run_engine(folder, request(0, TEXTS[0]), request(1, TEXTS[1]), Abort((0,), "cancelled"))
    assert (found[0].reason, found[0].vector) == ("cancelled", b"")
    assert len(vector(found[1])) == 48


def test_settings_of_models_that_write_text_are_refused(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    with pytest.raises(ConfigError, match="encoder"):
        run_engine(folder, plan__step_log=str(tmp_path / "log"))
    with pytest.raises(ConfigError, match="fp8"):
        run_engine(folder, model__quantization="fp8")


@needs_kernels
@pytest.mark.parametrize("case", ["bert", "nomic_bert"])
def test_products_can_be_of_8_bit_integers(case: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    folder = save_encoder(tmp_path / "m", case, **sizes)
    write_modules(folder, "Pooling", "Normalize")
    messages = [request(index, text) for index, text in enumerate(TEXTS)]
    exact, in_floats = run_engine(folder, *messages)
    found, in_int8 = run_engine(folder, *messages, model__quantization="int8")
    for index in range(len(TEXTS)):
        assert 0.99 < vector(found[index]) @ vector(exact[index]) < 0.9999999
    assert in_floats.fingerprint != in_int8.fingerprint


@needs_kernels
def test_products_of_8_bit_integers_need_float32_and_whole_blocks(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    with pytest.raises(ConfigError, match="needs an encoder in float32"):
        run_engine(folder, model__quantization="int8", model__dtype="bfloat16")
    with pytest.raises(ModelError, match="multiples of 32; a layer of this model has 48"):
        run_engine(folder, model__quantization="int8")


def test_tiers_of_a_kv_cache_are_ignored_by_name(tmp_path: Path) -> None:
    tiers = {"memory__kv_host_gib": 0.1, "memory__kv_disk": str(tmp_path / "kv"), "memory__kv_disk_gib": 0.1}
    _, ready = run_engine(save_encoder(tmp_path / "m"), **tiers)
    assert [note.split()[0] for note in ready.notes] == ["--kv-host-gib", "--kv-disk"]
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("in_process", [False, True])
def test_an_engine_process_gives_way_to_streams(
    in_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of another model must not wait for a batch. A program's own thread keeps its priority."""
    calls: list[bool] = []
    monkeypatch.setattr("millrace.engine.build_encoder.run_in_background", lambda: calls.append(True))
    run_engine(save_encoder(tmp_path / "m"), request(0, TEXTS[0]), server__in_process=in_process)
    assert calls == ([] if in_process else [True])
