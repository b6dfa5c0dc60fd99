"""``ecospec calibrate-cost`` on a tiny target of a real tokenizer."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ecospec.cli.calibrate_cost import CalibrateCostConfig, run
from ecospec.decoding.cost_model import CostModel
from ecospec.decoding.experts_choice import CANDIDATES
from ecospec.predictor.fingerprint import routing_spec_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, checkpoints):
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "target")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=256,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    lines = [
        json.dumps({"text": f"def function_{number}(argument):\n    return argument\n" * 8}) for number in range(3)
    ]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def options(tiny, out, **changes):
    values = {
        "target": tiny / "target",
        "out": out,
        "prompts": str(tiny / "text.jsonl"),
        "contexts": 2,
        "context_length": 12,
        "max_tokens": 4,
        "repeats": 1,
        "widening_factor": 2,
        "allow_load": True,
    }
    return CalibrateCostConfig(**values | changes)


def test_bare(tiny, tmp_path, capsys):
    run(options(tiny, tmp_path / "cost.json"))
    model = CostModel.load(tmp_path / "cost.json")
    assert model.spec == routing_spec_of(tiny / "target")
    assert (model.level, model.widening_factor, model.ballast_bytes_per_layer) == ("bare", 2, 0)
    assert model.context_length == 12
    assert model.experts_implementation in CANDIDATES
    assert [row.tokens for row in model.table] == [1, 2, 3, 4]
    assert len(model.mean_curve) == 4
    assert model.provenance["versions"]["torch"]
    assert "step time in ms, level bare" in capsys.readouterr().out


def test_ballast_of_a_given_size(tiny, tmp_path):
    run(options(tiny, tmp_path / "cost.json", level="ballast", ballast_bytes=2**16))
    model = CostModel.load(tmp_path / "cost.json")
    assert (model.level, model.ballast_bytes_per_layer, model.ballast_target_ratio) == ("ballast", 2**16, None)


def test_prompts_that_are_too_short(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"no prompt of .*text.jsonl has 5004 tokens; choose others"):
        run(options(tiny, tmp_path / "cost.json", context_length=5000))
    assert not (tmp_path / "cost.json").exists()
