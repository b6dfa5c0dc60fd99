"""The model card of a predictor bundle, generated from its config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ecospec.predictor.predictor_config import InputMode, PredictorConfig

_WHAT = {
    "neural": "a causal backbone over the target's token embeddings with one linear head for all MoE layers",
    "random": "uniformly random experts, the floor of every comparison",
    "frequency": "the most used experts of each layer, whatever the token",
    "token_table": "the experts each token used most, backed off to the frequencies",
    "bigram_table": "the experts each pair of tokens used most, backed off to the token table",
    "token_ranking": "the experts each token used most, backed off to the frequencies; ids only, no probabilities",
    "bigram_ranking": "the experts each token pair used most, backed off to the token; ids only, no probabilities",
    "last_token": "the experts of the last verified token",
    "mlp": "a shallow perceptron over the target's embeddings of the last few tokens",
    "drafter_attached": "low-rank heads on the hidden states that a drafter has for every candidate",
}

# Longer lists, such as the groups of the training traces, are left to config.json.
_SHOWN_ITEMS = 128

_USAGE = {
    True: """from ecospec.predictor import load_predictor

predictor = load_predictor(path, target_embedding=target.get_input_embeddings())""",
    False: """from ecospec.predictor import load_predictor

predictor = load_predictor(path)""",
}

_SCORES = {
    True: """states = drafter.node_states(tree)  # of the drafter that options.drafter_fingerprint names
scores = session.score_states(tokens, parents, states)  # [nodes, layers, experts]""",
    False: "scores = session.score(tokens, parents)  # [nodes, layers, experts]",
}


def model_card(config: PredictorConfig) -> str:
    """Markdown card with the metadata block that the hub reads.

    Args:
        config: The bundle's config.

    Returns:
        The text of ``README.md``.
    """
    spec = config.spec
    lines = [
        "---",
        "library_name: ecospec",
        "tags: [ecospec, mixture-of-experts, speculative-decoding]",
        "---",
        "",
        f"# Expert predictor for {spec.target_id}",
        "",
        f"Predicts which {spec.top_k} of {spec.num_experts} experts each of {spec.num_layers} MoE layers will use:",
        f"{_what(config)}. Used by cost-aware speculative decoding; it never changes what the target emits.",
        "",
        "```python",
        _USAGE[config.input_mode == InputMode.TARGET_EMBEDDING and not config.embedding_stored],
        "session = predictor.session()",
        "session.prefill(prompt_ids[:-1])",
        _SCORES[config.kind == "drafter_attached"],
        "session.commit(path)",
        "```",
        "",
    ]
    lines += _table("Target", spec.to_dict())
    if config.backbone is not None:
        shown = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        network = {name: config.backbone[name] for name in shown if name in config.backbone}
        network |= {"input_mode": config.input_mode, "embedding_size": config.embedding_size}
        network |= {"head_rank": config.head_rank}
        network = {name: value for name, value in network.items() if value is not None}
        lines += _table("Network", network)
    lines += _table("Calibration", {"temperature": list(config.temperature)})
    for title, values in (
        ("Options", config.options),
        ("Metrics", config.metrics),
        ("Training data", config.training_data),
        ("Provenance", config.provenance),
    ):
        lines += _table(title, values)
    return "\n".join(lines)


def _what(config: PredictorConfig) -> str:
    """What the predictor is, in half a sentence."""
    if config.input_mode == InputMode.BACKBONE_EMBEDDING:
        return _WHAT["neural"].replace("the target's", "its own")
    return _WHAT[config.kind]


def _table(title: str, values: Mapping[str, Any]) -> list[str]:
    """A two-column Markdown section; empty for no values."""
    if not values:
        return []
    rows = [f"| {key} | {_cell(value)} |" for key, value in _flatten(values)]
    return [f"## {title}", "", "| | |", "|---|---|", *rows, ""]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cell(value: Any) -> str:
    """A value on one line that does not break the table."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(value) > _SHOWN_ITEMS:
        return f"{len(value)} entries, in config.json"
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|")
