"""Generation of a collection against transformers' own ``generate``: ends, padding, chats, sampling, weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection import collect as collect_module
from ecospec.trace_collection.collect import collect, eos_ids_of
from ecospec.trace_collection.hooks import RoutingRecorder
from ecospec.trace_collection.plan import CollectConfig
from ecospec.trace_collection.prompts import Prompt
from tests.collect_targets import EOS, VOCAB, doubled, make_target, make_tokenizer, texts

FAMILIES = ("qwen3", "gpt_oss", "deepseek")
LENGTHS = (1, 3, 9, 20, 31, 2, 40)


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """RoutingSpec of each family; DeepSeek's first layer is dense."""
    folder = tmp_path_factory.mktemp("target")
    make_target().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    spec = routing_spec_of(folder)
    return dict.fromkeys(FAMILIES, spec) | {"deepseek": dataclasses.replace(spec, layer_indices=(1, 2))}


def padded(prompts):
    """Left-padded ids and mask, as a user of ``generate`` makes them."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), EOS)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def generate(model, prompts, ends):
    """Greedy continuations of 30 tokens by transformers, whatever follows an end included."""
    ids, mask = padded(prompts)
    model.generation_config.eos_token_id = ends
    with torch.no_grad():
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=30, pad_token_id=EOS)
    return output[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family, tmp_path, specs):
    """Unequal prompts in one batch, sliding windows shorter than the context, several ends (float64)."""
    model, tokenizer, prompts = doubled(make_target(family)), make_tokenizer(), texts(LENGTHS)
    free = generate(model, [tokenizer(prompt.text)["input_ids"] for prompt in prompts], None)
    pairs = [[first, second] for first in free[0][3:] for second in free[1][5:] if first != second]
    ends = next(pair for pair in pairs if 2 <= sum(bool({*row} & {*pair}) for row in free) < len(free))
    model.generation_config.eos_token_id = ends
    config = CollectConfig(max_new_tokens=30, batch_size=len(LENGTHS))
    store = collect(model, tokenizer, prompts, config, tmp_path / "out", spec=specs[family])
    traces = list(store.iter_sequences())
    rows = generate(model, [trace.token_ids[: trace.prompt_length].tolist() for trace in traces], ends)
    for trace, row in zip(traces, rows, strict=True):
        mine = trace.token_ids[trace.prompt_length :].tolist()
        assert mine == row[: len(mine)]
        last = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        assert len(mine) == last + 1
        assert trace.finish_reason == ("eos" if row[last] in ends else "length")
    assert {trace.finish_reason for trace in traces} == {"eos", "length"}


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_alone_equal_samples_in_a_batch(family, tmp_path, specs):
    model, tokenizer = doubled(make_target(family)), make_tokenizer()
    runs = []
    for size in (1, 7):
        config = CollectConfig(max_new_tokens=20, batch_size=size, temperature=1.5, seed=5)
        store = collect(model, tokenizer, texts(LENGTHS), config, tmp_path / str(size), spec=specs[family])
        runs.append({trace.sequence_id: trace for trace in store.iter_sequences()})
    assert runs[0].keys() == runs[1].keys()
    for key, trace in runs[0].items():
        assert np.array_equal(trace.token_ids, runs[1][key].token_ids)
        assert np.array_equal(trace.experts, runs[1][key].experts)


@pytest.mark.parametrize("source", ["router", "experts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_batch_are_those_of_each_sequence_alone(family, source, tmp_path, specs):
    """From either boundary; DeepSeek's router and experts are called with the same scaled weights."""
    model = doubled(make_target(family))
    config = CollectConfig(max_new_tokens=20, batch_size=4, weights=True)
    store = collect(
        model, make_tokenizer(), texts((2, 9, 30)), config, tmp_path / "out", spec=specs[family], source=source
    )
    for trace in store.iter_sequences():
        with torch.no_grad(), RoutingRecorder(model, source="experts", weights=True) as recorder:
            model(torch.tensor(trace.token_ids[:-1])[None].long())
            alone = recorder.take()
        assert np.array_equal(trace.experts, alone.experts.numpy())
        assert trace.weights is not None
        assert alone.weights is not None
        assert np.abs(trace.weights - alone.weights.numpy()).max() < 1e-3  # float16


def test_chats_go_through_the_template(tmp_path, specs):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2 w3{% endif %}"
    )
    chat = Prompt("d", "g", messages=(("user", "w5 w6"), ("assistant", "w7"), ("user", "w8")))
    turns = [{"role": role, "content": content} for role, content in chat.messages or ()]
    for mode in ("generate", "teacher_forced"):
        config = CollectConfig(mode=mode, max_new_tokens=3)
        store = collect(make_target(), tokenizer, [chat], config, tmp_path / mode, spec=specs["qwen3"])
        (trace,) = store.iter_sequences()
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=mode == "generate", tokenize=False)
        assert trace.token_ids[: trace.prompt_length].tolist() == tokenizer(rendered)["input_ids"]
        assert trace.token_ids[: trace.prompt_length].tolist() == [1, 5, 6, 1, 7, 1, 8] + [2, 3] * (
            mode == "generate"
        )


def test_what_ends_a_generation():
    """As ``generate``: the generation config says it, then the config, then the tokenizer."""
    model, tokenizer = make_target(), make_tokenizer()
    model.generation_config.eos_token_id = [3, 4]
    assert eos_ids_of(model, tokenizer) == {3, 4}
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 5
    assert eos_ids_of(model, tokenizer) == {5}
    model.config.eos_token_id = None
    assert eos_ids_of(model, tokenizer) == {EOS}
    tokenizer.eos_token = None
    assert eos_ids_of(model, tokenizer) == set()
    assert VOCAB > EOS


def test_the_next_batch_is_started_before_the_last_is_stored():
    """So the device works while the host writes; an engine that cannot is run batch by batch."""
    events = []

    class Batch(str):
        __slots__ = ()
        num_processed = 1  # each batch stands for its one trace

    class Overlapping:
        uses_host = False

        def start(self, batch):
            events.append(f"start {batch}")

            def finish():
                events.append(f"finish {batch}")
                return [batch]

            return finish

        def process(self, batch):
            events.append(f"process {batch}")
            return [batch]

    class Plain:
        uses_host = False
        process = Overlapping.process

    overlapping: Any = Overlapping()
    plain: Any = Plain()
    run_batches: Any = collect_module.run_batches
    assert list(run_batches(overlapping, map(Batch, "abc"))) == [["a"], ["b"], ["c"]]
    assert events == ["start a", "start b", "finish a", "start c", "finish b", "finish c"]
    events.clear()
    assert list(run_batches(plain, map(Batch, "ab"))) == [["a"], ["b"]]
    assert events == ["process a", "process b"]
