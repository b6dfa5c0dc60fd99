"""RoutingSpec: round trip, every validation error, comparison."""

import dataclasses

import pytest

from ecospec.predictor import RoutingSpec
from tests.predictor_fakes import SPEC


def test_json_round_trip():
    assert RoutingSpec.from_dict(SPEC.to_dict()) == SPEC


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format_version", 2, "format_version is 2"),
        ("num_layers", 0, "num_layers must be a positive integer"),
        ("num_experts", True, "num_experts must be a positive integer"),
        ("top_k", 1.5, "top_k must be a positive integer"),
        ("vocab_size", -1, "vocab_size must be a positive integer"),
        ("layer_indices", (1, 2), "layer_indices has 2 entries, num_layers is 3"),
        ("layer_indices", (1, 2, 2), "non-negative and ascending"),
        ("layer_indices", (-1, 2, 3), "non-negative and ascending"),
        ("layer_indices", "123", "tuple of integers"),
        ("top_k", 9, "top_k 9 exceeds num_experts 8"),
        ("tokenizer_fingerprint", "abc", "tokenizer_fingerprint must be 64 lower-case hex"),
        ("target_fingerprint", "F" * 64, "target_fingerprint must be 64 lower-case hex"),
        ("target_id", None, "target_id must be a string"),
    ],
)
def test_every_field_is_validated_on_write_and_on_read(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **{field: value})
    stored = SPEC.to_dict() | {field: list(value) if isinstance(value, tuple) else value}
    with pytest.raises(ValueError, match=rf"^spec\.json: .*{message}"):
        RoutingSpec.from_dict(stored, "spec.json")


def test_unknown_and_missing_fields_name_field_and_file():
    with pytest.raises(ValueError, match=r"spec\.json: unknown RoutingSpec field 'colour'"):
        RoutingSpec.from_dict(SPEC.to_dict() | {"colour": 1}, "spec.json")
    data = SPEC.to_dict()
    del data["top_k"]
    with pytest.raises(ValueError, match=r"spec\.json: RoutingSpec field 'top_k' is missing"):
        RoutingSpec.from_dict(data, "spec.json")
    with pytest.raises(ValueError, match=r"spec\.json: a RoutingSpec must be a JSON object, got list"):
        RoutingSpec.from_dict([], "spec.json")  # type: ignore[arg-type]


def test_every_field_but_the_target_id_is_compared():
    SPEC.require_same(dataclasses.replace(SPEC, target_id="elsewhere"), mine="target", theirs="predictor")
    other = dataclasses.replace(SPEC, top_k=1, num_experts=16)
    assert SPEC.differences(other) == ["num_experts", "top_k"]
    with pytest.raises(
        ValueError, match="runs/p was made for another target than t: num_experts, top_k differ"
    ) as error:
        SPEC.require_same(other, mine="t", theirs="runs/p")
    assert "\n" not in str(error.value)


def test_expert_ids_fit_their_type():
    assert dataclasses.replace(SPEC, num_experts=256).expert_dtype == "uint8"
    assert dataclasses.replace(SPEC, num_experts=257).expert_dtype == "uint16"
