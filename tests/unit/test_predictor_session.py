"""The KV-cache session against full forward passes, path by path."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ecospec.predictor import PredictorSession
from ecospec.predictor.tree_session import ancestors
from tests.predictor_fakes import (
    BACKBONE,
    EMBEDDING_SIZE,
    SPEC,
    embedding_table,
    path_to,
    random_parents,
    tiny_predictor,
)

LLAMA = {key: value for key, value in BACKBONE.items() if key != "head_dim"} | {"model_type": "llama"}


def reference(predictor, context, tokens, parents):
    """Scores of each node from a forward pass over its own path, without cache or mask."""
    rows = []
    for node in range(len(tokens)):
        ids = torch.cat([context, tokens[path_to(node, parents)]])
        rows.append(predictor.score_sequence(ids)[-1])
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("backbone", [BACKBONE, LLAMA], ids=["qwen3", "llama"])
def test_session_equals_forward_over_each_path(backbone, dtype, tolerance):
    predictor = tiny_predictor(backbone, temperature=(0.5, 1.0, 2.0))
    predictor.model.to(dtype)
    generator = torch.Generator().manual_seed(0)
    session = predictor.session()
    context = torch.empty(0, dtype=torch.int64)
    for step in range(12):
        if step % 3 == 0:  # prefill in chunks, one of them empty
            chunk = torch.randint(40, (step,), generator=generator)
            session.prefill(chunk)
            context = torch.cat([context, chunk])
        nodes = 1 + step
        tokens = torch.randint(40, (nodes,), generator=generator)
        parents = random_parents(nodes, generator)
        scores = session.score(tokens, parents)
        assert scores.shape == (nodes, SPEC.num_layers, SPEC.num_experts)
        assert scores.dtype == dtype
        torch.testing.assert_close(scores, reference(predictor, context, tokens, parents), rtol=0, atol=tolerance)
        if step % 4 == 3:
            continue  # not committed: the next call must forget this tree
        path = path_to(int(torch.randint(nodes, (1,), generator=generator)), parents)
        session.commit(torch.tensor(path))
        context = torch.cat([context, tokens[path]])
        assert session.context_length == len(context)


def test_cache_grows_past_its_first_capacity():
    predictor = tiny_predictor()
    predictor.model.double()
    ids = torch.randint(40, (300,), generator=torch.Generator().manual_seed(1))
    session = predictor.session()
    session.prefill(ids[:255])
    tokens, parents = ids[255:258], torch.tensor([-1, 0, 0])
    for _ in range(2):  # scoring does not change the context
        scores = session.score(tokens, parents)
        torch.testing.assert_close(scores, reference(predictor, ids[:255], tokens, parents), rtol=0, atol=1e-9)
    session.commit(torch.tensor([0, 2]))
    after = session.score(ids[:1], torch.tensor([-1]))
    context = torch.cat([ids[:256], ids[257:258], ids[:1]])
    torch.testing.assert_close(after[0], predictor.score_sequence(context)[-1], rtol=0, atol=1e-9)


def test_ancestors_by_following_parents():
    generator = torch.Generator().manual_seed(3)
    for nodes in (1, 2, 3, 11, 33):
        for parents in (random_parents(nodes, generator), torch.arange(-1, nodes - 1)):
            expected = torch.zeros(nodes, nodes, dtype=torch.bool)
            for node in range(nodes):
                expected[node, path_to(node, parents)] = True
            assert torch.equal(ancestors(parents), expected)


def test_sessions_are_independent_and_satisfy_the_protocol():
    predictor = tiny_predictor()
    first, second = predictor.session(), predictor.session()
    assert isinstance(first, PredictorSession)
    first.prefill(torch.tensor([1, 2, 3]))
    tree = torch.tensor([4, 5]), torch.tensor([-1, 0])
    before = second.score(*tree)
    first.score(*tree)
    first.commit(torch.tensor([0]))
    assert torch.equal(second.score(*tree), before)


class _NoWaiting(TorchDispatchMode):
    """Refuses operations that copy a value to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a device value was read"
        assert "nonzero" not in str(func), "a shape depends on device values"
        return func(*args, **(kwargs or {}))


def test_scoring_reads_no_device_value():
    session = tiny_predictor().session()
    session.prefill(torch.arange(5))
    with _NoWaiting():
        session.score(torch.arange(4), torch.tensor([-1, 0, 0, 1]))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([1, 2], "path from the root"),
        ([0, 2], "path from the root"),
        ([0, 9], "path from the root"),
        ([], "n <= 3"),
    ],
)
def test_commit_refuses_what_is_no_path(path, message):
    session = tiny_predictor().session()
    session.score(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 1]))
    with pytest.raises(ValueError, match=message):
        session.commit(torch.tensor(path, dtype=torch.int64))


def test_misuse_has_one_line_each():
    session = tiny_predictor().session()
    with pytest.raises(ValueError, match="call score first"):
        session.commit(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"prefill takes token ids of shape \[T\]"):
        session.prefill(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="one shape"):
        session.score(torch.tensor([1, 2]), torch.tensor([-1]))
    session.close()
    for call in (
        lambda: session.prefill(torch.tensor([1])),
        lambda: session.score(torch.tensor([1]), torch.tensor([-1])),
    ):
        with pytest.raises(ValueError, match="session is closed"):
            call()
    predictor = tiny_predictor()
    predictor.model._target_embedding.clear()
    with pytest.raises(ValueError, match="needs the target's token embedding"):
        predictor.session()


def test_input_does_not_depend_on_the_scale_of_the_embedding():
    predictor = tiny_predictor()
    ids = torch.arange(6)
    before = predictor.score_sequence(ids)
    predictor.set_target_embedding(embedding_table() * 50.0)
    torch.testing.assert_close(predictor.score_sequence(ids), before, rtol=1e-4, atol=1e-4)


def test_embedding_is_called_as_a_module_and_never_owned():
    predictor = tiny_predictor()
    module = torch.nn.Embedding.from_pretrained(embedding_table().bfloat16())
    predictor.set_target_embedding(module)
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    predictor.score_sequence(torch.arange(3))
    assert calls
    predictor.double()
    assert module.weight.dtype == torch.bfloat16
    assert not [name for name in predictor.state_dict() if "embed" in name]
    with pytest.raises(ValueError, match=r"embedding is \(3, 12\), this predictor was made for \(40, 12\)"):
        predictor.set_target_embedding(torch.zeros(3, EMBEDDING_SIZE))


def test_casting_leaves_the_rotary_frequencies_alone():
    model = tiny_predictor().model
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.bfloat16()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_right_padding_changes_nothing_and_left_padding_takes_a_mask():
    predictor = tiny_predictor()
    ids = torch.arange(5)
    alone = predictor.score_sequence(ids)
    pads = torch.zeros(3, dtype=torch.int64)
    padded = predictor.score_batch(torch.stack([torch.arange(8), torch.cat([ids, pads])]))
    torch.testing.assert_close(padded[1, :5], alone, rtol=0, atol=1e-5)
    left = torch.cat([pads, ids]).unsqueeze(0)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(predictor.score_batch(left, mask)[0, 3:], alone, rtol=0, atol=1e-4)
