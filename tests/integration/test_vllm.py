"""Real vLLM, in this process and as a server, against transformers' hooks: the same expert sets, token for token.

Run by ``make test-vllm`` in an environment of its own. The target has a dense layer; both sides compute in float32.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ecospec.cli.main import main
from ecospec.trace_collection.engines.choose import EngineChoice
from ecospec.trace_collection.hooks import RoutingRecorder
from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.store import TraceStore

pytestmark = pytest.mark.vllm

VOCAB, EOS, CONTEXT = 64, 63, 128
MOE_LAYERS = (0, 2, 3)  # of four; layer 1 is dense
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
# A machine that does other work as well needs minutes to start a server that takes half a minute alone.
START_SECONDS = 1200
#: Logits this close are a tie: vLLM and transformers round differently in float32.
TIE = 1e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random Qwen3-MoE with one dense layer and an end-of-sequence token that it does emit."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        mlp_only_layers=[1],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(EOS)} | {"<eos>": EOS}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(target):
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module", autouse=True)
def _settings():
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value


@pytest.fixture(scope="module")
def server(target, tmp_path_factory):
    """Address of a vLLM server of the target."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    # `vllm serve` looks for a distribution named vllm and fails with the one named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--enable-return-routed-experts"]
    with log.open("w") as handle:
        process = subprocess.Popen(command, stdout=handle, stderr=handle, env=os.environ | SETTINGS)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    try:
        while not _healthy(url):
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def offline(target):
    """`open(temperature)` of vLLM in this process; the target is loaded once."""
    choice = EngineChoice(engine="vllm", target=target, options={"enforce_eager": True})
    files = choice.files()
    engine: Any = choice.open(files, temperature=0.0, dtype="float32")

    def at(temperature):
        engine._temperature = temperature
        return engine

    return at


@pytest.fixture(scope="module")
def served(target, server):
    """`open(temperature)` of the server."""
    choice = EngineChoice(engine="vllm", server=server, target_path=target)
    files = choice.files()
    return lambda temperature: choice.open(files, temperature=temperature)


@pytest.fixture(params=["offline", "served"])
def engine_at(request):
    return request.getfixturevalue(request.param)


def planned(size, max_new, seed=0, number=0):
    rng = np.random.default_rng([size, number])
    ids = rng.integers(0, VOCAB - 1, size, dtype=np.int32)
    return PlannedSequence(f"{size}-{number}-{seed}", "g", "d", "c", ids, max_new, seed)


def witness(model, tokens):
    """Logits and experts of one forward of transformers, hooked."""
    with torch.no_grad(), RoutingRecorder(model) as recorder:
        logits = model(torch.tensor(tokens)[None].long()).logits[0]
        return logits, recorder.take().experts.numpy()


def compare(model, traces, capsys, what):
    """Every set must equal what the hooks saw; the number of sets is printed."""
    sets = different = 0
    for trace in traces:
        experts = witness(model, trace.token_ids)[1][: trace.num_processed]
        assert trace.experts.shape == (trace.num_processed, len(MOE_LAYERS), 2)
        sets += experts.shape[0] * experts.shape[1]
        different += int((experts != trace.experts).any(axis=-1).sum())
    with capsys.disabled():
        sys.stdout.write(f"\n{what}: {sets} expert sets of {len(traces)} sequences, {different} differ\n")
    assert different == 0


def test_teacher_forced_sets_equal_the_hooks(engine_at, model, capsys, request):
    batch = [planned(size, 0) for size in (1, 2, 15, 16, 17, 40, 63, CONTEXT - 1)]
    traces = engine_at(0.0).process(batch)
    for sequence, trace in zip(batch, traces, strict=True):
        assert np.array_equal(trace.token_ids, sequence.ids)
        assert trace.num_processed == trace.num_tokens == trace.prompt_length
        assert (trace.origin, trace.finish_reason) == ("teacher_forced", "text")
    compare(model, traces, capsys, f"{request.node.callspec.id}, teacher-forced")


def test_greedy_text_and_sets_equal_the_hooks(engine_at, model, capsys, request):
    batch = [planned(size, 40, number=number) for size in (1, 5, 12, 33, 88) for number in range(4)]
    traces = engine_at(0.0).process(batch)
    ties = 0
    for trace in traces:
        logits = witness(model, trace.token_ids)[0][trace.prompt_length - 1 : -1]
        continuation = trace.token_ids[trace.prompt_length :]
        chosen = logits.gather(-1, torch.from_numpy(continuation).long().unsqueeze(-1)).squeeze(-1)
        assert bool((chosen >= logits.amax(-1) - TIE).all())
        ties += int((chosen < logits.amax(-1)).sum())
        ends = np.flatnonzero(continuation == EOS)
        assert trace.finish_reason == ("eos" if ends.size else "length")
        assert continuation.size == (ends[0] + 1 if ends.size else 40)
        assert trace.origin == "generated"
    assert ties <= 1  # sequence 5-2-0 has one, a margin of 5e-6 between its two best tokens
    compare(model, traces, capsys, f"{request.node.callspec.id}, greedy")


def test_sampling_follows_the_seeds(engine_at, model, capsys, request):
    batch = [planned(6, 60, seed=seed) for seed in range(1, 13)]
    first, again = (engine_at(1.5).process(batch) for _ in range(2))
    assert [t.token_ids.tolist() for t in first] == [t.token_ids.tolist() for t in again]
    assert len({tuple(trace.token_ids) for trace in first}) == len(batch)
    assert {trace.finish_reason for trace in first} == {"eos", "length"}
    compare(model, first, capsys, f"{request.node.callspec.id}, sampled")


def test_server_is_recognised(target, served, server):
    engine = served(0.0)
    assert engine.context == CONTEXT
    assert engine.description == {
        "server": server,
        "engine": "vllm",
        "version": "0.30.0",
        "model": str(target),
        "fingerprint": "equals that of the server's checkpoint",
        "speculation": "off",
        "tokenizer": f"agrees on {EOS} tokens",  # all but the end
    }


def test_server_refuses_a_text_that_fills_its_context(served):
    with pytest.raises(ValueError, match=r"sequence '128-0-0': .* answered 400: .*128"):
        served(0.0).process([planned(CONTEXT, 0)])


def test_command_line_gives_the_store_of_the_hooks(target, server, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rng = np.random.default_rng(4)
    words = [" ".join(f"w{i}" for i in rng.integers(0, EOS, size)) for size in (3, 9, 20, 50)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    stores = []
    for name, flags in (
        ("hooks", ["--target", str(target), "--dtype", "float32"]),
        ("vllm", ["--engine", "vllm", "--server", server, "--target-path", str(target)]),
    ):
        out = tmp_path / name
        with pytest.raises(SystemExit) as stop:
            main(["collect-traces", "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "20", *flags])
        assert stop.value.code == 0
        stores.append(TraceStore(out))
    hooks, vllm = stores
    assert hooks.spec == vllm.spec
    for mine, theirs in zip(hooks.iter_sequences(), vllm.iter_sequences(), strict=True):
        assert (mine.sequence_id, mine.finish_reason) == (theirs.sequence_id, theirs.finish_reason)
        assert np.array_equal(mine.token_ids, theirs.token_ids)
        assert np.array_equal(mine.experts, theirs.experts)
    assert vllm.manifest.collection["engine"] == "vllm"
