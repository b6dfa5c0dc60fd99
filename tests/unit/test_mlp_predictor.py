"""The perceptron baseline: against a plain loop over each node's path in NumPy, and as a bundle."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ecospec.predictor import MlpModel, MlpPredictor, PredictorConfig, PredictorSession, load_predictor
from tests.predictor_fakes import EMBEDDING_SIZE, SPEC, embedding_table, path_to, random_parents

V, L, E = SPEC.vocab_size, SPEC.num_layers, SPEC.num_experts
TEMPERATURE = (0.5, 1.0, 2.0)


def predictor(window_tokens=3, hidden_layers=2, *, dtype=torch.float64, embedding=True):
    torch.manual_seed(0)
    model = MlpModel(
        SPEC,
        embedding_size=EMBEDDING_SIZE,
        window_tokens=window_tokens,
        hidden_size=10,
        hidden_layers=hidden_layers,
        target_embedding=embedding_table() if embedding else None,
    )
    for parameter in model.parameters():
        parameter.data.normal_()
    return MlpPredictor.from_model(model.to(dtype), temperature=TEMPERATURE, training_data={"tokens": 7}).eval()


def expected_row(tensors, window_tokens, tokens):
    """Scores of the last token of a sequence, term by term."""
    table = embedding_table().double().numpy()
    entries = []
    for back in range(window_tokens):
        if back < len(tokens):
            row = table[tokens[-1 - back]]
            entries.extend(row / math.sqrt(np.mean(row**2)))
        else:
            entries.extend([0.0] * EMBEDDING_SIZE)
    values = np.array(entries)
    layers = sorted(
        name.removesuffix(".weight") for name in tensors if name.startswith("layers.") and "weight" in name
    )
    for layer in layers:
        values = tensors[f"{layer}.weight"].numpy() @ values + tensors[f"{layer}.bias"].numpy()
        values = np.array([0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in values])
    scores = tensors["head.weight"].numpy() @ values + tensors["head.bias"].numpy()
    return scores.reshape(L, E) / np.array(TEMPERATURE)[:, None]


@pytest.mark.parametrize(("window_tokens", "hidden_layers"), [(1, 1), (2, 2), (4, 1)])
def test_sequences_and_trees_equal_a_plain_loop(window_tokens, hidden_layers):
    mlp = predictor(window_tokens, hidden_layers)
    tensors = mlp.bundle_tensors()
    generator = torch.Generator().manual_seed(1)

    def check(scores, tokens):
        np.testing.assert_allclose(scores, expected_row(tensors, window_tokens, tokens), rtol=1e-5, atol=1e-5)

    ids = torch.randint(V, (7,), generator=generator)
    for end, row in enumerate(mlp.score_sequence(ids), start=1):
        check(row, ids[:end].tolist())
    assert mlp.score_sequence(ids[:0]).shape == (0, L, E)
    session = mlp.session()
    assert isinstance(session, PredictorSession)
    context = []
    for step in range(5):
        if step in {2, 4}:
            session.prefill(ids[:step])
            context += ids[:step].tolist()
        nodes = 1 + 3 * step
        tokens, parents = torch.randint(V, (nodes,), generator=generator), random_parents(nodes, generator)
        scores = session.score(tokens, parents)
        assert scores.shape == (nodes, L, E)
        for node in range(nodes):
            check(scores[node], context + tokens[path_to(node, parents)].tolist())
        path = path_to(nodes - 1, parents)
        session.commit(torch.tensor(path))
        context += tokens[path].tolist()


def test_training_windows_are_those_of_sequences():
    mlp = predictor()
    ids = torch.randint(V, (2, 6), generator=torch.Generator().manual_seed(2))
    together = mlp.calibrated(mlp.model(mlp.model.windows(ids)))
    torch.testing.assert_close(together, torch.stack([mlp.score_sequence(row) for row in ids]))


def test_the_bundle_holds_the_network_and_not_the_embedding(tmp_path):
    mlp = predictor(dtype=torch.float32)
    mlp.save_pretrained(tmp_path / "mlp")
    assert not [name for name in load_file(tmp_path / "mlp" / "model.safetensors") if "embed" in name]
    ids = torch.randint(V, (9,), generator=torch.Generator().manual_seed(3))
    loaded = load_predictor(tmp_path / "mlp", target_embedding=embedding_table(), require_spec=SPEC)
    assert isinstance(loaded, MlpPredictor)
    assert loaded.config == mlp.config
    assert torch.equal(loaded.score_sequence(ids), mlp.score_sequence(ids))
    card = (tmp_path / "mlp" / "README.md").read_text()
    assert "a shallow perceptron" in card
    assert "load_predictor(path, target_embedding=" in card
    double = load_predictor(tmp_path / "mlp", target_embedding=embedding_table(), dtype=torch.float64)
    assert double.score_sequence(ids).dtype == torch.float64


def test_the_embedding_is_shared_and_stored_only_when_asked(tmp_path):
    mlp = predictor(dtype=torch.float32)
    table = embedding_table()
    mlp.set_target_embedding(table)
    assert mlp.model.target_embedding is table
    mlp.save_pretrained(tmp_path / "whole", store_embedding=True, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    alone = load_predictor(tmp_path / "whole", dtype=torch.float32)
    ids = torch.arange(8)
    torch.testing.assert_close(alone.score_sequence(ids), mlp.score_sequence(ids), rtol=0.1, atol=0.5)


def test_no_embedding_no_scores(tmp_path):
    mlp = predictor(embedding=False)
    for misuse in (mlp.session, lambda: mlp.score_sequence(torch.arange(3))):
        with pytest.raises(ValueError, match="needs the target's token embedding; pass target_embedding="):
            misuse()
    with pytest.raises(
        ValueError, match=r"the target embedding is \(40, 5\), this predictor was made for \(40, 12\)"
    ):
        mlp.set_target_embedding(torch.zeros(V, 5))
    with pytest.raises(ValueError, match="needs the target's token embedding"):
        mlp.save_pretrained(tmp_path / "mlp", store_embedding=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"window_tokens": 2, "hidden_size": 10}}, r"options.hidden_layers must be a positive integer"),
        (
            {"options": {"window_tokens": 0, "hidden_size": 10, "hidden_layers": 1}},
            "window_tokens must be a positive",
        ),
        ({"embedding_size": None}, "embedding_size must be a positive integer, got None"),
        ({"input_mode": "backbone_embedding"}, "unknown PredictorConfig.input_mode 'backbone_embedding'.*allowed"),
        ({"backbone": {"model_type": "qwen3"}}, "backbone must be null for kind 'mlp'"),
        ({"head_rank": 4}, "head_rank must be null for kind 'mlp'"),
    ],
)
def test_configs_that_describe_no_perceptron(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(predictor().config, **change)


def test_damaged_bundles(tmp_path):
    folder = tmp_path / "mlp"
    predictor(dtype=torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if name != "layers.1.bias"}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'layers.1.bias' is missing"):
        load_predictor(folder)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["options"]["hidden_size"] = 11
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"tensor 'layers.0.weight' is \(10, 36\), config.json says \(11, 36\)"):
        load_predictor(folder)
    other = dataclasses.replace(
        predictor().config, options={"window_tokens": 3, "hidden_size": 9, "hidden_layers": 2}
    )
    assert isinstance(other, PredictorConfig)
    with pytest.raises(ValueError, match="config and network disagree"):
        MlpPredictor(other, predictor().model)
