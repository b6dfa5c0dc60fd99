"""Engines that ask servers, against stand-ins: what they send, what they make of answers, and every refusal.

The stand-ins answer with bytes written from the documented layouts; real vLLM is in test_vllm.py, a real SGLang
server has not been asked.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import struct
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from ecospec.cli.main import main
from ecospec.trace_collection.engines.choose import EngineChoice
from ecospec.trace_collection.engines.json_client import JsonClient
from ecospec.trace_collection.engines.sglang_server import SglangServer
from ecospec.trace_collection.engines.target_files import TargetFiles
from ecospec.trace_collection.engines.vllm_offline import VllmOffline
from ecospec.trace_collection.engines.vllm_server import VllmServer
from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.store import TraceStore
from tests.engine_standin import StandIn
from tests.tiny_files import EXPERTS, LAYERS, TOP_K, VOCAB, save_prompts, save_target

EOS = 7


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.set_num_threads(1)
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def files(target):
    return dataclasses.replace(TargetFiles.read(target), eos_ids=frozenset({EOS}))


def client(standin, **options):
    return JsonClient(standin.url, **({"timeout": 10.0, "retries": 0, "pause": 0.01} | options))


def planned(max_new, *ids, seed=0, name="s0"):
    return PlannedSequence(name, "g", "d", "c", np.array(ids, np.int32), max_new, seed)


def expected_rows(count):
    """Rows that name their token and layer: token t, layer l uses experts (t + l) % 8 and (t + l + 3) % 8."""
    return [[sorted([(t + l) % EXPERTS, (t + l + 3) % EXPERTS]) for l in range(LAYERS)] for t in range(count)]  # noqa: E741


def sglang_field(count):
    numbers = [number for token in expected_rows(count) for layer in token for number in reversed(layer)]
    return base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()


def vllm_field(count):
    buffer = io.BytesIO()
    np.save(buffer, np.array(expected_rows(count), np.uint8)[..., ::-1])
    return base64.b64encode(buffer.getvalue()).decode()


def tokenize(body):
    return {"tokens": [int(word.removeprefix("w")) for word in body["prompt"].split()]}


def sglang(generate, **info):
    """A stand-in for an SGLang server that calls ``generate(body) -> answer``."""
    described = {
        "version": "0.5.23",
        "model_path": "/elsewhere/target",
        "speculative_algorithm": None,
        "enable_return_routed_experts": True,
        "enable_deterministic_inference": True,
        "context_length": None,
        "max_req_input_len": 90,
    }
    return StandIn({"/server_info": lambda _: described | info, "/tokenize": tokenize, "/generate": generate})


def sglang_answer(body, *, tokens=(3, 4), finish=None, **meta):
    count = len(body["input_ids"]) + len(tokens) - 1
    told = {
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": len(tokens),
        "finish_reason": finish or {"type": "length", "length": len(tokens)},
        "routed_experts": sglang_field(count),
    }
    kept = {name: value for name, value in (told | meta).items() if value is not None}
    return {"text": "…", "output_ids": list(tokens), "meta_info": kept}


def vllm(complete, metrics="vllm:num_requests_running 0\n", **card):
    """A stand-in for a vLLM server that calls ``complete(body) -> answer``."""
    cards = [
        {"id": "adapter", "root": "/elsewhere/lora", "parent": "tiny", "max_model_len": 64},
        {"id": "tiny", "root": "/elsewhere/target", "parent": None, "max_model_len": 64} | card,
    ]
    return StandIn(
        {
            "/version": lambda _: {"version": "0.30.0"},
            "/v1/models": lambda _: {"data": cards},
            "/metrics": lambda _: metrics,
            "/tokenize": tokenize,
            "/v1/completions": complete,
        }
    )


def vllm_answer(body, *, tokens=(3, 4), finish="length", **choice):
    tokens = tokens[: body["max_tokens"]]
    told = {
        "token_ids": list(tokens),
        "finish_reason": finish,
        "stop_reason": None,
        "routed_experts": vllm_field(len(body["prompt"]) + len(tokens) - 1),
    } | choice
    return {"choices": [told], "usage": {"prompt_tokens": len(body["prompt"])}}


def test_sglang_request_and_traces(files):
    def generate(body):
        if body["sampling_params"]["max_new_tokens"] == 1:
            return sglang_answer(body, tokens=(9,))
        return sglang_answer(body, tokens=(3, EOS), finish={"type": "stop", "matched": EOS})

    with sglang(generate) as standin:
        engine = SglangServer(client(standin), files, temperature=0.7)
        (read,) = engine.process([planned(0, 1, 2, 3)])
        (written,) = engine.process([planned(5, 1, 2, 3, seed=2**62 + 11)])
        bodies = standin.bodies("/generate")
    assert engine.context == 90
    assert read.token_ids.tolist() == [1, 2, 3]
    assert read.experts.tolist() == expected_rows(3)
    assert (read.origin, read.finish_reason) == ("teacher_forced", "text")
    assert written.token_ids.tolist() == [1, 2, 3, 3, EOS]
    assert written.experts.tolist() == expected_rows(4)
    assert (written.origin, written.finish_reason, written.prompt_length) == ("generated", "eos", 3)
    assert bodies[0]["input_ids"] == [1, 2, 3]
    assert bodies[0]["return_routed_experts"] is True
    assert bodies[0]["sampling_params"]["temperature"] == 0
    assert bodies[0]["sampling_params"]["ignore_eos"] is True
    sampling = bodies[1]["sampling_params"]
    assert {name: sampling[name] for name in ("max_new_tokens", "temperature", "ignore_eos", "stop_token_ids")} == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "ignore_eos": False,
        "stop_token_ids": [EOS],
    }
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"], sampling["sampling_seed"]) == (1, -1, 0, 11)


def test_vllm_request_and_traces(files):
    def complete(body):
        if body["max_tokens"] == 1:
            return vllm_answer(body, tokens=(9,))
        return vllm_answer(body, tokens=(3, EOS), finish="stop", stop_reason=EOS)

    with vllm(complete) as standin:
        engine = VllmServer(client(standin), files, temperature=0.7)
        (read,) = engine.process([planned(0, 1, 2, 3)])
        (written,) = engine.process([planned(5, 1, 2, 3, seed=2**62 + 11)])
        first, second = standin.bodies("/v1/completions")
    assert engine.context == 64
    assert engine.description == {
        "server": standin.url,
        "engine": "vllm",
        "version": "0.30.0",
        "model": "/elsewhere/target",
        "fingerprint": "not compared: the server's checkpoint cannot be read here",
        "speculation": "off",
        "tokenizer": "agrees on 40 tokens",
    }
    assert (read.token_ids.tolist(), read.experts.tolist()) == ([1, 2, 3], expected_rows(3))
    assert (written.token_ids.tolist(), written.experts.tolist()) == ([1, 2, 3, 3, EOS], expected_rows(4))
    assert (read.finish_reason, written.finish_reason) == ("text", "eos")
    assert (first["max_tokens"], first["temperature"]) == (1, 0)
    assert second == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 2**62 + 11,
        "ignore_eos": True,
        "stop_token_ids": [EOS],
        "watermarking": False,
        "return_token_ids": True,
    }


def test_a_batch_is_asked_at_once_and_comes_back_in_order(files):
    def generate(body):
        time.sleep(0.02 * (10 - len(body["input_ids"])))  # the first to be asked answers last
        return sglang_answer(body)

    with sglang(generate) as standin:
        engine = SglangServer(client(standin), files, temperature=0.0)
        batch = [planned(2, *range(size), name=f"s{size}") for size in range(1, 9)]
        traces = engine.process(batch)
        assert standin.most_at_once > 1
    assert [trace.sequence_id for trace in traces] == [sequence.sequence_id for sequence in batch]
    assert [trace.num_tokens for trace in traces] == [size + 2 for size in range(1, 9)]


def lacking(*paths, routes):
    return StandIn({path: route for path, route in routes.items() if path not in paths})


def test_servers_that_tell_less_are_used_and_that_is_recorded(files):
    with sglang(sglang_answer) as full:
        routes = full.routes
    with lacking("/server_info", "/tokenize", routes=routes) as standin:
        engine = SglangServer(client(standin), files, temperature=0.0)
        assert "no /server_info" in engine.description["speculation"]
        assert "no /tokenize" in engine.description["tokenizer"]
        assert engine.context is None
        assert engine.process([planned(2, 1)])[0].num_tokens == 3
    with lacking("/server_info", routes=routes | {"/get_server_info": routes["/server_info"]}) as standin:
        assert SglangServer(client(standin), files, temperature=0.0).description["version"] == "0.5.23"
    with vllm(vllm_answer) as full:
        routes = full.routes
    with lacking("/metrics", "/version", routes=routes) as standin:
        engine = VllmServer(client(standin), files, temperature=0.0)  # type: ignore[assignment]
        assert "no /metrics" in engine.description["speculation"]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"speculative_algorithm": "EAGLE3"}, r"decodes speculatively \(EAGLE3\); with eagle-topk > 1 or NGRAM"),
        ({"speculative_algorithm": "NGRAM"}, "start it without --speculative-algorithm"),
        ({"enable_return_routed_experts": False}, "start it with --enable-return-routed-experts"),
        ({"enable_deterministic_inference": False}, "ignores sampling seeds; .*--enable-deterministic-inference"),
    ],
)
def test_sglang_servers_that_cannot_be_used(files, info, message):
    with sglang(sglang_answer, **info) as standin, pytest.raises(ValueError, match=message):
        SglangServer(client(standin), files, temperature=1.0)


def test_sglang_without_seeds_collects_greedily(files):
    with sglang(sglang_answer, enable_deterministic_inference=False) as standin:
        assert SglangServer(client(standin), files, temperature=0.0).process([planned(2, 1)])


def test_vllm_servers_that_cannot_be_used(files):
    counter = 'vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n'
    with (
        vllm(vllm_answer, metrics=counter) as standin,
        pytest.raises(ValueError, match="without --speculative-config"),
    ):
        VllmServer(client(standin), files, temperature=0.0)
    with (
        vllm(vllm_answer) as standin,
        pytest.raises(ValueError, match=r"offers adapter, tiny, not other; name one with"),
    ):
        VllmServer(client(standin), files, temperature=0.0, model="other")
    with (
        StandIn({"/v1/models": lambda _: {"data": []}}) as standin,
        pytest.raises(ValueError, match="offers no model"),
    ):
        VllmServer(client(standin), files, temperature=0.0)
    with (
        StandIn({"/v1/models": lambda _: "<html>"}) as standin,
        pytest.raises(ValueError, match="not answer with JSON"),
    ):
        VllmServer(client(standin), files, temperature=0.0)
    with (
        StandIn({"/v1/models": lambda _: {}}) as standin,
        pytest.raises(ValueError, match="has no data, is it the right"),
    ):
        VllmServer(client(standin), files, temperature=0.0)


def test_another_model_behind_the_server_is_seen(files, target, tmp_path):
    other = save_target(tmp_path / "other", seed=5)
    message = "whose routers differ from those of --target-path"
    with sglang(sglang_answer, model_path=str(other)) as standin, pytest.raises(ValueError, match=message):
        SglangServer(client(standin), files, temperature=0.0)
    with vllm(vllm_answer, root=str(other)) as standin, pytest.raises(ValueError, match=message):
        VllmServer(client(standin), files, temperature=0.0)
    with vllm(vllm_answer, root=str(target)) as standin:
        engine = VllmServer(client(standin), files, temperature=0.0)
        assert engine.description["fingerprint"] == "equals that of the server's checkpoint"
    by_name = dataclasses.replace(files, path=Path("org/tiny-moe"))
    with (
        vllm(vllm_answer, root="org/other-moe") as standin,
        pytest.raises(ValueError, match="runs org/other-moe, --targ"),
    ):
        VllmServer(client(standin), by_name, temperature=0.0)
    with sglang(sglang_answer) as standin:
        standin.routes["/tokenize"] = lambda body: {"tokens": tokenize(body)["tokens"][::-1]}
        with pytest.raises(ValueError, match="tokenises otherwise than --target-path"):
            SglangServer(client(standin), files, temperature=0.0)


NO_ROWS = "has no routed_experts; start it with --enable-return-routed-experts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routed_experts": None}, NO_ROWS),
        ({"routed_experts": sglang_field(2)}, "2 rows for 3 processed tokens"),
        ({"routed_experts": "AAAA"}, "holds 3 bytes, no multiple of 3 layers x 2 experts x 4 bytes"),
        (
            {"routed_experts": base64.b64encode(bytes(3 * LAYERS * TOP_K * 4)).decode()},
            "experts of all 3 tokens are zero",
        ),
        ({"prompt_tokens": 3}, "sent 2 tokens, the engine counts 3"),
        ({"finish": {"type": "abort", "message": "out of memory"}}, r"gave up \('abort'\)"),
        ({"finish": {"type": "stop", "matched": "END"}}, "stopped after token 4, which ends nothing"),
        ({"tokens": ()}, "the engine generated 0"),
    ],
)
def test_sglang_answers_that_are_refused(files, changes, message):
    with sglang(lambda body: sglang_answer(body, **changes)) as standin:
        engine = SglangServer(client(standin), files, temperature=0.0)
        with pytest.raises(ValueError, match=message):
            engine.process([planned(2, 1, 2)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routed_experts": None}, NO_ROWS),
        ({"token_ids": None}, "has no token_ids; use vLLM >= 0.30"),
        ({"routed_experts": vllm_field(2)}, "2 rows for 3 processed tokens"),
        ({"routed_experts": "AAAA"}, "no base64 of a .npy file"),
        ({"finish": "stop", "stop_reason": "END"}, "stopped after token 4, which ends nothing"),
        ({"finish": "abort"}, r"gave up \('abort'\)"),
    ],
)
def test_vllm_answers_that_are_refused(files, changes, message):
    with vllm(lambda body: vllm_answer(body, **changes)) as standin:
        engine = VllmServer(client(standin), files, temperature=0.0)
        with pytest.raises(ValueError, match=message):
            engine.process([planned(2, 1, 2)])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (400, {"error": {"message": "prompt too long"}}),
            "sequence 's0': .*/generate answered 400: prompt too long",
        ),
        (
            (500, {"detail": "BlockObjectStoreError: gone"}),
            "rows were evicted .* lower --batch-size, then --resume",
        ),
        ((500, "Internal Server Error"), "answered 500: Internal Server Error"),
        ([], "has no meta_info, is it the right server"),
        ({"meta_info": {}, "output_ids": None}, "has no output_ids"),
    ],
)
def test_server_errors_name_the_sequence(files, answer, message):
    with sglang(lambda _: answer) as standin:
        engine = SglangServer(client(standin), files, temperature=0.0)
        with pytest.raises(ValueError, match=message):
            engine.process([planned(2, 1, 2)])


def test_busy_servers_are_asked_again(files):
    answers = iter([(503, {"detail": "loading"}), (429, "slow down")])
    with sglang(lambda body: next(answers, None) or sglang_answer(body)) as standin:
        engine = SglangServer(client(standin, retries=2), files, temperature=0.0)
        assert engine.process([planned(2, 1)])[0].num_tokens == 3
        assert len(standin.bodies("/generate")) == 3
    with sglang(lambda _: (503, "loading")) as standin:
        engine = SglangServer(client(standin, retries=1), files, temperature=0.0)
        with pytest.raises(ConnectionError, match=r"answered 503: loading\) after 2 attempts; is it running"):
            engine.process([planned(2, 1)])


def test_servers_that_are_gone_or_slow():
    def slow(_):
        time.sleep(1)
        return {}

    with StandIn({"/slow": slow}) as standin:
        with pytest.raises(TimeoutError, match=r"/slow gave no answer in 0.1 s; raise --server-timeout"):
            client(standin, timeout=0.1).get("/slow")
        assert len(standin.requests) == 1  # not asked again
    with pytest.raises(ConnectionError, match=r"cannot reach the server at http://127.*refused.* after 2 attempts"):
        client(standin, retries=1).get("/slow")


def fake_vllm(monkeypatch, generate, version="0.30.0"):
    """A module named vllm whose LLM calls ``generate``; real vLLM is in test_vllm.py."""
    built = {}

    class LLM:
        def __init__(self, **options):
            built.update(options)
            if "unknown" in options:
                raise TypeError("unexpected keyword argument 'unknown'")
            served = types.SimpleNamespace(max_model_len=64, dtype="torch.float32")
            self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(model_config=served))

        def generate(self, prompts, sampling, use_tqdm):
            return [generate(p["prompt_token_ids"], s) for p, s in zip(prompts, sampling, strict=True)]

    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = LLM, types.SimpleNamespace, version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return built


def output(prompt, rows, tokens=(3, 4)):
    choice = types.SimpleNamespace(token_ids=tokens, routed_experts=rows, finish_reason="length", stop_reason=None)
    return types.SimpleNamespace(prompt_token_ids=prompt, outputs=[choice])


def test_offline_vllm_is_refused_where_it_cannot_work(files, monkeypatch):
    def evicted(*_):
        raise RuntimeError("BlockObjectStoreError: block 7 is gone")

    def broken(*_):
        raise RuntimeError("something else")

    built = fake_vllm(monkeypatch, lambda prompt, _: output(prompt, None))
    engine = VllmOffline("tiny", files, temperature=0.0, options={"tensor_parallel_size": 8})
    assert (built["tensor_parallel_size"], built["enable_return_routed_experts"]) == (8, True)
    with pytest.raises(ValueError, match=r"vLLM 0.30.0 returned no experts; use >= 0.30"):
        engine.process([planned(2, 1)])
    fake_vllm(monkeypatch, lambda prompt, _: output(prompt, np.zeros((2, LAYERS, TOP_K), np.uint8)))
    with pytest.raises(ValueError, match="experts of all 2 tokens are zero"):
        VllmOffline("tiny", files, temperature=0.0).process([planned(2, 1)])
    fake_vllm(monkeypatch, evicted)
    with pytest.raises(ValueError, match=r"vLLM evicted expert rows .* lower --batch-size"):
        VllmOffline("tiny", files, temperature=0.0).process([planned(2, 1)])
    fake_vllm(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="something else"):
        VllmOffline("tiny", files, temperature=0.0).process([planned(2, 1)])
    with pytest.raises(ValueError, match="vLLM cannot load tiny: unexpected keyword"):
        VllmOffline("tiny", files, temperature=0.0, options={"unknown": 1})
    for name in ("speculative_config", "pipeline_parallel_size", "model", "dtype"):
        with pytest.raises(ValueError, match=f"--engine-options may not hold {name}: "):
            VllmOffline("tiny", files, temperature=0.0, options={name: 2})
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"--engine vllm needs vLLM in this environment .*, or give --server"):
        VllmOffline("tiny", files, temperature=0.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine": "tgi"}, "--engine must be one of hooks, vllm, sglang, got 'tgi'"),
        ({}, "--target is missing"),
        ({"engine": "vllm"}, "--target is missing"),
        ({"target": "t", "server": "http://a:1"}, "--server needs --engine vllm or sglang"),
        ({"target": "t", "target_path": "t"}, "--target-path needs --engine vllm or sglang"),
        ({"target": "t", "options": {"a": 1}}, "--engine-options needs --engine vllm"),
        ({"engine": "sglang", "target": "t"}, "--engine sglang asks a running server; give --server"),
        (
            {"engine": "vllm", "target": "t", "weights": True},
            "--weights needs --engine hooks: vllm returns expert ids",
        ),
        ({"engine": "vllm", "server": "http://a:1"}, "--server needs --target-path"),
        ({"engine": "vllm", "server": "a:1", "target_path": "t"}, "--server must look like http://host:port"),
        ({"engine": "vllm", "server": "http://a:1/v1", "target_path": "t"}, r"\(no /v1 behind it\)"),
        (
            {"engine": "vllm", "server": "http://a:1", "target_path": "t", "options": {"a": 1}},
            "--engine-options are for vLLM in this process",
        ),
        (
            {"engine": "sglang", "server": "http://a:1", "target_path": "t", "server_timeout": 0},
            "--server-timeout must be above 0",
        ),
    ],
)
def test_flags_that_do_not_fit_together(flags, message):
    paths = {name: Path(flags[name]) for name in ("target", "target_path") if name in flags}
    with pytest.raises(ValueError, match=message):
        EngineChoice(**(flags | paths))


def test_context_leaves_room_for_the_token_that_reading_costs(files):
    assert files.context == 256
    assert files.room(reading=False) == 256
    assert files.room(reading=True) == 255
    assert files.room(reading=True, server_context=64) == 63
    assert dataclasses.replace(files, context=None).room(reading=True) is None
    assert files.tokenizer.vocab_size == VOCAB


def command(standin, target, prompts, out, *more, engine="sglang"):
    flags = ["--engine", engine, "--server", standin.url + "/", "--target-path", str(target)]
    with pytest.raises(SystemExit) as stop:
        main(
            ["collect-traces", *flags, "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "2", *more]
        )
    return stop.value.code


def test_command_line_collects_and_replays_through_a_server(target, tmp_path, capsys):
    prompts = save_prompts(tmp_path / "prompts.jsonl", 5, seed=3)

    def generate(body):
        asked = body["sampling_params"]["max_new_tokens"]
        return sglang_answer(body, tokens=(3, 4)[:asked])

    with sglang(generate) as standin:
        assert command(standin, target, prompts, tmp_path / "out") == 0
        store = TraceStore(tmp_path / "out")
        asked = len(standin.bodies("/generate"))
        assert command(standin, target, prompts, tmp_path / "out", "--resume") == 0
        assert len(standin.bodies("/generate")) == asked == 5
        assert command(standin, target, prompts, tmp_path / "read", "--mode", "teacher_forced") == 0
        with pytest.raises(SystemExit) as stop:
            main(
                [
                    *("collect-traces", "--mode", "replay", "--engine", "sglang", "--server", standin.url),
                    *(
                        "--target-path",
                        str(target),
                        "--traces",
                        str(tmp_path / "out"),
                        "--out",
                        str(tmp_path / "again"),
                    ),
                ]
            )
        assert stop.value.code == 0
    assert store.manifest.collection["engine"] == "sglang"
    assert store.num_rows == 5
    for trace in store.iter_sequences():
        assert trace.token_ids[trace.prompt_length :].tolist() == [3, 4]
        assert trace.experts.tolist() == expected_rows(trace.num_tokens - 1)
    for trace in TraceStore(tmp_path / "read").iter_sequences():
        assert trace.experts.tolist() == expected_rows(trace.num_tokens)
    report = json.loads((tmp_path / "again" / "replay.json").read_text())
    assert report["low"] == []
    assert "5 sequences" in capsys.readouterr().out


def test_command_line_errors_are_one_line(target, tmp_path, capsys):
    prompts = save_prompts(tmp_path / "prompts.jsonl", 2, seed=3)
    with sglang(lambda body: sglang_answer(body, routed_experts=None)) as standin:
        assert command(standin, target, prompts, tmp_path / "out") == 2
        assert command(standin, target, prompts, tmp_path / "other", "--weights") == 2
        assert command(standin, target, prompts, tmp_path / "other", "--experts-implementation", "eager") == 2
        assert command(standin, tmp_path / "nowhere", prompts, tmp_path / "other") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if line.startswith("ecospec collect-traces: error: ")]) == 4
    for line, message in zip(
        [line for line in lines if "error: " in line],
        (
            "start it with --enable-return-routed-experts",
            "--weights needs",
            "needs --engine hooks",
            "does not exist",
        ),
        strict=True,
    ):
        assert message in line
    assert not (tmp_path / "other").exists()


def test_server_with_a_short_context_skips_long_prompts(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": " ".join(["w1"] * size)}) + "\n" for size in (5, 63, 64)))
    with vllm(vllm_answer) as standin:  # 64 positions
        assert command(standin, target, prompts, tmp_path / "out", engine="vllm") == 0
        assert sorted(body["max_tokens"] for body in standin.bodies("/v1/completions")) == [1, 2]
